import sys

import pytest
from support.expected_errors import raises

from megarl.base.errors import ConfigError
from megarl.tracking import TRACKERS, RunInfo, Tracker, Trackers, check_trackers, open_trackers, register_tracker
from megarl.tracking.jsonl_files import read_metrics
from megarl.tracking.trackers import GuardedTracker


class Recorder(Tracker):
    def __init__(self, fails=False):
        self.calls = []
        self.fails = fails

    def log(self, metrics, step):
        self.calls.append((step, metrics))

    def finish(self):
        self.calls.append("finish")
        if self.fails:
            raise OSError("disk full")


def guarded(recorders, report=None):
    return Trackers([GuardedTracker(str(number), recorder, report) for number, recorder in enumerate(recorders)])


@pytest.fixture
def run(tmp_path):
    return RunInfo(project="p", name="n", folder=tmp_path / "run")


def test_all_trackers_receive_all_calls():
    recorders = [Recorder(), Recorder()]
    trackers = guarded(recorders)
    trackers.log({"a": 1.0}, 3)
    trackers.log_samples([{"input": "q"}], 3)
    trackers.finish()
    assert all(recorder.calls == [(3, {"a": 1.0}), "finish"] for recorder in recorders)


def test_each_nth_step_reaches_trackers_other_than_jsonl(run, monkeypatch):
    """Also validations, skipped optimizer steps, and the last step; jsonl has all steps, before the others finish."""

    seldom = Recorder()
    monkeypatch.setitem(TRACKERS, "seldom", lambda run: seldom)
    trackers = open_trackers(["jsonl", "seldom"], run, every=3)
    for step in range(9):
        validation = {"val-core/x/reward/mean@1": 1.0} if step == 4 else {}
        trackers.log({"a": float(step), "actor/skipped_steps": float(step == 5), **validation}, step)
    assert [step for step, _ in seldom.calls] == [0, 3, 4, 5, 6]
    trackers.finish()
    assert [call if call == "finish" else call[0] for call in seldom.calls] == [0, 3, 4, 5, 6, 8, "finish"]
    assert seldom.calls[5][1] == {"a": 8.0, "actor/skipped_steps": 0.0}
    assert [row["step"] for row in read_metrics(run.folder / "metrics.jsonl")] == list(range(9))


def test_failing_finish_does_not_stop_the_seconds():
    recorders, messages = [Recorder(fails=True), Recorder(fails=True)], []
    guarded(recorders, messages.append).finish()
    assert [recorder.calls for recorder in recorders] == [["finish"], ["finish"]]
    assert [line.split(" could")[0] for line in messages] == ["tracker 1", "tracker 0"] and "disk full" in messages[0]


def test_failing_tracker_is_reported_once_and_counted():
    class Full(Recorder):
        def log(self, metrics, step):
            if step < 4:
                raise OSError("disk full")
            super().log(metrics, step)

    full, second, messages = Full(), Recorder(), []
    trackers = guarded([full, second], messages.append)
    for step in range(1, 5):
        trackers.log({"a": 1.0}, step)
    assert len(messages) == 1 and "OSError: disk full" in messages[0]
    trackers.finish()
    assert messages[1] == "tracker 0: 3 of 4 records were not written"
    assert [step for step, _ in second.calls[:-1]] == [1, 2, 3, 4]
    # The count is logged from then on, by working trackers.
    assert [row.get("tracking/dropped") for _, row in second.calls[:-1]] == [None, 1.0, 2.0, 3.0]
    assert full.calls == [(4, {"a": 1.0, "tracking/dropped": 3.0}), "finish"]


def test_unknown_tracker_lists_known_names(run):
    with raises("config.unknown-name", "trainer.logger='wandbb'", "jsonl", "wandb"):
        open_trackers(["jsonl", "wandbb"], run)
    assert not run.folder.exists(), "nothing may start before all names are known"


def test_custom_tracker_is_loaded_from_a_file(run, tmp_path):
    file = tmp_path / "custom.py"
    file.write_text(
        "from megarl.tracking import Tracker\n"
        "class Lines(Tracker):\n"
        "    def __init__(self, run):\n"
        "        self.run = run\n"
        "    def log(self, metrics, step):\n"
        "        with (self.run.folder.parent / 'lines').open('a') as file:\n"
        "            print(step, metrics['a'], file=file)\n"
        "class Remote(Lines):\n"
        "    in_subprocess = True\n"
        "class Other:\n"
        "    pass\n"
        "class Needy(Lines):\n"
        "    package = 'not_installed'\n",
        encoding="utf-8",
    )
    for name, step in (("Lines", 1), ("Remote", 2)):
        trackers = open_trackers([f"{file}:{name}"], run)
        trackers.log({"a": 0.5}, step)
        trackers.finish()
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "1 0.5\n2 0.5\n"
    for name, named in (("Nope", "'Nope'"), ("Other", "megarl.tracking.tracker.Tracker")):
        with raises("config.user-code-class", "['Lines', 'Remote', 'Needy']", named):
            open_trackers([f"{file}:{name}"], run)
    with raises("tracking.no-package", f"trainer.logger='{file}:Needy'", "pip install 'not_installed'"):
        open_trackers([f"{file}:Needy"], run)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "tensorboard"])
def test_missing_package_error_names_the_extra(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with raises("tracking.no-package", f"trainer.logger='{name}'", "pip install ", f"'.[{name}]'"):
        open_trackers([name], run)


def test_registered_custom_tracker(run, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mine", None)  # restores the registry after the test
    del TRACKERS["mine"]
    created = []

    @register_tracker("mine")
    def make(info):
        created.append((info, Recorder()))
        return created[-1][1]

    trackers = open_trackers(["mine"], run)
    trackers.log({"a": 1.0}, 1)
    assert created[0][0] is run and created[0][1].calls == [(1, {"a": 1.0})]


def test_open_trackers_are_finished_if_a_later_one_fails(run, monkeypatch):
    first = Recorder()

    def broken(info):
        raise ConfigError("no login", code="tracking.no-login")

    monkeypatch.setitem(TRACKERS, "first", lambda info: first)
    monkeypatch.setitem(TRACKERS, "broken", broken)
    with raises("tracking.no-login"):
        open_trackers(["first", "broken"], run)
    assert first.calls == ["finish"]


def test_attribute_of_an_earlier_release_is_rejected(monkeypatch):
    class OldTracker(Recorder):
        apart = True

    monkeypatch.setattr("megarl.tracking.tracker.load_user_class", lambda *_: OldTracker)
    with raises("tracking.old-attribute", "trainer.logger='mine.Old'", "`apart`", "`in_subprocess`"):
        check_trackers(["mine.Old"])
