"""Adapters for Megatron's pipeline schedule: exchange of micro-batches of different sizes, and timeline spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.tracing import TRACER, span

_SPAN_NAMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward": "micro-batches",
    "all-grads-sync": "sum gradients",
}


class StageExchange(P2PCommunicator):
    """Exchange of micro-batches of different sizes between pipeline stages that know the sizes in advance.

    Megatron's stages send each tensor's shape before the tensor, and the host waits for it. Here every stage has all
    micro-batches and the order of the schedule, so it knows the shape of each tensor that arrives.
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
            forward_only: the run has no backward pass.
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


class ScheduleTimers:
    """Spans of forward, backward and gradient sums, called as ``config.timers(name).start()`` and ``.stop()``."""

    def __init__(self) -> None:
        self._timers: dict[str, ScheduleTimer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> ScheduleTimer:
        """Return the timer of a name; ``log_level`` is ignored."""
        return self._timers.setdefault(name, ScheduleTimer(_SPAN_NAMES.get(name, name)))


class ScheduleTimer:
    """Spans of one name; may nest."""

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


def schedule_timers() -> Any:
    """Create timers, which count from 0; None if nothing is traced, so that Megatron skips its calls."""
    return ScheduleTimers() if TRACER.active else None
