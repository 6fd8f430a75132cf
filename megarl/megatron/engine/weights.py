"""A rank's weights by global name: import from Hugging Face, and export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from megarl.base.errors import MegarlError, ModelError
from megarl.megatron.engine.offload import PARAM, OffloadManager
from megarl.megatron.layers.lora import Adapters, first_expert, global_naming
from megarl.megatron.runtime.process_groups import RankTurns, Runtime
from megarl.models import LocalParam, ParallelLayout, WeightMap
from megarl.models.adapters import AdapterMap
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.hf_folder import ModelFolder
from megarl.models.hf_writer import HFWriter

VALUE_HEAD = ("score.weight", "score.bias")


class RankWeights:
    """The weights of one rank.

    Args:
        gather: called before weights are read or set: updates them to the last step's; may communicate with all
            data-parallel ranks.
        adapters: merged into the weights that are read; None without LoRA.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        weight_map: WeightMap,
        runtime: Runtime,
        offload_manager: OffloadManager,
        gather: Callable[[], None],
        adapters: Adapters | None = None,
    ) -> None:
        first = first_expert(weight_map.config, runtime)
        named = ((global_naming(chunk, first), chunk.named_parameters()) for chunk in chunks)
        self._params = {rename(name): param for rename, params in named for name, param in params}
        self._trained = self._params
        if adapters is not None:
            self._trained = adapters.parameters()
            added = {id(param) for name, param in self._trained.items() if name not in self._params}
            self._params = {name: param for name, param in self._params.items() if id(param) not in added}
        self._adapters = adapters
        self._dtype = chunks[0].config.params_dtype
        self._map = weight_map
        self._runtime = runtime
        self._offload_manager = offload_manager
        self._gather = gather

    def gather_pending(self) -> None:
        """Bring the last step's weights to the device; may communicate."""
        self._gather()
        self._offload_manager.onload(PARAM)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters on the device, by their names in ``trained_map``; they may be changed."""
        self.gather_pending()
        self._offload_manager.mark_changed(PARAM)
        return dict(self._trained)

    def stored(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters, offloaded or not, by their names in the engine's ``trained_map``."""
        self._gather()
        return dict(self._trained)

    def named(self) -> Mapping[str, Tensor]:
        """Return the weights on the device, with merged adapters and detached; only to be read. May communicate."""
        self.gather_pending()
        weights = {name: param.detach() for name, param in self._params.items()}
        return weights if self._adapters is None else self._adapters.merged(weights)

    @torch.no_grad()
    def load_hf(self, path: str | Path) -> None:
        """Load this rank's shard of a model folder, and set DoRA's magnitudes to its rows' norms; may communicate.

        A missing value head is left unchanged.

        Raises:
            ModelError: a tensor is missing or has another shape than the model's.
        """
        self.gather_pending()
        self._offload_manager.mark_changed(PARAM)
        reader = HFReader(path)
        local_params = self._map.megatron_params(self._runtime.layout, self._runtime.rank)
        loaded = set()
        for name, tensor in load_local(reader, local_params, self._dtype, VALUE_HEAD, self._map.is_float32):
            param = self._params.get(name)
            if param is None or param.shape != tensor.shape:
                has = "no such parameter" if param is None else f"shape {list(param.shape)}"
                text = f"weight map: '{name}' has shape {list(tensor.shape)}, the model has {has}"
                raise ModelError(text, code="model.weight-map-shape")
            param.copy_(tensor)
            loaded.add(name)
        heads = {"output_layer.weight", "output_layer.bias"} if self._map.value_head else set()
        absent = set(self._params) - loaded - heads
        if absent:
            text = f"weight map has no entry for the model's parameters {sorted(absent)}"
            raise ModelError(text, code="model.weight-map-missing")
        if self._adapters is not None:
            self._adapters.begin(self._params)

    @torch.no_grad()
    def load_adapters(self, folder: ModelFolder, trained: AdapterMap) -> None:
        """Load this rank's shard of saved adapters; a scalar head that the folder lacks is left unchanged."""
        params = self.parameters()
        local_params = trained.megatron_params(self._runtime.layout, self._runtime.rank)
        for name, tensor in load_local(HFReader(folder), local_params, self._dtype, VALUE_HEAD):
            params[name].copy_(tensor)

    def export(self, writer: Callable[[], HFWriter]) -> None:
        """Write the model on rank 0, which receives it part by part; all ranks must call this.

        The other ranks wait for their turns outside collectives, because rank 0 writes large files meanwhile. A
        parameter's parts are consecutive, so that whole tensors can be written early.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write.
        """
        self._gather()
        merged = None if self._adapters is None else self.named()
        turns, rank = self._runtime.barrier.turns(), self._runtime.rank
        if rank != 0:
            for param in [param for owner, param in self._export_order() if owner == rank]:
                turns.wait()
                dist.send(self._values(param, merged).to(self._runtime.device), dst=0)
            turns.wait()  # for the end
            return
        try:
            with writer() as files:
                for owner, param in self._export_order():
                    values = self._receive(param, owner, turns) if owner else self._values(param, merged)
                    files.add(param, values.cpu())
        except BaseException as error:
            turns.fail(error.text if isinstance(error, MegarlError) else f"{type(error).__name__}: {error}")
            raise
        for other in range(1, self._runtime.layout.world_size):
            turns.call(other)

    def to_host(self) -> dict[str, Tensor]:
        """Copy the weights to host memory."""
        weights, form = self.named(), torch.contiguous_format
        return {name: weight.to("cpu", copy=True, memory_format=form) for name, weight in weights.items()}

    def _values(self, param: LocalParam, merged: Mapping[str, Tensor] | None) -> Tensor:
        """Return a weight's values: a device view, a copy of offloaded memory, or merged with its adapters."""
        if merged is not None:
            return merged[param.name]
        return self._offload_manager.memory(self._params[param.name]).joined().view(param.shape)

    def _receive(self, param: LocalParam, owner: int, turns: RankTurns) -> Tensor:
        exact = any(self._map.is_float32(piece.hf_name) for piece in param.pieces)
        dtype = torch.float32 if exact else self._dtype
        part = torch.empty(param.shape, dtype=dtype, device=self._runtime.device)
        turns.call(owner)
        dist.recv(part, src=owner)
        return part

    def _export_order(self) -> Iterator[tuple[int, LocalParam]]:
        layout = self._runtime.layout
        whole = [param.name for param in self._map.megatron_params(ParallelLayout(), 0)]
        for stage in range(layout.pp):
            parts: dict[str, list[tuple[int, LocalParam]]] = defaultdict(list)
            for rank in range(stage * layout.ranks_per_stage, (stage + 1) * layout.ranks_per_stage):
                for param in self._map.export_params(layout, rank):
                    parts[param.name].append((rank, param))
            for name in whole:
                yield from parts.get(name, ())
