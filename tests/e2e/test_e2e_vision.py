"""Training with images from the command line: the engine sees them, the tower stays, and runs resume exactly."""

import pytest
from safetensors.torch import load_file
from support.cli_runs import RunFiles, assert_finite, reproducible
from support.squares_task import make_squares_task

STEPS = 2
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"), "--num-train", "24")


@pytest.fixture(scope="module")
def arguments(squares, dense_reward):
    return [
        *("--config-name", "vision", *dense_reward, f"actor_rollout_ref.model.path={squares}/model"),
        *(f"data.train_files={squares}/data/train.parquet", f"data.val_files={squares}/data/test.parquet"),
        *("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=4", "data.max_response_length=4"),
        *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9", "trainer.max_critic_ckpt_to_keep=9"),
        *("trainer.val_before_train=false", f"trainer.total_training_steps={STEPS}", "sync.verify_freq=1"),
    ]


def finished(run):
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "vision")
    assert list(files.steps) == list(range(1, STEPS + 1))
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3
        for rows in ("", "/images"):  # every prompt has a picture
            assert row[f"training/rollout_log_probs_diff_max{rows}"] < 1e-5
    return files


@pytest.fixture(scope="module")
def trained(arguments, start):
    return finished(start(*arguments, "trainer.hf_export_dir=export"))


def test_the_decoder_learns_and_the_tower_stays(trained, squares):
    before, after = (
        load_file(folder / "model.safetensors") for folder in (squares / "model", trained.folder / "export")
    )
    assert before.keys() == after.keys()
    unchanged = {name for name in before if before[name].equal(after[name])}
    tower = {name for name in before if name.startswith("visual.")}
    assert tower and tower <= unchanged
    assert not any(name.endswith("proj.weight") for name in unchanged - tower)


def test_a_resumed_run_repeats_the_second_step(trained, arguments, start):
    checkpoint = next(trained.folder.rglob("global_step_1"))
    run = start(*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert run.wait() == 0, run.output
    assert reproducible(RunFiles(run.folder, "vision").steps[2]) == reproducible(trained.steps[2])


def test_ppo_beside_generation(arguments, start):
    """A critic that sees the pictures, a pipeline, adapters, and generation beside training."""
    keys = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=false", "algorithm.use_kl_in_reward=true")
    layout = (f"{ACTOR}.megatron.tensor_model_parallel_size=1", f"{ACTOR}.megatron.pipeline_model_parallel_size=2")
    mode = ("async_training.mode=colocated", "async_training.max_staleness=0", "actor_rollout_ref.model.lora_rank=4")
    files = finished(start(*arguments, *keys, *layout, *mode, "trainer.save_freq=-1"))
    assert all(row["critic/grad_norm"] > 0 for row in files.steps.values())


def test_distillation_from_a_teacher_that_sees(arguments, tmp_path, start):
    teacher = make_squares_task(tmp_path / "teacher", "--hidden", "64", "--seed", "7") / "model"
    models = "distillation.teacher_models.teacher_model"
    layout = (f"{models}.megatron.pipeline_model_parallel_size=2", f"{models}.megatron.tensor_model_parallel_size=1")
    keys = ("distillation.enabled=true", f"{models}.model_path={teacher}", *layout, f"{ACTOR}.use_kl_loss=false")
    loss = ("distillation.distillation_loss.loss_mode=full", "distillation.distillation_loss.use_task_rewards=false")
    files = finished(start(*arguments, *keys, *loss, "trainer.save_freq=-1"))
    assert all(row["actor/distillation/loss"] > 0 for row in files.steps.values())
