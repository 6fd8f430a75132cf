"""Planned jobs: roles, passes, phases."""

import json

import pytest
from planned_jobs import MODELS, megatron, train_job
from support.expected_errors import raises

from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig
from megarl.config.build import build
from megarl.ops.plan.flops import Lengths, lengths_of
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.memory import plan_memory
from megarl.ops.plan.step_costs import step_cost


def reward_model_folder(path):
    """Write the config of a reward model with the shape of Qwen2.5-7B."""
    raw = json.loads((MODELS / "Qwen2.5-7B" / "config.json").read_text(encoding="utf-8"))
    raw |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(path)


def test_roles_and_phases_follow_the_algorithm(tmp_path):
    job = train_job(
        "Qwen2.5-7B",
        megatron(4),
        megatron(2, 2),
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__ref__megatron=megatron(2),
        reward__model__enable=True,
        reward__model__path=reward_model_folder(tmp_path),
        reward__model__megatron=megatron(4),
    )
    assert [role.name for role in job.roles] == ["actor", "critic", "reference", "reward_model"]
    assert job.phases == (
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "update_critic",
        "update_actor",
        "update_weights",
    )
    assert job.role("critic").value_head and not job.role("reference").trains
    assert {planned.phase for planned in job.role("reference").passes} == {"ref"}
    plan = plan_memory(job, 80 * 2**30)
    assert [memory.phase for memory in plan.phases] == list(job.phases)
    assert all(
        memory.nbytes > 0 and memory.dominant.nbytes == max(c.nbytes for c in memory.components)
        for memory in plan.phases
    )


@pytest.mark.parametrize(("algorithm", "scored"), [("remax", 3), ("best_of_n", 2)])
def test_all_samples_are_scored_and_selected_ones_are_trained_on(algorithm, scored, tmp_path):
    """64 prompts: ReMax trains on two samples and scores a greedy third; best-of-n trains on one of two.

    Each of eight ranks holds a copy of the reward model: 28 layers with 28 heads of size 128, and a scalar head.
    """
    settings = {
        "remax": {"algorithm__adv_estimator": "remax"},
        "best_of_n": {"algorithm__adv_estimator": "rft", "algorithm__best_of_n": {"enable": True, "keep": 1}},
    }[algorithm]
    job = train_job(
        "Qwen2.5-7B",
        megatron(2),
        reward__model__enable=True,
        reward__model__path=reward_model_folder(tmp_path),
        reward__model__megatron=megatron(1),
        **settings,
    )
    trained, samples = 64 * (scored - 1), 64 * scored
    assert job.rollout is not None and job.rollout.samples == samples
    assert {planned.phase: planned.samples for role in job.roles for planned in role.passes} == {
        "reward": samples,
        "old_log_prob": trained,
        "update_actor": trained,
    }
    assert job.batches.phase("reward_model").samples_per_rank == samples // 8
    step = step_cost(job, read_hardware("h100"), lengths_of(job.config))
    flops = {phase.phase: phase.flops for phase in step.phases}
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert flops["reward"] == pytest.approx(28 * (2 * layer * 2048 + 2 * 3584 * 2048**2) * samples, rel=1e-4)
    head = 2 * 152064 * 3584 * 1024
    assert flops["old_log_prob"] == pytest.approx((flops["reward"] / samples + head) * trained, rel=1e-4)
    assert step.tokens == trained * 2048, "as the metric perf/throughput counts them"


def test_device_memory_equals_the_states_of_its_stage():
    job = train_job("Qwen2.5-7B", megatron(2, 4))
    plan = plan_memory(job, 80 * 2**30)
    (update,) = (memory for memory in plan.phases if memory.phase == "update_actor")
    stage = plan.roles["actor"].stages[job.role("actor").layout.coordinate(update.device).pp]
    sizes = {c.name: c.nbytes for c in update.components if c.owner == "actor"}
    assert (sizes["weights"], sizes["gradients"]) == (stage.states.weights, stage.states.gradients)


@pytest.mark.parametrize(("schema", "sequences"), [(SFTConfig, 1), (RewardTrainingConfig, 2)])
def test_supervised_jobs_have_one_phase(schema, sequences, tmp_path):
    values = {
        "data": {
            "train_files": ["x.parquet"],
            "train_batch_size": 32,
            "max_length": 1000,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
        },
        "model": {"path": reward_model_folder(tmp_path) if sequences == 2 else str(MODELS / "Qwen2.5-7B")},
        "megatron": megatron(4),
        "trainer": {"experiment_name": "planned", "n_gpus_per_node": 8, "device": "cuda"},
    }
    job = planned_job(build(schema, values))
    (role,) = job.roles
    (update,) = role.passes
    assert job.phases == ("update",) and job.rollout is None and role.trains
    assert update.tokens == 2 * sequences * 1000 and update.micro_batches == 8
    assert update.outputs <= update.tokens
    plan = plan_memory(job)
    assert plan.kv is None and max(plan.phases, key=lambda phase: phase.nbytes).phase == "update"


@pytest.mark.parametrize(
    ("loss", "phases"), [("dpo", ("ref", "update")), ("kto", ("ref", "update")), ("simpo", ("update",))]
)
def test_preference_job_keeps_a_reference_in_host_memory(loss, phases):
    values = {
        "data": {"train_files": ["x.parquet"], "train_batch_size": 32, "max_length": 1000},
        "model": {"path": str(MODELS / "Qwen2.5-7B")},
        "megatron": megatron(4),
        "loss": {"type": loss},
        "trainer": {"experiment_name": "planned", "n_gpus_per_node": 8, "device": "cuda"},
    }
    values["data"]["max_token_len_per_gpu"] = 2000
    job = planned_job(build(PreferenceConfig, values))
    assert job.phases == phases and tuple(planned.phase for planned in job.roles[0].passes) == phases
    copies = {part.name: part.nbytes for part in plan_memory(job).host}
    if loss == "simpo":
        assert "reference copy" not in copies
    else:  # bfloat16 weights of two data-parallel ranks, in chunks
        assert copies["reference copy"] == pytest.approx(2 * 2 * 7.616e9, rel=0.1)
    step = step_cost(job, read_hardware("h100"), Lengths(0, 1000, 1000, "test"))
    costs = {phase.phase: phase.cost.total for phase in step.phases}
    assert tuple(costs) == phases and all(costs.values())


def test_an_invalid_layout_is_rejected_by_its_key():
    with raises("layout.tp-heads", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 "):
        train_job("Qwen2.5-7B", megatron(8))
