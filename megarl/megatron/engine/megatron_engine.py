"""The engine: one rank's part of a model, with forward, backward and optimizer steps over packed micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from torch import Tensor

from megarl.base.errors import ConfigError
from megarl.base.image_tokens import Image
from megarl.megatron.engine.faults import FaultWatch, OutOfMemoryVote, SkipReport, skip_report
from megarl.megatron.engine.model import build_model
from megarl.megatron.engine.offload import GRAD, OPTIMIZER, PARAM, OffloadManager
from megarl.megatron.engine.optimizer import Optimizer, StepResult
from megarl.megatron.engine.options import MegatronOptions
from megarl.megatron.engine.schedule_runner import ScheduleRunner, wrap_data_parallel
from megarl.megatron.engine.weights import RankWeights
from megarl.megatron.layers.context_parallel import MicroBatchPart, gather_outputs
from megarl.megatron.layers.kernels import kernels
from megarl.megatron.layers.lora import Adapters, LowRankAdapter, add_adapters
from megarl.megatron.layers.moe import drop_autograd_graphs
from megarl.megatron.layers.outputs import (
    DEFAULT_OUTPUTS,
    OutputOptions,
    Outputs,
    ValueOutputs,
    mean_of_rows,
    policy_outputs,
)
from megarl.megatron.layers.packed import PackedMicroBatch, begin_copy_to_host
from megarl.megatron.layers.routing import Routing, RoutingPass
from megarl.megatron.runtime import cuda_on_cpu
from megarl.megatron.runtime.memory import HostCopy
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models import ModelConfig, ModelFolder, ParallelLayout, WeightMap, check_layout
from megarl.models.adapters import AdapterMap
from megarl.models.hf_folder import ModelIdentity, identify_model
from megarl.models.hf_writer import NO_FILES, HFWriter
from megarl.models.peft_folder import AdapterFolder
from megarl.models.vision_tower import ImageFeatures
from megarl.tracing import span

TrainedCopy = HostCopy | dict[str, Tensor]
"""A copy of weights, or of adapters by name, in host memory."""
LossFunction = Callable[[Any, PackedMicroBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Computes this micro-batch's share of the global loss, already divided by global counts, and its metrics, which are
summed over micro-batches and data-parallel ranks. Called on the last stage, with the same result on each
tensor-parallel rank and the micro-batch on the device of the outputs.
"""


