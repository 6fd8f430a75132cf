"""Passes through Megatron's pipeline schedule over packed micro-batches, and its hooks: gradients, exchange, spans.

The next micro-batch is prepared on the host while the device computes the current one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.base.errors import ConfigError, DataError
from megarl.megatron.engine.faults import OutOfMemoryVote
from megarl.megatron.engine.model import PackedModel, StageModel
from megarl.megatron.engine.offload import PARAM, OffloadManager
from megarl.megatron.engine.optimizer import OptimizerOptions
from megarl.megatron.engine.options import OverlapOptions
from megarl.megatron.layers.context_parallel import MicroBatchPart, context_parallel_part, part_tokens
from megarl.megatron.layers.moe import drop_autograd_graphs
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.megatron.layers.routing import INFERENCE, RoutedTokens, Routing, RoutingPass
from megarl.megatron.layers.torch_layers import PackedSequences
from megarl.megatron.runtime import cuda_on_cpu
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models.vision_tower import ImageFeatures
from megarl.tracing import TRACER, span

_SPAN_NAMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward": "micro-batches",
    "all-grads-sync": "sum gradients",
}


def wrap_data_parallel(
    stage: StageModel, options: OptimizerOptions, overlap: OverlapOptions, vote: OutOfMemoryVote
) -> list[DistributedDataParallel]:
    """Wrap the chunks of a stage for the sum of their gradients over data-parallel ranks.

    Args:
        stage: this rank's chunks; the schedule's hooks are set in their config.
        vote: votes before the sum, in which other ranks wait for this one.
    """
    config = stage.chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_grad_reduce=overlap.grad_reduce,
        overlap_param_gather=overlap.param_gather,
        bucket_size=overlap.bucket_size,
    )
    chunks = [
        # The first chunk's backward runs last: only there does bucketed communication save time.
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(stage.chunks)
    ]

    def sum_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **more: Any) -> None:
        """Megatron's ``finalize_model_grads`` without its division by a token count: losses are already normalized."""
        vote.agree()
        finalize_model_grads(chunks, None, **more)

    config.finalize_model_grads_func = sum_gradients
    if overlap.grad_reduce:
        scopes = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = scopes if len(scopes) > 1 else scopes[0]
    return chunks


