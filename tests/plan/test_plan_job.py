"""Jobs as the planner sees them: roles, passes, phases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planned_jobs import MODELS, megatron, train_job

from megarl.config import RewardTrainingConfig, SFTConfig
from megarl.config.build import build
from megarl.errors import ConfigError
from megarl.plan import plan_memory, planned_job
from megarl.plan.hardware import read_hardware
from megarl.plan.lengths import longest_lengths
from megarl.plan.times import time_step


def scorer(path: Path) -> str:
    """A reward model of the shape of Qwen2.5-7B."""
    raw = json.loads((MODELS / "Qwen2.5-7B" / "config.json").read_text())
    raw |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def test_a_job_has_the_roles_and_phases_that_its_algorithm_needs(tmp_path: Path) -> None:
    job = train_job(
        "Qwen2.5-7B",
        megatron(4),
        megatron(2, 2),
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__ref__megatron=megatron(2),
        reward_model__enable=True,
        reward_model__model={"path": scorer(tmp_path)},
        reward_model__megatron=megatron(4),
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
    assert {one.phase for one in job.role("reference").passes} == {"ref"}
    plan = plan_memory(job, 80 * 2**30)
    assert [one.phase for one in plan.phases] == list(job.phases)
    assert all(one.nbytes > 0 and one.dominant.nbytes == max(c.nbytes for c in one.components) for one in plan.phases)


@pytest.mark.parametrize(("algorithm", "scored"), [("remax", 3), ("best_of_n", 2)])
def test_all_answers_are_scored_and_those_that_are_learned_from_go_on(
    algorithm: str, scored: int, tmp_path: Path
) -> None:
    """Of 64 prompts: with ReMax two answers and a greedy one, of which two are learned from; with best of n one of two.

    Eight ranks have a copy of the reward model each, of 28 layers, 28 heads of 128 among them, and a head of one.
    """
    settings = {
        "remax": {"algorithm__adv_estimator": "remax"},
        "best_of_n": {"algorithm__adv_estimator": "rft", "algorithm__best_of_n": {"enable": True, "keep": 1}},
    }[algorithm]
    job = train_job(
        "Qwen2.5-7B",
        megatron(2),
        reward_model__enable=True,
        reward_model__model={"path": scorer(tmp_path)},
        reward_model__megatron=megatron(1),
        **settings,
    )
    learned, answers = 64 * (scored - 1), 64 * scored
    assert job.rollout is not None and job.rollout.samples == answers
    assert {one.phase: one.samples for role in job.roles for one in role.passes} == {
        "reward": answers,
        "old_log_prob": learned,
        "update_actor": learned,
    }
    assert job.batches.phase("reward_model").samples_per_rank == answers // 8
    step = time_step(job, read_hardware("h100"), longest_lengths(1024, 1024))
    work = {phase.phase: phase.work.total for phase in step.phases}
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert work["reward"] == pytest.approx(28 * (2 * layer * 2048 + 2 * 3584 * 2048**2) * answers, rel=1e-4)
    head = 2 * 152064 * 3584 * 1024
    assert work["old_log_prob"] == pytest.approx((work["reward"] / answers + head) * learned, rel=1e-4)
    assert step.tokens == learned * 2048, "as the metric perf/throughput counts them"


def test_what_is_on_a_device_is_what_its_stages_hold() -> None:
    job = train_job("Qwen2.5-7B", megatron(2, 4))
    plan = plan_memory(job, 80 * 2**30)
    (update,) = (one for one in plan.phases if one.phase == "update_actor")
    stage = plan.roles["actor"].stages[job.role("actor").layout.coordinate(update.device).pp]
    held = {c.name: c.nbytes for c in update.components if c.owner == "actor"}
    assert (held["weights"], held["gradients"]) == (stage.states.weights, stage.states.gradients)


@pytest.mark.parametrize(("schema", "sequences"), [(SFTConfig, 1), (RewardTrainingConfig, 2)])
def test_supervised_jobs_have_one_phase(schema: type[SFTConfig], sequences: int, tmp_path: Path) -> None:
    values = {
        "data": {
            "train_files": ["x.parquet"],
            "train_batch_size": 32,
            "max_length": 1000,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
        },
        "model": {"path": scorer(tmp_path) if sequences == 2 else str(MODELS / "Qwen2.5-7B")},
        "megatron": megatron(4),
        "trainer": {"experiment_name": "planned", "n_gpus_per_node": 8, "device": "cuda"},
    }
    job = planned_job(build(schema, values))
    (role,) = job.roles
    (one,) = role.passes
    assert job.phases == ("update",) and job.rollout is None and role.trains
    assert one.tokens == 2 * sequences * 1000 and one.micro_batches == 8
    assert one.outputs <= one.tokens
    plan = plan_memory(job)
    assert plan.kv is None and plan.peak.phase == "update"


def test_a_layout_that_does_not_fit_the_model_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.megatron\.tensor_model_parallel_size=8 must"):
        train_job("Qwen2.5-7B", megatron(8))
