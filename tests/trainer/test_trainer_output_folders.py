"""Folders with the work of another run are rejected before any process starts."""

from collections.abc import Callable

import pytest
from support.expected_errors import raises

from megarl.config import EvaluateConfig, GenerateConfig, TrainConfig, build
from megarl.config.stored import may_save
from megarl.trainer.jobs.output_folders import check_output_files, check_output_folders, claim_response_folders
from megarl.trainer.state.checkpoint_store import CheckpointStore

Config = Callable[..., TrainConfig]


@pytest.fixture
def folders(tmp_path):
    """Overrides of a run that saves and exports."""
    return {
        "trainer.save_freq": 1,
        "trainer.default_local_dir": str(tmp_path / "checkpoints"),
        "trainer.hf_export_dir": str(tmp_path / "export"),
    }


def save(root, step, run_id):
    with CheckpointStore(root, None, run_id).saving(step):
        pass
    return root / f"global_step_{step}"


def export(folder, run_id):
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    if run_id is not None:
        (folder / "run_id").write_text(run_id, encoding="utf-8")


def test_a_new_run_accepts_absent_and_empty_folders(train_config, folders, tmp_path):
    config = train_config(folders)
    check_output_folders(config, None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "export").mkdir()
    check_output_folders(config, None)


def test_a_new_run_is_rejected_with_the_alternatives(train_config, folders, tmp_path):
    save(tmp_path / "checkpoints", 20, "other"), save(tmp_path / "checkpoints", 40, "other")
    export(tmp_path / "export", "other")
    config = train_config({**folders, "trainer.resume_mode": "disable"})
    with raises("disk.folder-of-other-run") as raised:
        check_output_folders(config, None)
    assert str(raised.value).splitlines() == [
        f"trainer.default_local_dir={tmp_path}/checkpoints holds 2 checkpoints of another run, up to step 40",
        f"trainer.hf_export_dir={tmp_path}/export is not empty, and this run did not write it",
        "The run would replace this work, so it does not start. Choose one:",
        "  continue the other run:  trainer.resume_mode=auto",
        "  keep both:               trainer.default_local_dir=<another folder> trainer.hf_export_dir=<another folder> "
        "(or another trainer.experiment_name, if the folder follows it)",
        "  replace the other's:     trainer.overwrite_output=true [disk.folder-of-other-run]",
    ]
    check_output_folders(train_config({**folders, "trainer.overwrite_output": True}), None)


@pytest.mark.parametrize("run_id", ["other", None])
def test_an_export_alone_cannot_be_resumed(train_config, folders, tmp_path, run_id):
    """Also a folder without an ID, such as a downloaded model."""
    export(tmp_path / "export", run_id)
    with raises("disk.folder-of-other-run", f"trainer.hf_export_dir={tmp_path}/export") as raised:
        check_output_folders(train_config(folders), None)
    assert "resume_mode" not in raised.value.text and "default_local_dir" not in raised.value.text
    check_output_folders(train_config({**folders, "trainer.val_only": True, "data.val_files": "x"}), None)


def test_a_resumed_run_replaces_its_own_work(train_config, folders, tmp_path):
    first = save(tmp_path / "checkpoints", 20, "mine")
    save(tmp_path / "checkpoints", 40, "mine")
    export(tmp_path / "export", "mine")
    check_output_folders(train_config(folders), first)


def test_a_checkpoint_with_a_damaged_id_has_no_owner(train_config, folders, tmp_path):
    """Its run resumes from the one before it, and saves the step again."""
    root = tmp_path / "checkpoints"
    first, damaged = save(root, 20, "mine"), save(root, 40, "mine")
    (damaged / "run_id").write_text("mind", encoding="utf-8")
    check_output_folders(train_config(folders), first)
    assert CheckpointStore(root).resolve("auto") == first
    save(root, 40, "mine")
    assert CheckpointStore(root).resolve("auto") == damaged


def test_a_resumed_run_is_rejected_for_later_steps_of_another(train_config, folders, tmp_path):
    root = tmp_path / "checkpoints"
    save(root, 10, "other")
    mine = save(root, 20, "mine")
    check_output_folders(train_config(folders), mine)
    save(root, 40, "other")
    with raises("disk.folder-of-other-run", f"trainer.default_local_dir={root}", "1 checkpoint", "step 40"):
        check_output_folders(train_config(folders), mine)


def test_a_checkpoint_from_elsewhere_does_not_open_a_folder_of_another_run(train_config, folders, tmp_path):
    elsewhere = save(tmp_path / "elsewhere", 40, "mine")
    save(tmp_path / "checkpoints", 10, "other")
    with raises("disk.folder-of-other-run", f"trainer.default_local_dir={tmp_path}/checkpoints", "1 checkpoint"):
        check_output_folders(train_config(folders), elsewhere)


