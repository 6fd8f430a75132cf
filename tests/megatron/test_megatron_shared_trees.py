"""Branches of conversations that store their common beginnings once equal branches computed one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import Setup, assemble, engine, policy_loss, value_loss
from family_cases import EXPERTS, MODELS
from tiny_models import TEMPERATURE, VOCAB, Row, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch, RecomputeOptions
from megarl.models import ParallelLayout

PLAIN = OptimizerOptions(use_distributed_optimizer=False)
BALANCE = (
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_aux_loss_coeff", 0.3),
    ("moe_z_loss_coeff", 0.02),
)
MOE: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    **EXPERTS,
}
DENSE: dict[str, Any] = {"family": "qwen3", "num_hidden_layers": 4}
CASES = {
    "single": (DENSE, Setup(ParallelLayout(), recompute=RecomputeOptions())),
    "tp2-sp": (DENSE, Setup(ParallelLayout(tp=2), sequence_parallel=True)),
    "pp2-vpp2": (DENSE, Setup(ParallelLayout(pp=2, vpp=2))),
    "dp2": (DENSE, Setup(ParallelLayout(dp=2))),
    "critic-tp2-sp": ({**DENSE, "critic": "TokenClassification"}, Setup(ParallelLayout(tp=2), True, value_head=True)),
    "moe-single": (MOE, Setup(ParallelLayout(), transformer=BALANCE)),
    "moe-dp2-ep2": (MOE, Setup(ParallelLayout(dp=2, ep=2), transformer=BALANCE)),
    "moe-tp2-sp-ep2": (MOE, Setup(ParallelLayout(tp=2, ep=2, etp=1), True, transformer=BALANCE)),
    "deepseek-tp2-sp": (MODELS["deepseek_v3"], Setup(ParallelLayout(tp=2), True)),
    "windows-tp2-sp": (MODELS["gemma3"], Setup(ParallelLayout(tp=2), True)),
    "sinks": (MODELS["gpt_oss"], Setup(ParallelLayout())),
    "delta-net-tp2-sp": (MODELS["qwen3_next_dense"], Setup(ParallelLayout(tp=2), True)),
    "delta-net-moe": (MODELS["qwen3_next"], Setup(ParallelLayout())),
}


class Step(NamedTuple):
    """One rank's results; outputs and routes by row, empty on stages before the last."""

    outputs: list[tuple[Tensor, ...]]
    routes: list[Tensor]
    metrics: dict[str, float]
    grads: dict[str, Tensor]
    computed: int


def branches() -> list[Row]:
    """Two conversations: turns that extend each other, forks in responses and at prompts' ends, a duplicate."""
    generator = torch.Generator().manual_seed(3)
    start, a, b, c, d, e = (torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (4, 5, 3, 4, 2, 3))
    pairs = [
        (start, a),
        (start + a, b),  # the row before it is its prompt
        (start, a + b + c),  # the same turns as one response
        (start, a[:3] + d),  # forks within the first response
        (start, a[:3] + d),  # twice
        (start + a[:1], a[1:3] + e + c),  # forks at the same token, with another prompt
        (start[:1] + e, d),  # one token in common
        ([0, *e], a),  # nothing in common
    ]
    result = []
    for prompt, response in pairs:
        numbers = torch.randn(2, len(response), generator=generator)
        ids = torch.tensor(prompt), torch.tensor(response)
        result.append(Row(*ids, weights=numbers[0] / 40, returns=numbers[1]))
    return result


def tree_size(rows: list[Row]) -> int:
    whole = [torch.cat([row.prompt, row.response]).tolist() for row in rows]
    return len({tuple(ids[: end + 1]) for ids in whole for end in range(len(ids))})


def pack(rows: list[Row], share: bool, routes: list[Tensor] | None = None) -> PackedMicroBatch:
    names = ("weights", "returns")
    columns = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    return PackedMicroBatch.from_rows(
        [(row.prompt, row.response) for row in rows], columns, share_prompts=share, routes=routes
    )