class ScheduleRunner:
    """Runs passes of one rank's chunks: loads micro-batches, exchanges activations, votes on memory.

    Args:
        chunks: its chunks, wrapped for data parallelism if they are trained.
        routing: the routers; None for a dense model.

    Attributes:
        gather_is_pending: the weights of the last step are gathered by the next forward, or by :meth:`gather_weights`.
        images: features of images, on the first stage of a model that sees them.
    """

    def __init__(
        self,
        stage: StageModel,
        chunks: Sequence[Any],
        runtime: Runtime,
        vote: OutOfMemoryVote,
        routing: Routing | None,
        offload: OffloadManager,
        overlap: OverlapOptions,
    ) -> None:
        self._stage, self._chunks, self._runtime, self._vote = stage, list(chunks), runtime, vote
        self._routing, self._offload, self._overlap = routing, offload, overlap
        self.gather_is_pending = False
        self.images: ImageFeatures | None = None
        self._config = stage.chunks[0].config
        # Sequence parallelism divides every rank's tokens.
        self._multiple = runtime.layout.tp if self._config.sequence_parallel else 1
        self._exchange = StageExchange(runtime.pp_group, self._config) if runtime.layout.pp > 1 else None
        if self._exchange is not None and runtime.layout.vpp > 1:
            self._exchange.connect()

    def gather_weights(self) -> None:
        """Gather the weights of the last step, if that was deferred to the next forward; communicates then."""
        if self.gather_is_pending:
            self._offload.onload(PARAM)
            self._offload.mark_changed(PARAM)
            with cuda_on_cpu.active():
                for chunk in self._chunks:
                    chunk.start_param_sync(force_sync=True)
            self.gather_is_pending = False

    def run(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        read: Callable[[Tensor, MicroBatchPart, PackedMicroBatch], Any],
        clean_up: Callable[[], None],
        *,
        forward_only: bool,
        hidden_only: bool = False,
        routing: RoutingPass = INFERENCE,
    ) -> list[Any]:
        """Run a pass over micro-batches; communicates.

        Args:
            micro_batches: the same on each rank of a pipeline; at least one.
            read: converts the output of the last stage's model to a result.

        Returns:
            The results on the last stage, in order.

        Raises:
            DeviceMemoryError: a rank ran out of memory; on all ranks if the pass can be repeated.
        """
        reduces_early = self._overlap.grad_reduce and self._runtime.dp_cp_group.size() > 1 and not forward_only
        forward_step = self._forward_step(read, len(micro_batches) if reduces_early else None, hidden_only)
        self._check_number(len(micro_batches))
        self._offload.onload(PARAM)
        if self.images is not None and self.images.is_trained:
            # Ranks with and without images would begin the gathers of the forward in different orders.
            self.gather_weights()
        if self.gather_is_pending:  # the forward gathers them
            self._offload.mark_changed(PARAM)
        self._config.timers = schedule_timers()
        # Each chunk of an interleaved schedule iterates over the micro-batches separately.
        interleaved = len(self._chunks) > 1
        loaders = [
            MicroBatchLoader(micro_batches, partial(self._load, chunk=chunk, with_gradients=not forward_only))
            for chunk in self._stage.chunks
        ]

        def run_schedule() -> list[Any]:
            if self._routing is not None:
                self._routing.begin(routing)
            with self._stage_exchange(micro_batches, forward_only) as exchange:
                results: list[Any] = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=loaders if interleaved else loaders[0],
                    model=self._chunks if interleaved else self._chunks[0],
                    num_microbatches=len(micro_batches),
                    seq_length=1,  # not read: each micro-batch has its own
                    micro_batch_size=1,
                    forward_only=forward_only,
                    collect_non_loss_data=forward_only,
                    **exchange,
                )
                return results

        result = self._vote.run(run_schedule, clean_up, gathers_weights=self.gather_is_pending)
        self.gather_is_pending = False
        return result

    def _forward_step(
        self,
        read: Callable[[Tensor, MicroBatchPart, PackedMicroBatch], Any],
        vote_before: int | None,
        hidden_only: bool,
    ) -> Callable[..., tuple[Tensor, Callable[..., Any] | None]]:
        """Build the function that Megatron calls for each micro-batch and chunk.

        It returns a function for the loss or the outputs, which Megatron calls before the backward.
        """
        steps = itertools.count(1)

        def forward_step(batches: MicroBatchLoader, module: Any) -> tuple[Tensor, Callable[..., Any] | None]:
            if next(steps) == vote_before:
                self._vote.agree()  # from here on peers wait for this rank's gradients
            loaded = next(batches)
            if self._routing is not None:
                self._routing.current = loaded.routed
            output = module(loaded.part, loaded.sequences, hidden_only=hidden_only)
            if loaded.whole is None:
                batches.load_next()
                return output, None
            outputs = read(output, loaded.part, loaded.whole)
            batches.load_next()
            # The schedule keeps the returned tensor until the next micro-batch: return an empty one, not logits.
            return output.new_empty(0), lambda _, non_loss_data=False: outputs

        return forward_step

    def drop_graphs(self) -> None:
        """Drop the graphs of an interrupted pass."""
        if self._routing is not None:
            self._routing.begin(INFERENCE)
        for chunk in self._chunks:
            drop_autograd_graphs(chunk)

    def _stage_exchange(
        self, micro_batches: Sequence[PackedMicroBatch], forward_only: bool
    ) -> AbstractContextManager[dict[str, Any]]:
        """Open the stages' exchange for a run of the schedule; yields its arguments, none for one stage."""
        if self._exchange is None:
            return nullcontext({})
        tokens = [part_tokens(micro_batch, self._runtime.layout.cp, self._multiple) for micro_batch in micro_batches]
        return self._exchange.expecting(tokens, forward_only=forward_only)

    def _check_number(self, micro_batches: int) -> None:
        if not micro_batches:
            raise ConfigError("each data-parallel rank needs at least one micro-batch", code="batch.no-micro-batch")
        layout = self._runtime.layout
        if layout.vpp > 1 and micro_batches % layout.pp:
            raise ConfigError(
                f"{micro_batches} micro-batches with virtual_pipeline_model_parallel_size={layout.vpp}: the "
                f"interleaved schedule needs a multiple of pipeline_model_parallel_size={layout.pp}",
                code="batch.micro-batches-vpp",
            )

    def _load(self, micro_batch: PackedMicroBatch, chunk: PackedModel, *, with_gradients: bool) -> LoadedMicroBatch:
        """A chunk's part of a micro-batch on the device, and all of it for a chunk that has outputs."""
        cp, device = self._runtime.layout.cp, self._runtime.device
        part = context_parallel_part(micro_batch, cp, self._runtime.coordinate.cp, self._multiple)
        if part.positions.dim() > 1 and self._stage.position_rows is None:
            raise DataError("a prompt has tokens of images, and the model sees none", code="image.text-model")
        if self.images is not None and chunk.takes_images:
            # Sequence parallelism scatters the embeddings over the tensor-parallel ranks.
            rank = self._runtime.coordinate.tp if self._multiple > 1 else 0
            embedded = part.tokens.chunk(self._multiple)[rank]
            if with_gradients and chunk.vision_tower is not None:
                part = replace(part, tower_input=self.images.tower_input(embedded))
            else:
                part = replace(part, image_rows=self.images.rows(embedded))
        part = part.to(device)
        whole = micro_batch.to(device) if chunk.post_process else None
        routed = None if self._routing is None else self._routing.load(micro_batch)
        return LoadedMicroBatch(part, self._stage.sequences(part), whole, routed)


