"""Layout search: valid layouts that fit, in order of cost; more memory removes none."""

from functools import cache

import pytest
from planned_jobs import MODELS, OFFLOAD, megatron, train_config
from support.expected_errors import raises

from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose, compose_draft
from megarl.config.problems import format_value
from megarl.ops.plan.estimate import estimate
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job_from_config import planned_job
from megarl.ops.plan.lengths import Lengths
from megarl.ops.plan.search import initial_changes, layouts, role_layouts, search

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


def composed(name, model, nodes, *extra):
    overrides = (*BASE, f"actor_rollout_ref.model.path={MODELS / model}", f"trainer.nnodes={nodes}", *extra)
    return compose(ConfigRequest(TrainConfig, name, overrides))


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
        config = composed(name, model, nodes, *candidate.overrides())  # raises if the configuration is invalid
        plan = estimate(config, node, LENGTHS)
        assert plan.fits
        assert plan.step.total == pytest.approx(candidate.estimate.step.total)
    costs = [candidate.estimate.step.total for candidate in result.best]
    assert costs == sorted(costs)
    assert len({tuple(candidate.overrides()) for candidate in result.best}) == len(result.best)


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


def test_uneven_layers_shorten_the_last_stage():
    config = train_config("DeepSeek-V3", megatron(8, 1), nodes=8)
    role = planned_job(config).role("actor")
    key = "actor_rollout_ref.actor.megatron."
    eight = [sizes for sizes in layouts(role, 64, 8, 2048) if sizes[key + "pipeline_model_parallel_size"] == 8]
    assert eight and all(sizes[key + "num_layers_in_last_pipeline_stage"] == 61 - 7 * 8 for sizes in eight)


@cache
def steps_of_a_valid_start():
    result = search(composed("grpo", "Qwen2.5-7B", 1), read_hardware("h100"), LENGTHS, top=2)
    return [candidate.estimate.step.total for candidate in result.best]


def draft(name, model, nodes, *extra):
    overrides = (*BASE, f"actor_rollout_ref.model.path={MODELS / model}", f"trainer.nnodes={nodes}", *extra)
    return compose_draft(ConfigRequest(TrainConfig, name, overrides))


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
    changed = search(draft("grpo", "Qwen2.5-7B", 1, invalid), node, LENGTHS, top=2)
    assert [candidate.estimate.step.total for candidate in changed.best] == steps_of_a_valid_start()
    for candidate in changed.best:
        assert any(text.startswith(invalid.partition("=")[0]) for text in candidate.overrides())
        config = composed("grpo", "Qwen2.5-7B", 1, invalid, *candidate.overrides())  # raises if it is invalid
        assert estimate(config, node, LENGTHS).step.total == pytest.approx(candidate.estimate.step.total)


def test_search_divides_more_devices_than_the_mini_batch_has_samples():
    """With TP1 PP1 the 128 ranks of 16 nodes are more than the 64 samples of a mini-batch."""
    extra = ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus")
    with raises("batch.samples-per-rank", "128"):
        composed("grpo", "Qwen2.5-7B", 16, *extra)
    changes = initial_changes(draft("grpo", "Qwen2.5-7B", 16, *extra), read_hardware("h100"))
    path = "actor_rollout_ref.actor.megatron"
    assert changes[f"{path}.tensor_model_parallel_size"] * changes[f"{path}.pipeline_model_parallel_size"] == 2
    composed("grpo", "Qwen2.5-7B", 16, *extra, *(f"{key}={format_value(value)}" for key, value in changes.items()))


def test_a_problem_that_no_layout_solves_is_the_error_of_a_search():
    config = draft("grpo", "Qwen2.5-7B", 1, "actor_rollout_ref.actor.ppo_mini_batch_size=7")
    with raises("batch.mini-batch-size", " 7 (actor_rollout_ref.actor.ppo_mini_batch_size)"):
        search(config, read_hardware("h100"), LENGTHS)


def test_no_layout_is_listed_if_none_fits():
    tiny = read_hardware("h100")
    tiny.memory_gib = 4
    config = train_config("Llama-3-70B", megatron(8, 1, **OFFLOAD), nodes=1)
    assert search(config, tiny, LENGTHS).best == []
