"""On-policy distillation from the command line: a small student learns from a larger teacher, without a reward."""

import pandas
import pytest
from safetensors.torch import load_file
from support.arithmetic_task import make_task
from support.cli_runs import RunFiles, assert_finite

STEPS = 6
SIZES = ("--largest", "9", "--num-test", "20", "--lessons", "60", "60", "--pairs", "40", "10")
TEACHER = "distillation.teacher_models.teacher_model"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Four times as wide as the student, with other random weights and the same tokenizer."""
    return make_task(tmp_path_factory.mktemp("teacher"), "--hidden", "128", "--seed", "7", *SIZES) / "model"


@pytest.fixture(scope="module")
def distilled(small, teacher, start):
    """A student at TP=2, a teacher at PP=2, each response graded over the teacher's 16 most probable tokens."""
    run = start(
        *("--config-name", "quickstart_distill", *small, "trainer.experiment_name=distill"),
        *("actor_rollout_ref.rollout.n=1", "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.hf_export_dir=student"),
        *(f"{TEACHER}.model_path={teacher}", f"{TEACHER}.megatron.pipeline_model_parallel_size=2"),
        f"{TEACHER}.megatron.tensor_model_parallel_size=1",
        *("distillation.distillation_loss.topk=16", "actor_rollout_ref.actor.optim.lr=5e-3"),
    )
    assert run.wait() == 0, run.output
    return RunFiles(run.folder, "distill")


def test_the_student_approaches_the_teacher_without_a_reward(distilled):
    rows = list(distilled.steps.values())
    assert len(rows) == STEPS
    for row in rows:
        assert_finite(row)
        assert {"actor/distillation/loss", "actor/distillation/student_mass", "timing_s/teacher"} <= row.keys()
        assert "actor/pg_loss" not in row and row["actor/grad_norm"] > 0
    losses = [row["actor/distillation/loss"] for row in rows]
    masses = [row["actor/distillation/student_mass"] for row in rows]
    assert losses[-1] < 0.6 * losses[0]
    assert masses[-1] > 1.5 * masses[0]
    assert all(row["critic/score/max"] == 0 for row in rows), "no answer was right: the teacher alone gave the gradient"


def test_the_student_keeps_its_size(distilled, teacher):
    student, theirs = (
        load_file(distilled.folder / "student" / "model.safetensors"),
        load_file(teacher / "model.safetensors"),
    )
    name = "model.embed_tokens.weight"
    assert theirs[name].shape == (student[name].shape[0], 4 * student[name].shape[1])


@pytest.mark.release(twin="tests/workers/test_workers_distillation.py::test_teacher_and_losses")
def test_each_prompt_approaches_its_own_teacher_over_the_whole_vocabulary(small, task, teacher, tmp_path, start):
    """Two teachers of other hidden sizes and layouts give the exact KL (loss_mode=full)."""
    narrow = make_task(tmp_path / "narrow", "--hidden", "64", "--seed", "8", *SIZES) / "model"
    rows = pandas.read_parquet(task / "data" / "train.parquet")
    rows["expert"] = ["wide" if index % 3 else "narrow" for index in range(len(rows))]
    rows.to_parquet(tmp_path / "train.parquet")
    section = "distillation.teacher_models"
    run = start(
        *("--config-name", "quickstart_distill", *small, "trainer.experiment_name=experts"),
        *("actor_rollout_ref.rollout.n=1", "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *(f"data.train_files={tmp_path}/train.parquet", f"trainer.total_training_steps={STEPS}"),
        *(f"~{TEACHER}", "distillation.teacher_key=expert", "distillation.distillation_loss.loss_mode=full"),
        *(f"+{section}.wide.model_path={teacher}", f"+{section}.wide.megatron.pipeline_model_parallel_size=2"),
        f"+{section}.wide.megatron.tensor_model_parallel_size=1",
        f"+{section}.narrow.model_path={narrow}",  # with the student's layout, tensor parallel 2
        *("actor_rollout_ref.actor.optim.lr=5e-3", "trainer.test_freq=-1"),
    )
    assert run.wait() == 0, run.output
    steps = list(RunFiles(run.folder, "experts").steps.values())
    assert len(steps) == STEPS
    for row in steps:
        assert_finite(row)
        assert row["distillation/rows/wide"] > 0 < row["distillation/rows/narrow"]
        assert row["distillation/rows/wide"] + row["distillation/rows/narrow"] == 32
    losses = [row["actor/distillation/loss"] for row in steps]
    assert losses[-1] < 0.8 * losses[0]
