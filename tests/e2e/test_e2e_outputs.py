"""A second run beside the checkpoints and the exported policy of a first one."""

import pytest
from support.cli_runs import RunFiles

KEPT = ("trainer.save_freq=40", "trainer.hf_export_dir=outputs/quickstart/trained")
"""As launch/quickstart.sh."""
ROLLOUTS = "trainer.rollout_data_dir=outputs/quickstart/rollouts"


@pytest.fixture
def quickstart(small):
    tiny = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"]
    tiny += ["actor_rollout_ref.actor.use_kl_loss=false", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    return ["--config-name", "quickstart_grpo", *small, *tiny, "trainer.experiment_name=quickstart"]


def work(root):
    """Files of the checkpoints, of the exported policy and of the responses."""
    folders = (root / "checkpoints", root / "trained", root / "rollouts")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.fixture
def first(quickstart, start, tmp_path):
    """Options, folder and ID of a run that saves, exports and writes its responses."""
    kept = [*quickstart, *KEPT, ROLLOUTS]
    run = start(*kept, "trainer.total_training_steps=3", folder=tmp_path)
    assert run.wait() == 0, run.output
    root = tmp_path / "outputs" / "quickstart"
    run_id = (RunFiles(tmp_path, "quickstart").newest / "run_id").read_text(encoding="utf-8")
    assert (root / "checkpoints" / "global_step_3" / "run_id").read_text(encoding="utf-8") == run_id
    assert (root / "trained" / "run_id").read_text(encoding="utf-8") == run_id
    return kept, root, run_id


def test_a_later_run_keeps_the_work_of_an_earlier_one(first, start, tmp_path):
    """It replaces that work if it is told to."""
    kept, root, run_id = first
    earlier = work(root)
    rejected = start(*kept, "trainer.total_training_steps=2", folder=tmp_path)
    assert rejected.wait() == 2, rejected.output
    assert "[disk.folder-of-other-run]" in rejected.output
    for held in ("checkpoints holds 1 checkpoint ", "up to step 3", "rollouts holds 6 files "):
        assert held in rejected.output
    for alternative in ("trainer.resume_mode=auto", "<another folder>", "trainer.overwrite_output=true"):
        assert alternative in rejected.output
    assert "start workers" not in rejected.output and "Traceback" not in rejected.output
    assert work(root) == earlier

    shorter = ("trainer.total_training_steps=2", "trainer.overwrite_output=true")
    again = start(*kept, *shorter, folder=tmp_path)
    assert again.wait() == 0, again.output
    assert [path.name for path in (root / "checkpoints").glob("global_step_*")] == ["global_step_2"]
    new_id = (root / "trained" / "run_id").read_text(encoding="utf-8")
    assert new_id == (root / "checkpoints" / "global_step_2" / "run_id").read_text(encoding="utf-8") != run_id
    assert new_id == (root / "rollouts" / "run_id").read_text(encoding="utf-8")
    assert {path.stem for path in (root / "rollouts").glob("*.jsonl")} == {"1", "2"}


@pytest.mark.release(twin="tests/trainer/test_trainer_output_folders.py::test_a_resumed_run_replaces_its_own_work")
def test_a_resumed_run_continues_its_work_and_a_variation_by_hand_keeps_it(first, quickstart, start, tmp_path):
    """A variation by hand neither saves nor exports."""
    kept, root, run_id = first
    earlier = work(root)
    beside = start(*quickstart, "trainer.total_training_steps=2", folder=tmp_path)
    assert beside.wait() == 0, beside.output
    assert work(root) == earlier

    resumed = start(*kept, "trainer.total_training_steps=4", "trainer.resume_mode=auto", folder=tmp_path)
    assert resumed.wait() == 0, resumed.output
    assert (root / "trained" / "run_id").read_text(encoding="utf-8") == run_id
    assert [path.name for path in (root / "checkpoints").glob("global_step_*")] == ["global_step_4"]
    assert {path.stem for path in (root / "rollouts").glob("*.jsonl")} == {"1", "2", "3", "4"}