class MegatronEngine:
    """A rank's part of one model.

    Methods that communicate say so; all ranks of the role must call them. Every public method enters
    ``cuda_on_cpu.active()``, the scope that lets Megatron run on a CPU, because the scope belongs to a thread.

    Attributes:
        trained_map: map of the parameters that checkpoints contain: all weights, or with LoRA the adapters.
        base: identity of the frozen model under the adapters, on rank 0; None without adapters.
        chunks: Megatron's modules of this rank, wrapped for data parallelism if there is an optimizer.

    Raises:
        ConfigError: the layout differs from the runtime's, or does not fit the model.
    """

    def __init__(self, model: ModelConfig, layout: ParallelLayout, runtime: Runtime, options: MegatronOptions) -> None:
        with cuda_on_cpu.active():
            if layout != runtime.layout:
                text = f"layout {layout.describe()} is not that of the process group: {runtime.layout.describe()}"
                raise ConfigError(text, code="layout.process-group")
            check_layout(model, layout, "megatron")
            self.model = model
            self.runtime = runtime
            self.options = options
            self.weight_map = WeightMap(model, options.value_head)
            self._stage = build_model(model, runtime, options)
            experts = model.experts
            self._routing = None if experts is None else Routing(self._stage.chunks, experts, model.num_layers, runtime)
            self._expert_load: Tensor | None = None
            self._vote = OutOfMemoryVote(runtime, enabled=options.repeat_out_of_memory)
            self.chunks: list[Any] = list(self._stage.chunks)
            self.trained_map: WeightMap | AdapterMap = self.weight_map
            self.base: ModelIdentity | None = None
            self._adapters: Adapters | None = None
            if options.lora is not None:
                self.trained_map = AdapterMap(self.weight_map, options.lora)
                self.trained_map.check_layout(layout)
                self._adapters = add_adapters(self.chunks, self.trained_map, runtime)
            self.optimizer: Optimizer | None = None
            if options.optimizer is None:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
            else:
                self.chunks = wrap_data_parallel(self._stage, options.optimizer, options.overlap, self._vote)
                self.optimizer = Optimizer(self.chunks, options.optimizer, options.dtype)
            self.offload_manager = OffloadManager(self.chunks, self.optimizer, options.offload, runtime.device)
            offload = self.offload_manager
            self._runner = ScheduleRunner(
                self._stage, self.chunks, runtime, self._vote, self._routing, offload, options.overlap
            )
            gather = self._runner.gather_weights
            self.weights = RankWeights(self._stage.chunks, self.weight_map, runtime, offload, gather, self._adapters)
            self._loss = torch.zeros(())
            self._faults = FaultWatch()

    def offload(self, *, return_cached: bool = True) -> dict[str, int]:
        """Offload the configured parts at the end of a phase and free cached memory; return the bytes by part."""
        self._faults = FaultWatch()  # it holds the outputs of the last step
        if self._runner.images is not None:
            self._runner.images.end_phase(offloads=PARAM in self.options.offload)
        return self.offload_manager.offload(return_cached=return_cached)

    def describe(self) -> str:
        """Describe layout, number format and kernels in one line."""
        options, device = self.options, self.runtime.device
        used = kernels(self.model, device, options.dtype, trains=options.optimizer is not None)
        text = ", ".join(f"{part}: {kernel}" for part, kernel in used.items())
        name = str(options.dtype).removeprefix("torch.")
        return f"{self.runtime.layout.describe()} on {device.type} in {name}; {text}, Megatron-Core {megatron_version}"

    # ---- weights

    def load_hf(self, path: str | Path) -> None:
        """Load this rank's shard of a Hugging Face folder; may communicate. A missing value head stays zero.

        Raises:
            ModelError: the folder is of another model, or incomplete.
        """
        if self.options.lora is not None and self.runtime.rank == 0:
            self.base = identify_model(path)
        with cuda_on_cpu.active():
            self.weights.load_hf(path)
            self.weights_changed()

    def set_images(self, folder: str | Path, options: Mapping[str, Any]) -> None:
        """Prepare the features of images; a no-op on pipeline stages that do not need them.

        Args:
            folder: model folder with the image processor, and the weights of a frozen tower.
            options: settings of the image processor.
        """
        if any(chunk.takes_images for chunk in self._stage.chunks):
            tower = self._stage.chunks[0].vision_tower
            features = ImageFeatures(self.model, folder, self.runtime.device, self.options.dtype, options, tower)
            features.load()  # its memory is taken before an engine measures what is free
            self._runner.images = features

    def take_images(self, images: Iterable[Image]) -> None:
        """Take images before a pass over rows that have them, which computes their features; a no-op on other stages.

        Raises:
            DataError: two images have the same key.
        """
        if self._runner.images is not None:
            self._runner.images.register(images)

    def drop_features(self) -> None:
        """Drop the features of a trained vision tower, whose weights changed."""
        if self._runner.images is not None:
            self._runner.images.clear()

    @contextmanager
    def _without_features(self, scope: AbstractContextManager[None]) -> Iterator[None]:
        """Enter a scope in which the model has other weights, and so other features of images."""
        try:
            with scope:
                self.drop_features()
                yield
        finally:
            self.drop_features()

    def load_adapters(self, path: str | Path) -> None:
        """Load this rank's shard of adapters in peft's format.

        Raises:
            ConfigError: the folder is damaged, or has other adapters than this model.
        """
        assert isinstance(self.trained_map, AdapterMap), "the model has no adapters"
        folder = AdapterFolder(path)
        folder.check(self.trained_map)
        if self.base is not None:
            folder.check_base(self.base.path)
        with cuda_on_cpu.active():
            self.weights.load_adapters(ModelFolder(folder.path, self.model, folder.tensors), self.trained_map)
            self.weights_changed()

    def weights_changed(self) -> None:
        """Copy weights that were set from outside into the optimizer, if there is one."""
        self.drop_features()
        if self.optimizer is not None:
            self.offload_manager.onload(PARAM, OPTIMIZER)
            self.offload_manager.mark_changed(OPTIMIZER)
            self.optimizer.megatron.reload_model_params()

    def export_hf(
        self,
        path: str | Path,
        source: str | Path | None = None,
        *,
        overwrite: bool = False,
        files: Mapping[str, str] = NO_FILES,
    ) -> None:
        """Write the model as a Hugging Face folder; communicates.

        Args:
            path: the new folder; only rank 0 writes.
            source: folder of the initial model, whose tokenizer and multi-token prediction layers are copied.

        Raises:
            CheckpointError: on every rank, if rank 0 cannot write, or the folder exists and ``overwrite`` is off.
        """

        def writer() -> HFWriter:
            shapes = self.weight_map.hf_shapes()
            exact = [name for name in shapes if self.weight_map.is_float32(name)]
            return HFWriter(path, self.model, shapes, float32=exact, copy_from=source, overwrite=overwrite, files=files)

        with cuda_on_cpu.active():
            self.weights.export(writer)

    def copy_weights(self, reuse: TrainedCopy | None = None) -> TrainedCopy:
        """Copy this rank's weights, with LoRA its adapters, to host memory or over ``reuse``; may communicate."""
        self.weights.gather_pending()
        if self._adapters is not None:
            return self._adapters.copy()
        assert reuse is None or isinstance(reuse, HostCopy)
        return self.offload_manager.weights.copy(reuse)

    def swapped_weights(self, copy: TrainedCopy) -> AbstractContextManager[None]:
        """Swap in a :meth:`copy_weights` within the context, in which the optimizer must not step."""
        if isinstance(copy, HostCopy):
            self._runner.gather_weights()
            return self._without_features(self.offload_manager.weights.swapped(copy))
        assert self._adapters is not None, "the model has no adapters"
        self.weights.gather_pending()
        return self._without_features(self._adapters.swapped(copy))

    def adapters_off(self) -> AbstractContextManager[None]:
        """Compute with the base model within the context, as the reference policy of LoRA; may communicate."""
        assert self._adapters is not None, "the model has no adapters"
        self.weights.gather_pending()
        return self._without_features(self._adapters.off())

    # ---- computing

    @torch.no_grad()
    def forward(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        options: OutputOptions = DEFAULT_OUTPUTS,
    ) -> list[Any] | None:
        """Compute outputs without gradients; communicates within the tensor- and pipeline-parallel groups.

        Args:
            micro_batches: the same on each rank of a pipeline; at least one.

        Returns:
            :class:`PolicyOutputs` or :class:`ValueOutputs` per micro-batch, on the last stage's ranks; None on others.
        """
        with cuda_on_cpu.active():
            read, run = partial(self._outputs, options), RoutingPass(records=options.record_routes)
            outputs = self._runner.run(micro_batches, read, self._drop_graphs, forward_only=True, routing=run)
            if options.record_routes:
                assert self._routing is not None, "a dense model has no routes"
                routes = self._routing.recorded(micro_batches)
                outputs = [
                    replace(output, routes=micro_batch.per_row(each))
                    for output, micro_batch, each in zip(outputs, micro_batches, routes, strict=False)
                ]
            return outputs if self.runtime.is_last_stage else None

    @torch.no_grad()
    def hidden(self, micro_batches: Sequence[PackedMicroBatch]) -> list[Tensor] | None:
        """Compute the final hidden states that predict the response tokens, without gradients; communicates.

        Returns:
            ``[response tokens, hidden]`` per micro-batch in host memory, after the final norm, on the last stage's
            ranks; None on others.
        """

        def read(output: Tensor, part: MicroBatchPart, micro_batch: PackedMicroBatch) -> Tensor:
            return begin_copy_to_host(gather_outputs(output, part, self.runtime.cp_group))

        outputs = self._read_hidden(micro_batches, read)
        if self.runtime.device.type == "cuda":
            torch.cuda.current_stream(self.runtime.device).synchronize()  # once, for all copies
        return outputs

    def output_weight(self) -> Tensor | None:
        """Copy this rank's rows of the output layer, ``[padded vocab / tp, hidden]``; None before the last stage.

        The adapter is merged unless it is off.
        """
        self.offload_manager.onload(PARAM)
        weight = self._stage.chunks[-1].output_weight()
        adapter: LowRankAdapter | None = getattr(getattr(self._stage.chunks[-1], "output_layer", None), "lora", None)
        if weight is None or adapter is None or not adapter.enabled:
            return weight
        return adapter.merged(weight, adapter.factors(weight))

    @torch.no_grad()
    def mean_hidden(self, micro_batches: Sequence[PackedMicroBatch]) -> list[Tensor] | None:
        """Compute the mean final hidden state of each row's marked response tokens, without gradients; communicates.

        Args:
            micro_batches: packed with ``at_tokens`` and a column :data:`~megarl.megatron.layers.outputs.POOLED`.

        Returns:
            ``[rows, hidden]`` float32 per micro-batch, after the final norm, on the last stage's ranks; None on others.
            A row without marked tokens has zeros.
        """
        return self._read_hidden(micro_batches, partial(mean_of_rows, group=self.runtime.cp_group))

    def _read_hidden(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        read: Callable[[Tensor, MicroBatchPart, PackedMicroBatch], Tensor],
    ) -> list[Tensor] | None:
        with cuda_on_cpu.active():
            outputs = self._runner.run(micro_batches, read, self._drop_graphs, forward_only=True, hidden_only=True)
        return outputs if self.runtime.is_last_stage else None

    def forward_backward(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        loss: LossFunction,
        options: OutputOptions = DEFAULT_OUTPUTS,
    ) -> dict[str, float]:
        """Compute the gradient of the global loss, the sum over micro-batches and data-parallel ranks; communicates.

        Drops gradients of an earlier call. The result does not depend on how rows are divided into micro-batches and
        over data-parallel ranks. Returns the sums of the metrics of ``loss``, the same on every rank.
        """
        with cuda_on_cpu.active():
            optimizer = self._need_optimizer()
            self.offload_manager.onload(GRAD)
            self.offload_manager.mark_changed(PARAM)  # a backward updates the correction of a router's choice
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            optimizer.megatron.zero_grad()
            self._loss = torch.zeros((), device=self.runtime.device)
            self._faults = FaultWatch()

            def read(output: Tensor, part: MicroBatchPart, micro_batch: PackedMicroBatch) -> Any:
                return self._contribute(loss, self._outputs(options, output, part, micro_batch), micro_batch)

            run = self._training_pass(micro_batches)
            metrics = self._runner.run(micro_batches, read, self._drop_graphs, forward_only=False, routing=run)
            for chunk in self.chunks:
                drop_autograd_graphs(chunk)
            sums = self._sum_metrics(metrics)
            if self._routing is not None:
                self._expert_load, expert_metrics = self._routing.sums()
                sums |= expert_metrics
            return sums

    def _training_pass(self, micro_batches: Sequence[PackedMicroBatch]) -> RoutingPass:
        """The routers' part of a pass with gradients; communicates if there are losses that balance experts."""
        if self._routing is None or not self._routing.balance:
            return RoutingPass(trains=True)
        lengths = [length for micro_batch in micro_batches for length in micro_batch.lengths]
        sequences, tokens = self.all_reduce_dp(torch.tensor([len(lengths), sum(lengths)])).tolist()
        return RoutingPass(trains=True, sequences=sequences, tokens=tokens)

    def optimizer_step(self) -> StepResult:
        """Clip the gradient and step; skips on every rank if a loss or gradient is not finite. Communicates."""
        with cuda_on_cpu.active():
            assert GRAD not in self.offload_manager.offloaded, "the gradients were offloaded before the optimizer step"
            self.offload_manager.onload(PARAM, OPTIMIZER)
            self.offload_manager.mark_changed(PARAM, OPTIMIZER)
            with span("optimizer step", "compute"):
                result = self._need_optimizer().step(self._loss)
            self._runner.gather_is_pending = self.options.overlap.param_gather
            self.drop_features()
            if self._routing is not None and self._expert_load is not None and not result.skipped:
                self._routing.update_biases(self._expert_load)
            return result

    def explain_skip(self, describe: Callable[[int, int], str]) -> SkipReport:
        """Report why the last step was skipped, the same on every rank; ``describe`` names a sample. Communicates."""
        with cuda_on_cpu.active():
            return skip_report(self._faults.findings(self.weights.parameters(), describe))

    @property
    def can_share_prompts(self) -> bool:
        """Whether micro-batches may store a shared prompt once; not with context parallelism."""
        return self.runtime.layout.cp == 1

    def all_reduce_dp(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the data-parallel ranks, on the tensor's device; communicates."""
        total = tensor.to(self.runtime.device, copy=True)
        dist.all_reduce(total, group=self.runtime.dp_group)
        return total.to(tensor.device)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """Compute the maximum of ``tensor`` over all ranks of the role, on the tensor's device; communicates."""
        largest = tensor.to(self.runtime.device, copy=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.to(tensor.device)

    def _need_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            text = "this engine was built with optimizer=None: it only computes forward"
            raise ConfigError(text, code="engine.no-optimizer")
        return self.optimizer

    def _drop_graphs(self) -> None:
        """Drop what keeps the activations of an interrupted pass."""
        self._faults = FaultWatch()
        self._runner.drop_graphs()

    def _outputs(
        self, options: OutputOptions, output: Tensor, part: MicroBatchPart, micro_batch: PackedMicroBatch
    ) -> Outputs:
        """Gather a micro-batch's outputs from this rank's part of the last layer's output; communicates."""
        if self.options.value_head:
            return ValueOutputs(gather_outputs(output, part, self.runtime.cp_group))
        return policy_outputs(output, part, micro_batch, options, self.model.vocab_size, self.runtime)

    def _contribute(
        self, loss: LossFunction, outputs: Outputs, micro_batch: PackedMicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, a token count that nothing divides by, and the metrics, for the schedule."""
        value, metrics = loss(outputs, micro_batch)
        self._loss = self._loss + value.detach()
        self._faults.watch(value, vars(outputs).values(), micro_batch.response_lengths)
        # The schedule frees the loss's memory, which must therefore not be shared with a metric.
        return value.clone(), torch.zeros((), dtype=torch.int), {k: v.detach().clone() for k, v in metrics.items()}

    def _sum_metrics(self, contributions: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        result: list[dict[str, float]] = [{}]
        if self.runtime.is_last_stage:
            sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
            for metrics in contributions:
                for name, value in metrics.items():
                    sums[name] = sums[name] + value.double()
            names = sorted(sums)
            total = self.all_reduce_dp(torch.stack([sums[name] for name in names])) if names else torch.empty(0)
            result = [dict(zip(names, total.tolist(), strict=True))]
        if self.runtime.layout.pp > 1:
            # Earlier stages do not know the names.
            last = self.runtime.layout.rank(**{**self.runtime.coordinate._asdict(), "pp": self.runtime.layout.pp - 1})
            dist.broadcast_object_list(result, src=last, group=self.runtime.pp_group)
        return result[0]
