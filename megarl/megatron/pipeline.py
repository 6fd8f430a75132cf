"""The exchange between pipeline stages, where Megatron's own does not fit micro-batches of different sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


class StageExchange(P2PCommunicator):
    """Megatron's exchange, safe for stages that send each other sizes in both directions at once.

    In the interleaved schedule a stage sends the size of an activation onwards and that of a gradient back in one go.
    With two stages both go to the same rank, which tells messages apart by their order alone, and Megatron has sender
    and receiver disagree on it. With few micro-batches one of two stages already sends gradients while the other still
    computes forward; it must not wait there until its size is taken.
    """

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from_prev, from_next = self._size(), self._size()
        # What is sent onwards comes first, both at the sender and (as what the previous stage sent) at the receiver.
        exchanges = [
            (dist.isend, None if tensor_send_next is None else self._size(tensor_send_next), self.next_rank),
            (dist.irecv, from_prev if recv_prev else None, self.prev_rank),
            (dist.isend, None if tensor_send_prev is None else self._size(tensor_send_prev), self.prev_rank),
            (dist.irecv, from_next if recv_next else None, self.next_rank),
        ]
        ops = [dist.P2POp(way, size, peer, self.pp_group) for way, size, peer in exchanges if size is not None]
        requests = dist.batch_isend_irecv(ops) if ops else []
        one_each = len(requests) == len(ops)  # gloo; NCCL has one for all and buffers what is as small as this
        for number, request in enumerate(requests):
            if not one_each or ops[number].op is dist.irecv:
                request.wait()
        # Sizes are taken before the tensors themselves, for which Megatron waits next: the last are free by then.
        self._sending = (ops, requests)
        return from_prev.tolist(), from_next.tolist()

    @staticmethod
    def _size(tensor: Tensor | None = None) -> Tensor:
        return torch.tensor((0, 0, 0) if tensor is None else tensor.size(), dtype=torch.int64, device="cuda")


def exchange_options(pp_group: dist.ProcessGroup, config: Any) -> dict[str, Any]:
    """Arguments that make a schedule of Megatron's use :class:`StageExchange`."""
    return {
        "p2p_communicator": StageExchange(pp_group, config),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