def recorded_routes(rows: list[Row]) -> list[Tensor]:
    """Experts of every token, two of four; the third row's differ from those of equal rows, from its third token on."""
    known: dict[tuple[int, ...], Tensor] = {}
    result = []
    generator = torch.Generator().manual_seed(4)
    for number, row in enumerate(rows):
        ids = torch.cat([row.prompt, row.response]).tolist()
        parts = []
        for end in range(1, len(ids) + 1):
            drawn = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(4)]).to(torch.int16)
            parts.append(drawn if number == 2 and end > 2 else known.setdefault(tuple(ids[:end]), drawn))
        result.append(torch.stack(parts))
    return result


def step(place, path, setup: Setup, rows: list[Row], share: bool, routes: list[Tensor] | None = None) -> Step:
    """A forward pass and a backward pass, with the experts of ``routes``.

    Rows that share are in one micro-batch or two (with interleaved stages); others have one each.
    """
    with engine(place, path, setup._replace(optimizer=PLAIN)) as built:
        layout = setup.layout
        mine = range(len(rows))[built.runtime.coordinate.dp :: layout.dp]
        size = 1 if not share else len(mine) // 2 if layout.vpp > 1 else len(mine)
        packed = [
            pack([rows[row] for row in group], share, None if routes is None else [routes[row] for row in group])
            for group in (mine[at : at + size] for at in range(0, len(mine), size))
        ]
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        records = built.model.experts is not None and routes is None
        answers = built.forward(packed, options._replace(record_routes=records)) or []
        outputs: list[tuple[Tensor, ...]] = []
        for batch, answer in zip(packed, answers, strict=False):
            columns = (answer.values,) if setup.value_head else (answer.log_probs, answer.entropy)
            outputs += zip(*map(batch.split, columns), strict=True)
        recorded = [each for answer in answers for each in answer.routes] if records else []
        metrics = built.forward_backward(packed, value_loss if setup.value_head else policy_loss, options)
        params = built.weights.parameters()
        grads = {n: p.main_grad.clone() if p.requires_grad else torch.zeros_like(p) for n, p in params.items()}
        return Step(outputs, recorded, metrics, grads, sum(batch.num_tokens for batch in packed))


@pytest.mark.parametrize("name", CASES)
def test_a_tree_equals_its_branches(pool, tmp_path, name):
    model, setup = CASES[name]
    save_model(tmp_path, **model)
    rows, layout = branches(), setup.layout
    alone, shared = (pool.run(step, layout.world_size, tmp_path, setup, rows, share) for share in (False, True))
    for rank, result in enumerate(shared):
        mine = rows[layout.coordinate(rank).dp :: layout.dp]
        groups = [mine[:4], mine[4:]] if layout.vpp > 1 else [mine]
        assert result.computed == sum(map(tree_size, groups)) < alone[rank].computed
        assert len(result.outputs) == (len(mine) if layout.coordinate(rank).pp == layout.pp - 1 else 0)
    check_same(tmp_path, setup, shared, alone)


@pytest.mark.parametrize("name", ["moe-single", "moe-tp2-sp-ep2"])
def test_replayed_experts_are_those_of_each_branch(pool, tmp_path, name):
    model, setup = CASES[name]
    save_model(tmp_path, **model)
    rows, size = branches(), setup.layout.world_size
    routes = recorded_routes(rows)
    alone, shared = (pool.run(step, size, tmp_path, setup, rows, share, routes) for share in (False, True))
    own = len(rows[2].prompt) + len(rows[2].response) - 2  # tokens of the third row that have other experts
    assert {result.computed for result in shared} == {tree_size(rows[:2] + rows[3:]) + own}
    check_same(tmp_path, setup, shared, alone)


def check_same(path, setup: Setup, shared: list[Step], alone: list[Step]) -> None:
    for ours, theirs in zip(shared, alone, strict=True):
        assert len(ours.outputs) == len(theirs.outputs)
        for left, right in zip(ours.outputs, theirs.outputs, strict=True):
            for values, expected in zip(left, right, strict=True):
                torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        for left, right in zip(ours.routes, theirs.routes, strict=True):
            assert torch.equal(left, right)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6)
    mine, plain = (assemble(path, setup, [result.grads for result in results]) for results in (shared, alone))
    scale = max(grad.abs().max().item() for grad in plain.values())
    for name, expected in plain.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-5 * scale)
