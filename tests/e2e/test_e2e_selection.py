"""Dynamic sampling and best-of-n from the command line, and resume in the middle of a generation batch."""

import json

import pytest
from support.cli_runs import REWARDS, RunFiles, assert_finite, read_jsonl, reproducible

PROMPTS, SAMPLES, KEPT = 24, 4, 2


@pytest.fixture(scope="module")
def arguments(small):
    return [
        *("--config-name", "quickstart_grpo", *small, "trainer.experiment_name=selection"),
        *("trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *("trainer.rollout_data_dir=rollouts", f"actor_rollout_ref.rollout.n={SAMPLES}"),
        *(f"reward.custom_reward_function.path={REWARDS}", "reward.custom_reward_function.name=dense_or_constant"),
        *("algorithm.filter_groups.enable=true", "data.gen_batch_size=32"),
        *("algorithm.best_of_n.enable=true", f"algorithm.best_of_n.keep={KEPT}"),
    ]


@pytest.fixture(scope="module")
def selection(arguments, start):
    run = start(*arguments, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null")
    assert run.wait() == 0, run.output
    return RunFiles(run.folder, "selection")


def test_every_batch_is_full_of_groups_with_differing_scores(selection):
    for step, row in selection.steps.items():
        assert_finite(row)
        assert row["train/num_gen_batches"] >= 2 and row["filter_groups/filled"] == 0
        generated, dropped = row["filter_groups/asked"], row["filter_groups/dropped"]
        assert generated - dropped == PROMPTS and dropped > 0 and row["filter_groups/surplus"] >= 0
        assert row["filter_groups/efficiency"] == pytest.approx(PROMPTS / generated)
        assert row["best_of_n/kept/mean"] > row["best_of_n/all/mean"]
        answers = read_jsonl(selection.folder / "rollouts" / f"{step}.jsonl")
        assert len(answers) == PROMPTS * KEPT and all(int(answer["gts"]) % 2 for answer in answers)
        assert row["critic/score/mean"] == pytest.approx(row["best_of_n/kept/mean"], rel=1e-5)


@pytest.mark.release(twin="tests/samples/test_samples_service.py::test_dynamic_sampling_resumes_from_a_checkpoint")
def test_resume_in_the_middle_of_a_generation_batch_is_equal_within_rounding(selection, arguments, start):
    checkpoint = selection.folder / "outputs" / "selection" / "checkpoints" / "global_step_1"
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["dataloader"]["rest"] and state["rollout"]["ledger"]["dropped"] > 0
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    run = start(*arguments, *resume)
    assert run.wait() == 0, run.output
    again = RunFiles(run.folder, "selection")
    for step in (2, 3):
        assert reproducible(again.steps[step]) == pytest.approx(reproducible(selection.steps[step]), rel=1e-5, abs=1e-7)
