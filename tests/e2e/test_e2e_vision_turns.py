"""Jobs whose later turns show images: engine and trainer agree, and runs resume with conversations in flight."""

import io
from pathlib import Path

import pytest
from PIL import Image
from support.cli_runs import RunFiles, assert_finite, read_jsonl, reproducible
from support.squares_task import make_squares_task

from megarl.base.image_tokens import image_key
from megarl.trainer.state.trainer_state import TrainerState

LOOP = f"{Path(__file__).with_name('agent_loops.py')}:Crops"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, dense_reward):
    squares = make_squares_task(tmp_path_factory.mktemp("squares"), "--num-train", "24")
    return [
        *("--config-name", "vision", *dense_reward, f"actor_rollout_ref.model.path={squares}/model"),
        *(f"data.train_files={squares}/data/train.parquet", f"data.val_files={squares}/data/test.parquet"),
        *("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=4", "data.max_response_length=60"),
        *(f"{ROLLOUT}.agent.default_agent_loop={LOOP}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9"),
        *("trainer.val_before_train=false", "trainer.total_training_steps=3"),
    ]


def finished(run):
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "vision")
    assert list(files.steps)[-1] == 3
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3 and row["agent/failed"] == 0
        assert row["num_turns/max"] == 6 and "agent/led_again" not in row
    return files


def resumed(checkpoint, arguments, start):
    return finished(start(*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"))


def of_trainer(row):
    """Metrics without the engine's log-probs: which turns it batches, and so their rounding, depends on timing."""
    return {name: value for name, value in reproducible(row).items() if "rollout_" not in name}


def test_engine_and_trainer_see_the_images_of_later_turns(arguments, start):
    first = finished(start(*arguments, "trainer.rollout_data_dir=dumps"))
    for row in first.steps.values():
        assert row["training/rollout_log_probs_diff_max/images"] < 1e-5
    again = resumed(next(first.folder.rglob("global_step_1")), arguments, start)
    assert [of_trainer(again.steps[step]) for step in (2, 3)] == [of_trainer(first.steps[step]) for step in (2, 3)]
    rows = read_jsonl(first.folder / "dumps" / "1.jsonl")
    assert len(rows) == 24
    for row in rows:
        assert len(row["images"]) == row["input"].count("<image>") == 1
        assert len(row["later_images"]) == row["output"].count("<image>") == 2
        spans = [row["output"][begin:end] for begin, end in row["masked"]]
        assert [span.count("<image>") for span in spans] == [1, 1]
    samples = read_jsonl(first.newest / "samples" / "train" / "1.jsonl")
    shown = {digest for sample in samples for digest in (*sample["images"], *sample["later_images"])}
    assert shown == {name for sample in samples for name in sample.get("thumbnails", ())}


def test_conversations_in_flight_keep_their_images(arguments, start):
    mode = ["async_training.mode=colocated", "async_training.max_staleness=1", "async_training.partial_rollout=true"]
    asynchronous = [*arguments, *mode, "algorithm.rollout_correction.rollout_is=token"]
    for _ in range(5):  # what is in flight at a save depends on timing
        first = finished(start(*asynchronous))
        checkpoints = [next(first.folder.rglob(f"global_step_{step}")) for step in (1, 2)]
        saved = [path for path in checkpoints if has_turns(path) and crops_of_ended(path)]
        if saved:
            break
    for file, *_, key in crops_of_ended(saved[0]):
        assert image_key(file) == key and Image.open(io.BytesIO(file)).size == (56, 56)
    resumed(saved[0], asynchronous, start)


def has_turns(checkpoint):
    return any(turns for *_, turns in TrainerState.read(checkpoint).rollout["turns"])


def crops_of_ended(checkpoint):
    """Stored images of later turns, of the samples that ended before a save and are not trained."""
    samples = TrainerState.read(checkpoint).rollout["samples"]
    assert all(len(sample["images"]) in (1, 2) for *_, sample in samples)  # two crops may be equal
    return [image for *_, sample in samples for image in sample["images"]]
