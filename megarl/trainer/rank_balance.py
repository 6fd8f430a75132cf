"""What each data-parallel rank had to do in a step, and how long it was busy with it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from megarl.cluster import WorkerGroup, rank_loads
from megarl.data import DataProto
from megarl.tracking.balance_file import SECONDS_SUFFIX, TOKENS, WORK, RankLists


def rank_balance(batch: DataProto, learners: Iterable[WorkerGroup], verbs: Container[str]) -> RankLists:
    """Lists over data-parallel ranks, as the balance file has them.

    Args:
        batch: the step's.
        learners: all groups that learn; their seconds are taken, see :meth:`WorkerGroup.take_busy`.
        verbs: that they did in the step; a role that was not updated in it, as while the critic warms up, has no load.
    """
    lengths = batch.tensors["attention_mask"].sum(-1).tolist()
    lists: RankLists = {}
    for group in learners:
        role, update = group.role, f"update_{group.role}"
        if update in verbs:
            costs = group.budgets[update].cost.of(lengths)
            tokens, work = rank_loads(lengths, costs, group.plan(update, batch))
            lists |= {f"{role}/{TOKENS}": tokens, f"{role}/{WORK}": work}
        lists |= {f"{role}/{verb}{SECONDS_SUFFIX}": seconds for verb, seconds in group.take_busy().items()}
    return lists
