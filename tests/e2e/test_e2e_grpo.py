"""GRPO from the command line: separate reference workers, all trackers, and a reward function that often fails."""

import json
import os
import signal
from pathlib import Path

import pytest
from reward_functions import PAUSE_AT, PAUSED
from safetensors.torch import load_file
from support.cli_runs import ONE_BY_ONE, REWARDS, RunFiles, assert_finite, read_jsonl, reproducible
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, SAMPLES = 3, 48
ENDED_IN_STEP = 2
ALIGNMENT = "algorithm.repr_align.ref_alignment"


@pytest.fixture(scope="module")
def arguments(small):
    """Actor at PP=2, reference at TP=2, engine in FP8; the reward function fails for even sums."""
    return [
        *("--config-name", "quickstart_grpo", *small, "trainer.experiment_name=grpo"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.rollout_data_dir=rollouts"),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        *(
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1",
        ),
        "actor_rollout_ref.ref.megatron.dtype=float32",
        *("actor_rollout_ref.actor.kl_loss_coef=0.01", "sync.verify_freq=1", "sync.transport=inline"),
        *(f"reward.custom_reward_function.path={REWARDS}", "reward.custom_reward_function.name=one_or_failure"),
        *("reward.on_error=mask", "reward.max_failure_ratio=0.9", *ONE_BY_ONE),
        *("actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.quantization=fp8"),
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token_k2"),
        "algorithm.rollout_correction.rollout_rs_threshold=0.02",
        *("algorithm.ref_quality_score.enable=true", "algorithm.repr_align.enable=true"),
        *(f"{ALIGNMENT}.enable=true", f"{ALIGNMENT}.schedule=constant", f"{ALIGNMENT}.entropy_high_threshold=0"),
    ]


@pytest.fixture(scope="module")
def grpo(arguments, start):
    """An uninterrupted run without checkpoints."""
    run = start(
        *arguments,
        "trainer.logger=[console,jsonl,tensorboard,wandb]",
        env={"WANDB_MODE": "offline"},
        warm=True,
    )
    assert run.wait() == 0, run.output
    assert run.remaining() == []
    return RunFiles(run.folder, "grpo")


@pytest.fixture(scope="module")
def answers(grpo):
    return {step: read_jsonl(grpo.folder / "rollouts" / f"{step}.jsonl") for step in grpo.steps}


def test_metrics_of_a_run_without_critic(grpo):
    assert list(grpo.steps) == [1, 2, 3]
    for row in grpo.steps.values():
        assert_finite(row)
        assert {"actor/pg_loss", "actor/kl_loss", "actor/kl_coef", "critic/advantages/mean"} <= row.keys()
        assert not {"critic/vf_loss", "critic/values/mean", "timing_s/values", "actor/reward_kl_penalty"} & row.keys()
        assert row["actor/kl_coef"] == 0.01


def test_rollout_correction_of_an_engine_in_fp8(grpo):
    for row in grpo.steps.values():
        # FP8 has 4 significant bits: log-prob errors are a few hundredths, and rarely 0.2 (k2 = 0.02).
        assert 5e-3 < row["training/rollout_log_probs_diff_mean"] < 0.1
        assert row["weight_sync/verified"] == 1
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.05)
        assert row["rollout_corr/rollout_is_std"] > 1e-4
        assert 0 <= row["rollout_corr/rollout_rs_masked_fraction"] < 0.2


def test_reference_with_another_layout_is_the_initial_policy(grpo):
    losses = [row["actor/kl_loss"] for row in grpo.steps.values()]
    # In step 1 the KL of the first mini-batch is 0; the second one comes after a single optimizer step.
    assert 0 <= losses[0] < losses[1] < losses[2]


def test_reference_quality_and_alignment_rewards(grpo):
    # The quality weight warms up over 2 of the 3 steps; the alignment weight is constant.
    assert [row["ref_quality/weight"] for row in grpo.steps.values()] == pytest.approx([0.15, 0.3, 0.3])
    for row in grpo.steps.values():
        assert row["repr_align/weight"] == 0.2 and row["repr_align/fired"] == 1
        assert row["ref_quality/left_out"] == row["reward/failed"]
        assert 0 < row["ref_quality/quality/min"] < row["ref_quality/quality/max"] <= 1
        assert -1 <= row["repr_align/similarity/min"] < row["repr_align/similarity/max"] <= 1 + 1e-6
        assert row["repr_align/empty_ground_truths"] == row["repr_align/cut_ground_truths"] == 0
        weight, alignment = row["ref_quality/weight"], row["repr_align/reward_added/mean"]
        assert alignment == pytest.approx(0.2 * row["repr_align/similarity/mean"], rel=1e-5)
        blended = (1 - weight) * row["critic/score/mean"] + weight * row["ref_quality/quality/mean"]
        assert row["critic/rewards/mean"] == pytest.approx(blended + alignment, rel=1e-5)
        assert row["timing_s/repr_align"] > 0


