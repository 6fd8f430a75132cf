"""Adapters for Megatron's pipeline schedule: exchange of micro-batches of different sizes, and timeline spans."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
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
    """Megarl's exchange between pipeline stages, safe if neighbours send each other tensor shapes at the same time.

    In the interleaved schedule a stage sends the shape of an activation forward and that of a gradient back in one
    call. With two stages both go to the same rank, which distinguishes messages by order only, and Megatron's sender
    and receiver disagree on the order. With few micro-batches one of two stages already sends gradients while the other
    still computes forward; it must not wait until its shape is received.
    """

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from_prev, from_next = self._size(), self._size()
        # Forward messages come first, at the sender and (as messages of the previous stage) at the receiver.
        exchanges = [
            (dist.isend, None if tensor_send_next is None else self._size(tensor_send_next), self.next_rank),
            (dist.irecv, from_prev if recv_prev else None, self.prev_rank),
            (dist.isend, None if tensor_send_prev is None else self._size(tensor_send_prev), self.prev_rank),
            (dist.irecv, from_next if recv_next else None, self.next_rank),
        ]
        ops = [dist.P2POp(way, size, peer, self.pp_group) for way, size, peer in exchanges if size is not None]
        requests = dist.batch_isend_irecv(ops) if ops else []
        one_each = len(requests) == len(ops)  # gloo; NCCL has one for all, and buffers small messages
        for number, request in enumerate(requests):
            if not one_each or ops[number].op is dist.irecv:
                request.wait()
        # Shapes are received before the tensors, which Megatron waits for next: the last requests are complete then.
        self._sending = (ops, requests)
        return from_prev.tolist(), from_next.tolist()

    @staticmethod
    def _size(tensor: Tensor | None = None) -> Tensor:
        return torch.tensor((0, 0, 0) if tensor is None else tensor.size(), dtype=torch.int64, device="cuda")


def exchange_options(pp_group: dist.ProcessGroup, config: Any) -> dict[str, Any]:
    """Arguments that make a schedule of Megatron use :class:`StageExchange`."""
    return {
        "p2p_communicator": StageExchange(pp_group, config),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }


class ScheduleTimers:
    """Megatron's timers, replaced by spans of the timeline: each micro-batch's forward and backward, and gradient sums.

    Megatron calls ``config.timers(name).start()`` and ``.stop()``.
    """

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
    """New timers, which count from 0; None if nothing is traced, so that Megatron skips its calls."""
    return ScheduleTimers() if TRACER.active else None
