"""Log-probs over the sampled support, from the command line: engine and actor agree, and a resumed run is exact."""

from support.cli_runs import RunFiles, assert_finite, reproducible
from support.documented_metrics import undocumented


def test_engine_and_actor_agree_and_a_resumed_run_is_exact(small, dense_reward, start):
    arguments = [
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.experiment_name=support"),
        *("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=1"),
        *("trainer.max_actor_ckpt_to_keep=null", "trainer.val_before_train=false"),
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
        assert 1 < row["rollout/support_size/mean"] < row["rollout/support_size/max"] <= 16
        # An entropy over the support is at most that of as many equally probable tokens.
        assert 0 < row["actor/entropy"] < 2.77
        assert row["actor/kl_loss"] >= 0
    step = run.folder / "outputs" / "support" / "checkpoints" / "global_step_1"
    again = start(*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}")
    assert again.wait() == 0, again.output
    resumed = RunFiles(again.folder, "support")
    assert reproducible(resumed.steps[2]) == reproducible(files.steps[2])
