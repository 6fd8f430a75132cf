"""The search: what it lists is right, fits, and is in order; more memory takes nothing away."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_jobs import MODELS, OFFLOAD, megatron, train_config

from megarl.config import TrainConfig
from megarl.config.compose import Request, compose
from megarl.plan.estimate import estimate
from megarl.plan.hardware import read_hardware
from megarl.plan.job import planned_job
from megarl.plan.lengths import read_lengths
from megarl.plan.search import layouts, role_choices, search

LENGTHS = read_lengths("mean=400,sigma=0.8,prompt_mean=300", 1024, 1024)
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


def composed(name, model, nodes, *more):
    overrides = (*BASE, f"actor_rollout_ref.model.path={MODELS / model}", f"trainer.nnodes={nodes}", *more)
    return compose(Request(TrainConfig, name, overrides))


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.sampled_from([("grpo", "Qwen2.5-7B", 1), ("ppo", "Qwen2.5-7B", 2), ("grpo", "Qwen3-30B-A3B", 4)]),
    hardware=st.sampled_from(["h100", "a100"]),
)
def test_what_is_listed_is_right_and_in_order(case, hardware):
    name, model, nodes = case
    node = read_hardware(hardware)
    found = search(composed(name, model, nodes), node, LENGTHS, top=2)
    assert found.best and found.planned >= len(found.best)
    for one in found.best:
        again = composed(name, model, nodes, *one.overrides())  # refuses what the configuration's own checks refuse
        plan = estimate(again, node, LENGTHS)
        assert plan.fits
        assert plan.step.seconds == pytest.approx(one.estimate.step.seconds)
    speeds = [one.estimate.step.throughput for one in found.best]
    assert speeds == sorted(speeds, reverse=True)
    assert len({tuple(one.overrides()) for one in found.best}) == len(found.best)


@settings(max_examples=4)
@given(gib=st.sampled_from([24, 40, 60]), more=st.sampled_from([1.3, 2.0]))
def test_more_memory_takes_no_layout_away(gib, more):
    config = composed("grpo", "Qwen2.5-7B", 1)
    small, large = read_hardware("h100"), read_hardware("h100")
    small.memory_gib, large.memory_gib = gib, more * gib

    def sizes(hardware):
        role = planned_job(config).role("actor")
        path = "actor_rollout_ref.actor.megatron.recompute_granularity"
        return {
            tuple((key, value) for key, value in one.changes.items() if key != path)
            for one in role_choices(config, role, hardware, LENGTHS)
        }

    assert sizes(small) <= sizes(large)


def test_seventy_billion_on_sixteen_nodes_needs_tensor_parallelism():
    """Nobody trains 70B on 80 GB with TP1 PP1: states alone take 6 bytes of each parameter."""
    found = search(composed("grpo", "Llama-3-70B", 16), read_hardware("h100"), LENGTHS, top=3)
    for one in found.best:
        layout = one.estimate.job.role("actor").layout
        assert layout.tp * layout.pp >= 8 and layout.tp <= 8
        assert layout.world_size == 128


def test_layers_that_do_not_divide_leave_the_last_stage_with_fewer():
    config = train_config("DeepSeek-V3", megatron(8, 1), nodes=8)
    role = planned_job(config).role("actor")
    key = "actor_rollout_ref.actor.megatron."
    eight = [one for one in layouts(role, 64, 8, 2048) if one[key + "pipeline_model_parallel_size"] == 8]
    assert eight and all(one[key + "num_layers_in_last_pipeline_stage"] == 61 - 7 * 8 for one in eight)


def test_where_nothing_fits_nothing_is_listed():
    tiny = read_hardware("h100")
    tiny.memory_gib = 4
    config = train_config("Llama-3-70B", megatron(8, 1, **OFFLOAD), nodes=1)
    assert search(config, tiny, LENGTHS).best == []
