"""After an out-of-memory error all ranks repeat the pass with smaller micro-batches, and the results stay the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import role_processes
import torch
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, log_prob_settings, role_settings, update_plan
from support.distributed import RemoteError
from tiny_policies import ROW_LENGTHS

from megarl.megatron.engine.faults import DeviceMemoryError
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.frozen import ReferenceWorker
from megarl.workers.rows import FORWARD, UPDATE, MemoryBudgets, PackedRows
from megarl.workers.settings import MicroBatchBudget
from megarl.workers.supervised import SFTWorker

LARGE = MicroBatchBudget(max_tokens=1000)
LONGEST = max(map(sum, ROW_LENGTHS))
FITS = LONGEST + 3
"""Tokens of a micro-batch that the device of these tests holds."""
MEMORY_METRICS = ("out_of_memory", "update_micro_batch_limit", "forward_micro_batch_limit")


def limit_memory(place, tokens, ranks, during, peers_wait_s=120.0):
    """Let the last layer run out of memory for micro-batches of more tokens, after it used the random generator."""
    engine = role_processes._held[0].engine
    engine._vote._peers_wait_s = peers_wait_s
    if place.rank not in ranks:
        return
    cp = engine.runtime.layout.cp

    def exhausted(*_):
        torch.rand(3)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. If reserved but unallocated ...")

    def check(module, args, kwargs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.shape[0] * cp > tokens:
            if during == "backward" and hidden.requires_grad:
                hidden.register_hook(exhausted)
            elif during == "forward":
                exhausted()

    (layer,) = [
        module
        for chunk in engine.chunks
        for name, module in chunk.named_modules()
        if name.endswith(f"decoder.layers.{engine.model.num_layers - 1}")
    ]
    layer.register_forward_hook(check, with_kwargs=True)


def random_state(place):
    return torch.get_rng_state()


def role_of(
    pool,
    models,
    kind,
    layout,
    budget,
    *,
    overlap=False,
    **changes,
):
    """A role whose passes all have one budget."""
    parallel, plan = LAYOUTS[layout], dataclasses.replace(update_plan(), budget=budget)
    log_prob = dataclasses.replace(log_prob_settings(), budget=budget)
    path = models.critic_path if kind == "critic" else models.policy_path
    settings = dataclasses.replace(
        role_settings(path, parallel, learns=kind != "ref", megatron={"overlap_grad_reduce": overlap}), **changes
    )
    arguments: dict[str, Any] = {"settings": settings}
    if kind == "actor":
        arguments = actor_arguments(path, parallel) | arguments
        arguments |= {"plan": plan, "log_prob": log_prob, "reference": log_prob}
    elif kind == "critic":
        arguments |= {"config": CRITIC, "plan": plan}
    elif kind == "ref":
        arguments |= {"log_prob": log_prob}
    else:
        arguments |= {"plan": dataclasses.replace(plan, mini_batch_rows=len(ROW_LENGTHS))}
    worker = {"actor": ActorWorker, "critic": CriticWorker, "ref": ReferenceWorker, "sft": SFTWorker}[kind]
    return Role(pool, worker, parallel, arguments)


PASSES = {
    "actor": (["compute_log_prob", "compute_ref_log_prob"], "update_actor"),
    "critic": (["compute_values"], "update_critic"),
    "sft": ([], "update_sft"),
    "ref": (["compute_ref_log_prob"], None),
}


def results(role, kind, models):
    """Columns of the passes without gradients, metrics of an update, weights by rank."""
    verbs, update = PASSES[kind]
    columns = {f"{verb} {name}": c for verb in verbs for name, c in role.map(verb, models.batch).tensors.items()}
    metrics = {} if update is None else role.update(update, models.batch, 8 if kind == "sft" else 4)
    return columns, metrics, role.local_weights()


class Case(NamedTuple):
    """Ranks of a role whose device is too small, and the micro-batches before."""

    kind: str
    layout: str
    ranks: Sequence[int]
    during: str
    budget: MicroBatchBudget = LARGE
    overlap: bool = False


CASES = [
    Case("actor", "dp2", [1], "forward"),  # the other rank has enough memory
    Case("actor", "tp2", [0, 1], "backward"),
    Case("critic", "dp2", [0], "forward"),
    Case("ref", "dp2", [1], "forward"),
    # Micro-batches of three rows and of one: the first one fails, before the last one's gradients are reduced.
    Case("sft", "dp2", [0], "backward", MicroBatchBudget(size=3), overlap=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.layout} {case.during}")
def test_results_equal_those_of_the_smaller_budget(role_pool, models, case):
    kind, limit = case.kind, 16
    with role_of(role_pool, models, kind, case.layout, case.budget, overlap=case.overlap) as role:
        before = role._run(random_state)
        role._run(limit_memory, FITS, case.ranks, case.during)
        role.count_tokens()
        columns, metrics, weights = results(role, kind, models)
        assert all(map(torch.equal, before, role._run(random_state)))
        assert all(max(role.counted_tokens()[rank]) > FITS for rank in case.ranks)
        prefix = {"sft": "train"}.get(kind, kind)
        if kind == "ref":
            (shortage,) = {str(answer) for answer in role.call("pass_metrics")}
            assert shortage == "{'ref/out_of_memory': 1.0, 'ref/forward_micro_batch_limit': 16.0}"
        else:
            found = {name: metrics.pop(f"{prefix}/{name}", None) for name in MEMORY_METRICS}
            limit = int(found["update_micro_batch_limit"])
            assert found["out_of_memory"] >= 1
            assert limit == 1 if case.budget.size else LONGEST <= limit < 32
            assert (found["forward_micro_batch_limit"] is not None) == (case.during == "forward")
            # The budget stays small: the next update needs no second attempt.
            assert results(role, kind, models)[1][f"{prefix}/out_of_memory"] == 0

    with role_of(role_pool, models, kind, case.layout, case.budget.with_limit(limit)) as role:
        other_columns, other_metrics, other_weights = results(role, kind, models)
    assert metrics == pytest.approx(other_metrics, rel=1e-6, abs=1e-9)
    for name, column in columns.items():
        torch.testing.assert_close(column, other_columns[name], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(weights, other_weights, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_error_names_the_budget_where_peers_wait_in_a_collective(role_pool, models):
    role = role_of(role_pool, models, "actor", "tp2", LARGE)
    role.call("init_model")
    role._run(limit_memory, FITS, [1], "forward", 1.0)
    with pytest.raises(RemoteError) as raised:  # which ends the processes: one of them waits
        role.map("compute_log_prob", models.batch)
    text = str(raised.value)
    assert text.count("[engine.device-memory]") == 1
    assert "actor: rank 1 ran out of device memory: CUDA out of memory. Tried to allocate 20.00 GiB." in text
    assert "set *max_token_len_per_gpu of this role to" in text and "If reserved" not in text


@pytest.mark.parametrize(
    ("layout", "changes", "tokens", "reason"),
    [
        ("tp1", {"repeat_out_of_memory": False}, FITS, "trainer.repeat_out_of_memory is false"),
        ("tp1", {}, 1, f"a single row of {LONGEST} tokens: set recompute_granularity=full"),
    ],
)
def test_error_where_the_pass_cannot_be_repeated(role_pool, models, layout, changes, tokens, reason):
    with role_of(role_pool, models, "sft", layout, LARGE, **changes) as role:
        role._run(limit_memory, tokens, [0], "forward")
        (raised,) = role.split("update_sft", models.batch, 8, attempt=True)
    assert raised.kind == "DeviceMemoryError" and reason in raised.text


def alone(budget):
    """Budgets of a role with one rank."""
    return MemoryBudgets("actor", lambda count: [count], lambda numbers: numbers)


def shortage(fits, rows, budget):
    """A pass that runs out of memory for larger micro-batches; returns its micro-batches."""

    def run(groups):
        sizes = [rows.load(budget, group) for group in groups]
        if max(sizes) > fits:
            raise DeviceMemoryError("rank 0 ran out", repeatable=True)
        return sizes

    return run


def test_budget_halves_but_not_below_the_longest_row(models):
    rows = PackedRows(models.batch)
    total = sum(map(sum, ROW_LENGTHS))
    budgets = alone(LARGE)
    sizes = budgets.run_pass(UPDATE, LARGE, rows, shortage(total // 2, rows, LARGE))
    assert sum(sizes) == total and max(sizes) <= total // 2
    # From the largest micro-batch, not from a budget above it.
    assert budgets.take_metrics() == {"actor/out_of_memory": 1, "actor/update_micro_batch_limit": total // 2}
    assert budgets.take_metrics()["actor/out_of_memory"] == 0
    sizes = budgets.run_pass(UPDATE, LARGE, rows, shortage(LONGEST, rows, LARGE))
    assert max(sizes) == LONGEST == budgets.take_metrics()["actor/update_micro_batch_limit"]
    # The other kind of pass keeps its budget.
    assert budgets.run_pass(FORWARD, LARGE, rows, shortage(total, rows, LARGE)) == [total]


def test_rows_per_micro_batch_halve_to_one(models):
    rows, budget = PackedRows(models.batch), MicroBatchBudget(size=8)
    budgets = alone(budget)
    assert budgets.run_pass(UPDATE, budget, rows, shortage(1, rows, budget)) == [1] * 8
    assert budgets.take_metrics() == {"actor/out_of_memory": 3, "actor/update_micro_batch_limit": 1}


def test_a_longer_row_raises_the_shrunk_budget_for_its_pass(models):
    rows = PackedRows(models.batch)
    lengths = [sum(lengths) for lengths in ROW_LENGTHS]
    short = [row for row, length in enumerate(lengths) if length < LONGEST]
    budgets = alone(LARGE)
    budgets.run_pass(UPDATE, LARGE, rows, shortage(max(lengths[row] for row in short), rows, LARGE), short)
    sizes = budgets.run_pass(UPDATE, LARGE, rows, shortage(1000, rows, LARGE))
    assert LONGEST <= max(sizes) < 1.25 * LONGEST + 2
