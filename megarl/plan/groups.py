"""Which ranks of a layout talk to each other, over which links, and how long their collectives take.

Ranks are numbered tensor, context, data parallel, pipeline, node by node. A ring of ``n`` ranks moves
``(n - 1) / n`` of the data once for a gather or a reduce-scatter, twice for an all-reduce. A group with
several ranks on each node has as many network adapters, and its collectives run over all of them at once, as NCCL's do.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models import ParallelLayout
from megarl.plan.hardware import Hardware


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective: ``size`` of them, every ``stride``-th.

    Attributes:
        size: ranks.
        stride: distance of neighbours in the numbering of ranks.
        devices_per_node: of the cluster.
    """

    size: int
    stride: int
    devices_per_node: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node."""
        return max(1, min(self.size, self.devices_per_node // self.stride))

    @property
    def within_node(self) -> bool:
        """Whether all are on one node."""
        return self.per_node == self.size

    def gather_s(self, nbytes: float, hardware: Hardware) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of so many bytes in the end, or in the beginning."""
        if self.size == 1:
            return 0.0
        moved = nbytes * (self.size - 1) / self.size
        seconds = hardware.transfer_s(moved, within_node=True)
        if not self.within_node:
            seconds = max(seconds, hardware.transfer_s(moved / self.per_node, within_node=False))
        return seconds + hardware.latency_s(within_node=self.within_node)

    def reduce_s(self, nbytes: float, hardware: Hardware) -> float:
        """Seconds of an all-reduce."""
        return 2 * self.gather_s(nbytes, hardware)

    def exchange_s(self, nbytes: float, hardware: Hardware) -> float:
        """Seconds of an all-to-all in which each rank has so many bytes to give away, evenly to all."""
        if self.size == 1:
            return 0.0
        inside = hardware.transfer_s(nbytes * (self.per_node - 1) / self.size, within_node=True)
        outside = hardware.transfer_s(nbytes * (self.size - self.per_node) / self.size, within_node=False)
        return max(inside, outside) + hardware.latency_s(within_node=self.within_node)

    def send_s(self, nbytes: float, hardware: Hardware) -> float:
        """Seconds in which a rank hands so many bytes to the next."""
        if self.size == 1:
            return 0.0
        within = self.stride * self.size <= self.devices_per_node
        return hardware.transfer_s(nbytes, within_node=within) + hardware.latency_s(within_node=within)


@dataclass(frozen=True)
class Groups:
    """The groups of a layout."""

    tensor: Group
    context: Group
    data: Group  # data and context parallel: who sums gradients
    pipeline: Group
    expert: Group
    expert_tensor: Group
    expert_data: Group

    @classmethod
    def of(cls, layout: ParallelLayout, devices_per_node: int) -> Groups:
        """The groups of a layout on nodes of so many devices."""

        def group(size: int, stride: int) -> Group:
            return Group(size, stride, devices_per_node)

        return cls(
            tensor=group(layout.tp, 1),
            context=group(layout.cp, layout.tp),
            data=group(layout.dp * layout.cp, layout.tp),
            pipeline=group(layout.pp, layout.ranks_per_stage),
            expert=group(layout.ep, layout.expert_tp),
            expert_tensor=group(layout.expert_tp, 1),
            expert_data=group(layout.expert_dp, layout.expert_tp * layout.ep),
        )