def test_rollout_dumps_have_the_keys_of_verl(answers):
    for step, rows in answers.items():
        assert len(rows) == SAMPLES
        assert all({"input", "output", "gts", "score", "step"} <= row.keys() and row["step"] == step for row in rows)


def test_failed_rewards_are_counted_and_not_scored_as_zero(grpo, answers):
    for step, row in grpo.steps.items():
        scored = [answer["score"] for answer in answers[step] if int(answer["gts"]) % 2]
        failed = [answer["score"] for answer in answers[step] if int(answer["gts"]) % 2 == 0]
        assert failed and failed == [None] * len(failed)
        assert row["reward/failed"] == len(failed)
        assert row["critic/score/min"] == min(scored) >= 1
        assert row["critic/score/mean"] == pytest.approx(sum(scored) / len(scored), rel=1e-6)
    before = grpo.metrics[0]
    assert before["val-aux/failed_rewards"] > 0 and before["val-core/arithmetic/reward/mean@1"] >= 1


def test_tensorboard_values_equal_the_metrics_file(grpo):
    events = EventAccumulator(str(grpo.newest / "tensorboard")).Reload()
    for name in ("critic/score/mean", "actor/kl_loss", "actor/grad_norm"):
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx({step: row[name] for step, row in grpo.steps.items()}, rel=1e-6)


def test_wandb_writes_an_offline_run(grpo):
    (file,) = grpo.newest.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"critic/score/mean" in content and b"actor/kl_loss" in content


@pytest.fixture(scope="module")
def ended(arguments, start, tmp_path_factory):
    """The same run with background saves, ended in the middle of its first step by SIGTERM, of its second by SIGHUP."""
    folder, runs = tmp_path_factory.mktemp("ended"), []
    for number in (signal.SIGTERM, signal.SIGHUP):
        paused = folder / "paused"
        env = {PAUSE_AT: str(SAMPLES // 2), PAUSED: str(paused)}  # counted from the start of the process
        run = start(*arguments, *SAVING, folder=folder, env=env, warm=True)
        run.wait_until(paused.exists)
        os.kill(run.process.pid, number)
        paused.unlink()
        assert run.wait() == 0, run.output
        assert run.remaining() == []
        runs.append(run)
    return runs


SAVING = [
    *("trainer.save_freq=100", "trainer.resume_mode=auto", "actor_rollout_ref.actor.checkpoint.async_save=true"),
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
]


def test_signals_save_a_checkpoint_and_print_how_to_resume(ended):
    files = RunFiles(ended[0].folder, "grpo")
    folders = [files.root / "checkpoints" / f"global_step_{step}" for step in (1, ENDED_IN_STEP)]
    for step, (run, folder, name) in enumerate(zip(ended, folders, ("SIGTERM", "SIGHUP"), strict=True), 1):
        output = "".join(run.output.split())  # the terminal wraps lines
        assert f"Endedafterstep{step}of{STEPS}({name}),savedin{folder}.Togoon:python" in output
    assert list(files.steps) == [1, ENDED_IN_STEP]
    assert files.summary["steps"] == 1 and files.summary["stopped"] == "SIGHUP"
    assert [path.name for path in folders[0].parent.glob("*global_step*")] == [folders[1].name], "the last one is kept"


def test_checkpoint_has_config_versions_manifest_and_hf_export(ended):
    files = RunFiles(ended[-1].folder, "grpo")
    folder = files.root / "checkpoints" / f"global_step_{ENDED_IN_STEP}"
    assert (folder / "config.yaml").read_text(encoding="utf-8") == (files.newest / "config.yaml").read_text(
        encoding="utf-8"
    )
    versions = [
        json.loads((folder / name).read_text(encoding="utf-8"))["versions"]
        for name in ("trainer_state.json", "actor/state.json")
    ]
    assert all({"megarl", "python", "torch", "megatron-core"} <= packages.keys() for packages in versions)
    assert "lm_head.weight" in load_file(folder / "actor" / "huggingface" / "model.safetensors")
    assert (folder / "actor" / "huggingface" / "tokenizer_config.json").is_file()
    listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == present - {"manifest.json"}


@pytest.mark.release(twin="tests/e2e/test_e2e_ppo.py::test_killed_run_resumes_bit_exact")
def test_run_ended_by_signals_resumes_bit_exact(arguments, ended, grpo, start):
    run = start(*arguments, *SAVING, folder=ended[-1].folder)
    assert run.wait() == 0, run.output
    again = RunFiles(ended[-1].folder, "grpo")
    assert again.summary["steps"] == STEPS - ENDED_IN_STEP
    assert list(again.steps) == list(grpo.steps)
    for step, row in again.steps.items():
        assert reproducible(row) == reproducible(grpo.steps[step])
        dumps = [files.folder / "rollouts" / f"{step}.jsonl" for files in (again, grpo)]
        assert Path(dumps[0]).read_text(encoding="utf-8") == Path(dumps[1]).read_text(encoding="utf-8")
