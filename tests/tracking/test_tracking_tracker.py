import sys

import pytest

from megarl.errors import ConfigError
from megarl.tracking import TRACKERS, RunInfo, Tracker, Trackers, open_trackers, register_tracker


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


@pytest.fixture
def run(tmp_path):
    return RunInfo(project="p", name="n", folder=tmp_path / "run")


def test_every_tracker_gets_every_call():
    recorders = [Recorder(), Recorder()]
    trackers = Trackers(recorders)
    trackers.log({"a": 1.0}, 3)
    trackers.log_samples([{"input": "q"}], 3)
    trackers.finish()
    assert all(recorder.calls == [(3, {"a": 1.0}), "finish"] for recorder in recorders)


def test_one_that_cannot_finish_does_not_keep_the_others_from_it():
    recorders = [Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"):
        Trackers(recorders).finish()
    assert [recorder.calls for recorder in recorders] == [["finish"], ["finish"]]


def test_an_unknown_name_lists_the_known_ones(run):
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandbb'.*console, jsonl, tensorboard, wandb"):
        open_trackers(["jsonl", "wandbb"], run)
    assert not run.folder.exists(), "nothing may start before all names are known"


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_names_the_extra(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"trainer\.logger='{name}'.*pip install 'megarl\[{name}\]'"):
        open_trackers([name], run)


def test_a_tracker_of_ones_own(run, monkeypatch):
    monkeypatch.setattr("megarl.tracking.tracker.TRACKERS", dict(TRACKERS))
    made = []

    @register_tracker("mine")
    def make(info):
        made.append((info, Recorder()))
        return made[-1][1]

    trackers = open_trackers(["mine"], run)
    trackers.log({"a": 1.0}, 1)
    assert made[0][0] is run and made[0][1].calls == [(1, {"a": 1.0})]


def test_trackers_that_started_are_finished_when_a_later_one_fails(run, monkeypatch):
    first = Recorder()

    def broken(info):
        raise ConfigError("no login")

    monkeypatch.setattr("megarl.tracking.tracker.TRACKERS", {"first": lambda info: first, "broken": broken})
    with pytest.raises(ConfigError, match="no login"):
        open_trackers(["first", "broken"], run)
    assert first.calls == ["finish"]
