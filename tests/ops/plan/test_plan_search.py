"""Layout search: valid layouts that fit, in order of cost; more memory removes none."""

from functools import cache
from itertools import product

import pytest
from planned_jobs import MODELS, OFFLOAD, draft, megatron, train_config
from support.expected_errors import raises

from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.plan.estimate import estimate, overrides_of
from megarl.ops.plan.flops import Lengths
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.search import LayoutChoice, best_first, role_layouts, search

LENGTHS = Lengths(300, 400, 1024, "test")
BASE = (
    "data.train_files=none",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "data.train_batch_size=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.name=sglang",
    *(f"{role}.megatron.{part}_offload=true"
      for role in ("actor_rollout_ref.actor", "critic") for part in ("param", "grad", "optimizer")),
)  # fmt: skip


def request(name, model, nodes, *extra):
    overrides = (*BASE, f"actor_rollout_ref.model.path={MODELS / model}", f"trainer.nnodes={nodes}", *extra)
    return ConfigRequest(TrainConfig, name, overrides)


def composed(*arguments):
    return compose(request(*arguments))


@pytest.mark.parametrize(
    ("name", "model", "nodes", "hardware"),
    [
        ("ppo", "Qwen2.5-7B", 2, "h100"),
        pytest.param(
            *("grpo", "Qwen3-30B-A3B", 4, "a100"),
            marks=pytest.mark.release(
                twin="tests/ops/plan/test_plan_search.py::test_listed_layouts_are_valid_and_sorted"
            ),
        ),
    ],
)
def test_listed_layouts_are_valid_and_sorted(name, model, nodes, hardware):
    node = read_hardware(hardware)
    result = search(composed(name, model, nodes), node, LENGTHS, top=2)
    assert result.best and result.planned >= len(result.best)
    for candidate in result.best:
        config = composed(name, model, nodes, *overrides_of(candidate.changes))  # raises if it is invalid
        plan = estimate(config, node, LENGTHS)
        assert plan.fits
        assert plan.step.total == pytest.approx(candidate.estimate.step.total)
    costs = [candidate.estimate.step.total for candidate in result.best]
    assert costs == sorted(costs)
    assert len({tuple(overrides_of(candidate.changes)) for candidate in result.best}) == len(result.best)


@pytest.mark.parametrize(("gib", "factor"), [(24, 1.3), (40, 2.0)])
def test_more_memory_removes_no_layout(gib, factor):
    config = composed("grpo", "Qwen2.5-7B", 1)
    small, large = read_hardware("h100"), read_hardware("h100")
    small.memory_gib, large.memory_gib = gib, factor * gib

    def sizes(hardware):
        role = planned_job(config).role("actor")
        path = "actor_rollout_ref.actor.megatron.recompute_granularity"
        return {
            tuple((key, value) for key, value in choice.changes.items() if key != path)
            for choice in role_layouts(config, role, hardware, LENGTHS)
        }

    assert sizes(small) <= sizes(large)


def test_seventy_billion_on_sixteen_nodes_needs_tensor_parallelism():
    """70B does not fit 80 GB with TP1 PP1: states alone take 6 bytes per parameter."""
    result = search(composed("grpo", "Llama-3-70B", 16), read_hardware("h100"), LENGTHS, top=3)
    for candidate in result.best:
        layout = candidate.estimate.job.role("actor").layout
        assert layout.tp * layout.pp >= 8 and layout.tp <= 8
        assert layout.world_size == 128


@cache
def steps_of_a_valid_start():
    result = search(composed("grpo", "Qwen2.5-7B", 1), read_hardware("h100"), LENGTHS, top=2)
    return [candidate.estimate.step.total for candidate in result.best]


@pytest.mark.parametrize(
    "invalid",
    [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3",  # divides neither devices nor heads
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8",  # divides the devices, not the 4 KV heads
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8",  # does not divide the 28 layers
        "actor_rollout_ref.actor.megatron.data_parallel_size=32",  # more than the devices
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
    ],
)
def test_search_starts_from_an_invalid_layout_and_finds_those_of_a_valid_one(invalid):
    node = read_hardware("h100")
    changed = search(draft(request("grpo", "Qwen2.5-7B", 1, invalid)), node, LENGTHS, top=2)
    assert [candidate.estimate.step.total for candidate in changed.best] == steps_of_a_valid_start()
    for candidate in changed.best:
        assert any(text.startswith(invalid.partition("=")[0]) for text in overrides_of(candidate.changes))
        config = composed("grpo", "Qwen2.5-7B", 1, invalid, *overrides_of(candidate.changes))  # raises if it is invalid
        assert estimate(config, node, LENGTHS).step.total == pytest.approx(candidate.estimate.step.total)


def test_a_problem_that_no_layout_solves_is_the_error_of_a_search():
    config = draft(request("grpo", "Qwen2.5-7B", 1, "actor_rollout_ref.actor.ppo_mini_batch_size=7"))
    with raises("batch.mini-batch-size", " 7 (actor_rollout_ref.actor.ppo_mini_batch_size)"):
        search(config, read_hardware("h100"), LENGTHS, top=1)


def test_no_layout_is_listed_if_none_fits():
    tiny = read_hardware("h100")
    tiny.memory_gib = 4
    config = train_config("Llama-3-70B", megatron(8, 1, **OFFLOAD), nodes=1)
    assert search(config, tiny, LENGTHS, top=1).best == []


def test_combinations_come_once_each_in_order_of_cost():
    costs = [1.0, 2.5, 4.0], [0.5, 0.75], [3.0, 3.25, 8.0, 9.0]
    choices = [[LayoutChoice({key: cost}, cost) for cost in values] for key, values in zip("abc", costs, strict=True)]
    found = [tuple(combination.values()) for combination in best_first(choices)]
    assert sorted(found) == sorted(product(*costs))
    assert [sum(values) for values in found] == sorted(map(sum, product(*costs)))
    assert list(best_first([choices[0], []])) == []
