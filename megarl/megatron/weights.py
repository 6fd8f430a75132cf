"""A rank's weights under their global names: reading them from Hugging Face, exporting them, exchanging them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from megarl.errors import ModelError
from megarl.megatron.runtime import Runtime
from megarl.models import LocalParam, WeightMap, canonical_name
from megarl.models.hf_checkpoint import HFReader, load_local

VALUE_HEAD = "score.weight"


def global_names(module: GPTModel) -> dict[str, nn.Parameter]:
    """Parameters of a stage's model by their name in the weight map, which has the global layer number."""
    names = {}
    layers = [f"decoder.layers.{layer.layer_number - 1}" for layer in module.decoder.layers]
    for name, param in module.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"{layers[int(local)]}.{rest}"
        names[canonical_name(name)] = param
    return names


class RankWeights:
    """The weights of one rank.

    Args:
        module: the stage's model.
        weight_map: how its parameters come about from Hugging Face tensors.
        runtime: the rank's place.
    """

    def __init__(self, module: GPTModel, weight_map: WeightMap, runtime: Runtime) -> None:
        self._params = global_names(module)
        self._dtype = module.config.params_dtype
        self._map = weight_map
        self._runtime = runtime

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the weight map."""
        return dict(self._params)

    def named(self) -> dict[str, Tensor]:
        """The weights themselves, not copies, detached from autograd."""
        return {name: param.detach() for name, param in self._params.items()}

    @torch.no_grad()
    def load_hf(self, path: str | Path) -> None:
        """Reads this rank's slices of a model folder.

        A value head that the folder lacks keeps what it is.

        Raises:
            ModelError: a tensor is missing or has another shape than the model's.
        """
        reader = HFReader(path)
        wanted = self._map.megatron_params(self._runtime.layout, self._runtime.rank)
        loaded = set()
        for name, tensor in load_local(reader, wanted, self._dtype, optional=(VALUE_HEAD,)):
            param = self._params.get(name)
            if param is None or param.shape != tensor.shape:
                has = "no such parameter" if param is None else f"shape {list(param.shape)}"
                raise ModelError(f"weight map: '{name}' has shape {list(tensor.shape)}, the model has {has}")
            param.copy_(tensor)
            loaded.add(name)
        absent = set(self._params) - loaded - ({"output_layer.weight"} if self._map.value_head else set())
        if absent:
            raise ModelError(f"weight map has no entry for the model's parameters {sorted(absent)}")

    def export(self, consume: Callable[[LocalParam, Tensor], None]) -> None:
        """Brings every part of the model to rank 0, one at a time; all ranks call this together.

        Args:
            consume: called on rank 0 with each part and its values on the CPU. Tensor-parallel parts of one parameter
                follow one another, so that whole tensors can be written early.
        """
        for owner, param in self._export_order():
            if self._runtime.rank == 0:
                mine = owner == 0
                part = self._params[param.name].detach() if mine else self._empty(param.shape)
                if not mine:
                    dist.recv(part, src=owner)
                consume(param, part.cpu())
            elif self._runtime.rank == owner:
                dist.send(self._params[param.name].detach().contiguous(), dst=0)

    def to_host(self) -> dict[str, Tensor]:
        """A copy in host memory."""
        return {
            name: param.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, param in self._params.items()
        }

    @contextlib.contextmanager
    def swapped(self, snapshot: Mapping[str, Tensor]) -> Iterator[None]:
        """Scope in which the model has the weights of ``snapshot``; afterwards its own again, bit for bit.

        The optimizer must not step within it.

        Raises:
            KeyError: the snapshot is not of this rank's model.
        """
        if set(snapshot) != set(self._params):
            raise KeyError(f"snapshot holds other parameters: {sorted(set(snapshot) ^ set(self._params))}")
        own = self.to_host()
        self._set(snapshot)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.copy_(values[name])

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._runtime.device)

    def _export_order(self) -> Iterator[tuple[int, LocalParam]]:
        layout = self._runtime.layout
        for stage in range(layout.pp):
            ranks = [layout.rank(tp=tp, pp=stage) for tp in range(layout.tp)]
            parts = {rank: {p.name: p for p in self._map.export_params(layout, rank)} for rank in ranks}
            for name in parts[ranks[0]]:
                for rank in ranks:
                    if name in parts[rank]:
                        yield rank, parts[rank][name]
