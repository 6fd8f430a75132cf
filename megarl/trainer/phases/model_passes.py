"""Model passes of a step (log-probs, values, updates): one role each, at the same time on separate devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megarl.base.disjoint_groups import disjoint_groups
from megarl.cluster import PlacedPool, WorkerGroup
from megarl.cluster.calls import PendingCall
from megarl.data import DataProto
from megarl.trainer.records.metrics import Metrics

ROW_VERB = "compute_log_prob"
"""Verb of the actor whose rows on each process are also those of the row functions of a step."""


@dataclass(frozen=True)
class ModelPass:
    """A pass of one role over a batch, which starts without waiting.

    Attributes:
        name: name of the phase in ``timing_s/<name>``.
        devices: pools that the pass computes on; empty if the driver computes.
        submit: starts the pass on a batch, and may add metrics; the call's result is columns, or an update's metrics.
        first_step: the first training step with this pass.
    """

    name: str
    devices: tuple[PlacedPool, ...]
    submit: Callable[[DataProto, Metrics], PendingCall]
    first_step: int = 1


def verb_pass(name: str, group: WorkerGroup, verb: str, first_step: int = 1) -> ModelPass:
    """Return the pass that runs a verb of a worker group on the batch."""
    return ModelPass(name, (group.pool,), lambda batch, metrics: group.submit(verb, batch), first_step)


def simultaneous_passes(passes: Iterable[ModelPass]) -> list[list[ModelPass]]:
    """Group independent passes: those of a group can run at the same time, because no two share devices."""
    return disjoint_groups(passes, lambda one: one.devices)