def test_a_run_that_does_not_save_ignores_checkpoints(train_config, folders, tmp_path):
    save(tmp_path / "checkpoints", 40, "other")
    config = train_config({**folders, "trainer.save_freq": -1, "trainer.resume_mode": "disable"})
    assert not may_save(config)
    check_output_folders(config, None)
    limited = train_config({**folders, "trainer.save_freq": -1, "trainer.max_wall_seconds": 60})
    assert may_save(limited)


def test_supervised_jobs_are_checked_too(sft_config, folders, tmp_path):
    export(tmp_path / "export", "other")
    with raises("disk.folder-of-other-run", f"trainer.hf_export_dir={tmp_path}/export"):
        check_output_folders(sft_config(folders), None)


@pytest.fixture
def responses(tmp_path):
    return {
        "data.val_files": "x",
        "trainer.rollout_data_dir": str(tmp_path / "rollouts"),
        "trainer.validation_data_dir": str(tmp_path / "validation"),
    }


def dump(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}\n", encoding="utf-8")


def test_responses_of_another_run_are_rejected_by_folder(train_config, responses, tmp_path):
    config = train_config(responses)
    claim_response_folders(config, "other")
    check_output_folders(config, None)  # nothing is lost
    dump(tmp_path / "rollouts", "1.jsonl", "1.npz")
    named = (f"trainer.rollout_data_dir={tmp_path}/rollouts", "2 files", "trainer.rollout_data_dir=<another folder>")
    with raises("disk.folder-of-other-run", *named) as raised:
        check_output_folders(config, None)
    assert "validation_data_dir" not in raised.value.text
    dump(tmp_path / "validation", "20.jsonl")
    with raises("disk.folder-of-other-run", f"trainer.validation_data_dir={tmp_path}/validation", "1 file "):
        check_output_folders(train_config({**responses, "trainer.val_only": True}), None)
    check_output_folders(config, save(tmp_path / "elsewhere", 20, "other"))  # resumed: these are its own
    with raises("disk.folder-of-other-run", f"trainer.rollout_data_dir={tmp_path}/rollouts"):
        check_output_folders(config, save(tmp_path / "third", 20, "mine"))


def test_claimed_folders_keep_no_responses_of_another_run(train_config, responses, tmp_path):
    """With trainer.overwrite_output; samples of two runs in one folder could not be told apart."""
    config = train_config({**responses, "trainer.overwrite_output": True})
    claim_response_folders(config, "other")
    dump(tmp_path / "rollouts", "1.jsonl", "9.jsonl", "9.npz", "notes.txt")
    check_output_folders(config, None)
    claim_response_folders(config, "mine")
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["notes.txt", "run_id"]
    dump(tmp_path / "rollouts", "1.jsonl")
    claim_response_folders(config, "mine")  # a resumed run
    assert (tmp_path / "rollouts" / "1.jsonl").exists()


def evaluation(tmp_path, **trainer):
    values = {
        "data": {"val_files": "x"},
        "actor_rollout_ref": {"model": {"path": "m"}},
        "best_answers": {"file": str(tmp_path / "best.parquet")},
        "trainer": {"experiment_name": "e", "validation_data_dir": str(tmp_path / "answers"), **trainer},
    }
    return build(EvaluateConfig, values)


def test_files_of_an_earlier_evaluation_are_rejected(tmp_path):
    config = evaluation(tmp_path)
    check_output_files(config, 20)
    dump(tmp_path / "answers", "10.jsonl")
    check_output_files(config, 20)  # another checkpoint's answers lie beside
    dump(tmp_path / "answers", "20.jsonl")
    check_output_files(config)
    with raises("disk.file-exists", "trainer.validation_data_dir", tmp_path / "answers" / "20.jsonl"):
        check_output_files(config, 20)
    dump(tmp_path, "best.parquet")
    with raises("disk.file-exists", tmp_path / "best.parquet", "best_answers.file=<another path>") as raised:
        check_output_files(config)
    assert "resume" not in raised.value.text
    check_output_files(evaluation(tmp_path, overwrite_output=True), 20)


def test_file_of_an_earlier_generation_is_rejected(tmp_path):
    values = {
        "data": {"prompts": ["a"], "output_path": str(tmp_path / "answers.jsonl")},
        "actor_rollout_ref": {"model": {"path": "m"}},
        "trainer": {"experiment_name": "e"},
    }
    check_output_files(build(GenerateConfig, values))
    dump(tmp_path, "answers.jsonl")
    with raises("disk.file-exists", "data.output_path", tmp_path / "answers.jsonl"):
        check_output_files(build(GenerateConfig, values))
