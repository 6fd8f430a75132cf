"""Callbacks and recorders: loading, hooks, order, and metrics of a callback."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.expected_errors import raises

from megarl.base.errors import StepImpossible
from megarl.data import DataProto
from megarl.trainer.callbacks import Callback, TrainerView, load_callbacks
from megarl.trainer.jobs.preflight import check_train
from megarl.trainer.loop.ppo_trainer import PPOTrainer
from megarl.trainer.loop.recorders import CheckpointRecorder, ValidationRecorder, build_recorders


class Recorded(Callback):
    """Records its calls."""

    def __init__(self):
        self.calls: list[tuple[str, TrainerView]] = []

    def on_step_end(self, view):
        self.calls.append(("step_end", view))
        return {"custom/metric": 1.0 + view.metrics.get("custom/metric", 0.0)}

    def on_validation(self, view):
        self.calls.append(("validation", view))

    def on_save(self, view):
        self.calls.append(("save", view))


class Reporter:
    """Reporter without files or timings."""

    lasting_files: tuple[Path, ...] = ()

    def __init__(self, folder):
        self.folder, self.seconds = folder, {"step": 2.0, "update_critic": 0.5}
        self.hidden = {"update_critic": 0.5}
        self.phases: list[str] = []

    def phase(self, name):
        self.phases.append(name)
        return nullcontext()

    def keep_samples(self, *_): ...

    def log_samples(self, *_): ...

    def log_validation(self, *_): ...


class State:
    """Run state with one finished checkpoint."""

    step, total_steps = 3, 10
    prompts = SimpleNamespace(epoch=1)

    def __init__(self, folder, *, due=True):
        self.is_due = due
        self.saver = SimpleNamespace(take_completed=lambda: [folder / "global_step_3"])
        self.validated: list[dict[str, float]] = []
        self.saved = 0

    def due(self, every):
        return self.is_due

    def must_save(self):
        return self.is_due

    def save(self, *_):
        self.saved += 1

    def note_validation(self, metrics):
        self.validated.append(metrics)

    def save_and_stop(self, error, *_):
        return StepImpossible(f"{error.text}; saved", code=error.code)


def trainer_of(config, recorders, folder):
    return PPOTrainer(config, None, None, recorders, State(folder), Reporter(folder), None)


def test_a_callback_sees_and_adds_metrics(train_config, tmp_path):
    first, second, metrics = Recorded(), Recorded(), {"critic/score/mean": 0.5}
    batch = DataProto.from_dict({}, {"uid": ["a"]})
    trainer_of(train_config(), [first, second], tmp_path).finish_step(batch, batch, metrics)
    assert metrics == {"critic/score/mean": 0.5, "custom/metric": 2.0}, "the second sees the metric of the first"
    (_, view), *_ = first.calls
    assert (view.step, view.total_steps, view.epoch, view.folder) == (3, 10, 1, tmp_path)
    assert view.seconds == {"step": 2.0, "update_critic": 0.5} and view.hidden == {"update_critic": 0.5}
    assert view.batch is batch and view.metrics["critic/score/mean"] == 0.5


def test_the_view_is_read_only(train_config, tmp_path):
    view = trainer_of(train_config(), [], tmp_path).view({"x": 1.0})
    with pytest.raises(TypeError):
        view.metrics["x"] = 2.0
    with pytest.raises(AttributeError):
        view.step = 4


def test_validation_calls_on_validation(train_config, tmp_path):
    callback, reporter, state = Recorded(), Reporter(tmp_path), State(tmp_path)
    validator = SimpleNamespace(run=lambda step: ({"val-core/x": 0.25}, []), step_in_flight=None)
    recorder = ValidationRecorder(validator, state, [], reporter, [callback])
    view = trainer_of(train_config(), [], tmp_path).view({"a": 1.0})
    assert recorder.on_step_end(view) == {"val-core/x": 0.25} and reporter.phases == ["testing"]
    ((name, seen),) = callback.calls
    assert name == "validation" and seen.metrics == {"val-core/x": 0.25} and state.validated == [{"val-core/x": 0.25}]
    state.is_due = False
    assert recorder.on_step_end(view) == {} and len(callback.calls) == 1


def test_a_failed_validation_saves_and_stops(train_config, tmp_path):
    def fail(step):
        raise StepImpossible("no scores", code="reward.no-row-scored")

    recorder = ValidationRecorder(
        SimpleNamespace(run=fail, step_in_flight=None), State(tmp_path), [], Reporter(tmp_path), []
    )
    with raises("reward.no-row-scored", "no scores; saved", error=StepImpossible):
        recorder.on_step_end(trainer_of(train_config(), [], tmp_path).view())


@pytest.mark.parametrize(
    ("val_only", "before", "runs"), [(True, False, True), (False, True, False), (False, False, False)]
)
def test_validation_before_training(train_config, tmp_path, val_only, before, runs):
    """The run of this test resumed at step 3, so ``val_before_train`` does not validate again."""
    config = train_config({"trainer.val_only": val_only, "trainer.val_before_train": before})
    reporter = Reporter(tmp_path)
    validator = SimpleNamespace(run=lambda step: ({"val-core/x": 0.25}, []), step_in_flight=None)
    ValidationRecorder(validator, State(tmp_path), [], reporter, []).on_train_start(
        trainer_of(config, [], tmp_path).view()
    )
    assert reporter.phases == ["testing"] * runs


def test_on_save_gets_the_complete_checkpoint(train_config, tmp_path):
    callback, state, reporter = Recorded(), State(tmp_path), Reporter(tmp_path)
    CheckpointRecorder(state, [], reporter, [callback]).on_step_end(trainer_of(train_config(), [], tmp_path).view())
    assert state.saved == 1 and reporter.phases == ["save_checkpoint"]
    ((name, view),) = callback.calls
    assert name == "save" and view.checkpoint == tmp_path / "global_step_3"


def test_callbacks_run_before_metrics_are_logged(train_config, tmp_path):
    callback = Recorded()
    recorders = build_recorders(
        train_config(), None, [], [], None, None, State(tmp_path), Reporter(tmp_path), [callback]
    )
    names = [type(recorder).__name__ for recorder in recorders]
    assert names == [
        "StepMetrics",
        "BalanceRecorder",
        "SampleRecorder",
        "ValidationRecorder",
        "Recorded",
        "MetricsLogger",
        "CheckpointRecorder",
    ]


def test_callbacks_are_loaded_by_file_and_by_dotted_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from megarl.trainer.callbacks import Callback\n\nclass Mine(Callback):\n    pass\n", encoding="utf-8"
    )
    first, second = load_callbacks([f"{file}:Mine", "megarl.trainer.callbacks.Callback"])
    assert type(first).__name__ == "Mine" and type(second) is Callback


@pytest.mark.parametrize(
    ("spec", "code", "named"),
    [
        ("/no.py:Mine", "config.user-code-file", "/no.py"),
        ("megarl.trainer.callbacks.TrainerView", "config.user-code-class", "megarl.trainer.callbacks.Callback"),
    ],
)
def test_a_wrong_callback_fails_before_any_process(train_config, spec, code, named):
    with raises(code, "trainer.callbacks", named):
        check_train(train_config({"trainer.callbacks": [spec]}))
