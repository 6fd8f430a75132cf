"""Log-probs over the sampled support, from the command line: engine and actor agree, and a resumed run is exact."""

import math
from pathlib import Path

from support.cli_runs import RunFiles, assert_finite, reproducible
from support.documented_metrics import undocumented


def test_engine_and_actor_agree_and_a_resumed_run_is_exact(small, dense_reward, start):
    """With context parallelism in the actor, and a reference of its own at TP=2."""
    actor, ref = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
    arguments = [
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.experiment_name=support"),
        *("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=1"),
        *("trainer.max_actor_ckpt_to_keep=null", "trainer.val_before_train=false"),
        *(f"{actor}.tensor_model_parallel_size=1", f"{actor}.context_parallel_size=2"),
        *(f"{ref}.tensor_model_parallel_size=2", f"{ref}.context_parallel_size=1", f"{ref}.dtype=float32"),
        *("actor_rollout_ref.rollout.top_p=0.8", "actor_rollout_ref.rollout.calculate_log_probs=true"),
        *("actor_rollout_ref.rollout.support.enable=true", "actor_rollout_ref.rollout.support.max_tokens=16"),
    ]
    run = start(*arguments)
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "support")
    assert undocumented(name for row in files.metrics for name in row) == []
    for row in files.steps.values():
        assert_finite(row)
        assert row["training/rollout_probs_diff_mean"] < 1e-5
        assert 1 < row["rollout/support_size/mean"] <= row["rollout/support_size/max"] <= 16
        assert 0 < row["actor/entropy"] < math.log(row["rollout/support_size/max"]) + 1e-3
    assert max(row["actor/kl_loss"] for row in files.steps.values()) < 0.01
    assert all(abs(row["actor/ppo_kl"]) < 0.01 for row in files.steps.values())
    checkpoint = run.folder / "outputs" / "support" / "checkpoints" / "global_step_1"
    again = start(*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert again.wait() == 0, again.output
    resumed = RunFiles(again.folder, "support")
    assert reproducible(resumed.steps[2]) == reproducible(files.steps[2])


def test_interrupted_responses_keep_the_support_of_the_weights_that_sampled_them(small, dense_reward, start):
    """With the exact KL to a reference, also over the support."""
    actor = "actor_rollout_ref.actor"
    run = start(
        *("--config-name", "quickstart_async", *small, *dense_reward, "trainer.experiment_name=async"),
        *("trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=2"),
        *("data.max_response_length=40", "actor_rollout_ref.rollout.max_num_seqs=4"),
        # Responses are in flight at each sync, however slow the trainer is on a loaded machine.
        f"actor_rollout_ref.model.external_lib=[{Path(__file__).with_name('slow_engine.py')}]",
        *(f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_type=full", f"{actor}.kl_loss_coef=0.01"),
        *("actor_rollout_ref.rollout.top_k=3", "actor_rollout_ref.rollout.calculate_log_probs=true"),
        "actor_rollout_ref.rollout.support.enable=true",
    )
    assert run.wait() == 0, run.output
    steps = list(RunFiles(run.folder, "async").steps.values())
    assert sum(row["rollout_service/interrupted"] for row in steps) > 0
    assert sum(row["fully_async/partial/total_partial_num"] for row in steps) > 0
    for row in steps:
        assert_finite(row)
        assert row["agent/failed"] == 0
        assert row["rollout/support_size/mean"] == row["rollout/support_size/max"] == 3
        assert 0 < row["actor/entropy"] < math.log(3) + 1e-3
        assert 0 <= row["actor/kl_loss"] < 0.05
    assert steps[0]["training/rollout_probs_diff_mean"] < 1e-5