class LoadedMicroBatch(NamedTuple):
    """A micro-batch on the device, complete before its forward pass.

    Attributes:
        whole: all of it, for outputs and loss; None for a chunk of layers without outputs.
        routed: this rank's tokens as its routers see them; None for a dense model.
    """

    part: MicroBatchPart
    sequences: PackedSequences
    whole: PackedMicroBatch | None
    routed: RoutedTokens | None = None


class MicroBatchLoader:
    """Iterator over micro-batches that can load one ahead; ``load`` copies one to the device without waiting."""

    def __init__(
        self, micro_batches: Sequence[PackedMicroBatch], load: Callable[[PackedMicroBatch], LoadedMicroBatch]
    ) -> None:
        self._waiting = iter(micro_batches)
        self._load = load
        self._loaded: deque[LoadedMicroBatch] = deque()

    def __iter__(self) -> MicroBatchLoader:
        return self

    def __next__(self) -> LoadedMicroBatch:
        """Return the next micro-batch; load it if :meth:`load_next` did not."""
        return self._loaded.popleft() if self._loaded else self._load(next(self._waiting))

    def load_next(self) -> None:
        """Load the next micro-batch, if there is one."""
        for micro_batch in self._waiting:
            self._loaded.append(self._load(micro_batch))
            break


class StageExchange(P2PCommunicator):
    """Exchange of micro-batches of different sizes between pipeline stages.

    Megatron's stages send each tensor's shape first, and the host waits for it. Here every stage has all micro-batches
    and the schedule's order, so it knows the shape of each tensor that arrives.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._from_prev: Iterator[Sequence[int]] = iter(())
        self._from_next: Iterator[Sequence[int]] = iter(())

    def connect(self) -> None:
        """Exchange one number with both neighbours in each direction; all stages must call it.

        NCCL connects two ranks at their first message, and the host waits there for the other's call. In the
        interleaved schedule two stages may first send to each other at different times.
        """
        self._from_prev, self._from_next = iter([(1,)]), iter([(1,)])
        number = torch.zeros(1, dtype=self.config.pipeline_dtype, device="cuda")
        self._communicate(
            tensor_send_next=number, tensor_send_prev=number, recv_prev=True, recv_next=True, tensor_shape=(1,)
        )

    @contextmanager
    def expecting(self, tokens: Sequence[int], *, forward_only: bool) -> Iterator[dict[str, Any]]:
        """Exchange tensors for one run of the schedule; yields the schedule's arguments that select this exchange.

        Args:
            tokens: tokens of each micro-batch on a context-parallel rank.
        """
        config, rank, last = self.config, self.pp_group.rank(), self.pp_group.size() - 1
        chunks = config.virtual_pipeline_model_parallel_size or 1
        divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [(count // divisor, 1, config.hidden_size) for count in tokens]
        forward, backward = (arrivals(len(tokens), chunks, last + 1, leads=rank == end) for end in (0, last))
        self._from_prev = (shapes[number] for number in forward)
        self._from_next = (shapes[number] for number in ([] if forward_only else backward))
        yield {"p2p_communicator": self, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
        for name, rest in (("previous", self._from_prev), ("next", self._from_next)):
            assert next(rest, None) is None, f"the schedule received fewer tensors of the {name} stage than expected"

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        return next(self._from_prev) if recv_prev else None, next(self._from_next) if recv_next else None


def arrivals(micro_batches: int, chunks: int, stages: int, *, leads: bool) -> list[int]:
    """Return the micro-batch index of each tensor that arrives at a stage in one direction, in order.

    Args:
        leads: this stage begins the direction: the first stage in the forward pass, the last in the backward pass. The
            stage at the other end sends to it, after every chunk but its last.
    """
    order = get_schedule_table(micro_batches, chunks, stages)
    return [number for number, chunk in order if not (leads and chunk == chunks - 1)]


class ScheduleTimer:
    """Spans of one name, which may nest, as Megatron calls them: ``config.timers(name).start()`` and ``.stop()``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[AbstractContextManager[None]] = []
        self._count = 0

    def start(self, barrier: bool = False) -> None:
        """Begin a span, without a barrier, which would change the measurement."""
        scope = span(self._name, "compute", number=self._count)
        self._count += 1
        scope.__enter__()
        self._open.append(scope)

    def stop(self, barrier: bool = False) -> None:
        """End the latest span."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


def schedule_timers() -> Callable[..., ScheduleTimer] | None:
    """Create timers, which count from 0; None if nothing is traced, so that Megatron skips its calls."""
    timers = {name: ScheduleTimer(span_name) for name, span_name in _SPAN_NAMES.items()}

    def timer(name: str, log_level: int | None = None) -> ScheduleTimer:
        return timers.setdefault(name, ScheduleTimer(name))

    return timer if TRACER.active else None
