import sys

import pytest

from megarl.errors import ConfigError
from megarl.tracking import TRACKERS, RunInfo, Tracker, Trackers, open_trackers, register_tracker
from megarl.tracking.trackers import Guarded


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


def guarded(recorders, tell=None):
    return Trackers([Guarded(str(number), recorder, tell) for number, recorder in enumerate(recorders)])


@pytest.fixture
def run(tmp_path):
    return RunInfo(project="p", name="n", folder=tmp_path / "run")


def test_every_tracker_gets_every_call():
    recorders = [Recorder(), Recorder()]
    trackers = guarded(recorders)
    trackers.log({"a": 1.0}, 3)
    trackers.log_samples([{"input": "q"}], 3)
    trackers.finish()
    assert all(recorder.calls == [(3, {"a": 1.0}), "finish"] for recorder in recorders)


def test_one_that_cannot_finish_does_not_keep_the_others_from_it():
    recorders, told = [Recorder(fails=True), Recorder(fails=True)], []
    guarded(recorders, told.append).finish()
    assert [recorder.calls for recorder in recorders] == [["finish"], ["finish"]]
    assert [line.split(" could")[0] for line in told] == ["tracker 1", "tracker 0"] and "disk full" in told[0]


def test_one_that_fails_is_told_once_and_counted_and_the_others_go_on():
    class Full(Recorder):
        def log(self, metrics, step):
            if step < 4:
                raise OSError("disk full")
            super().log(metrics, step)

    full, other, told = Full(), Recorder(), []
    trackers = guarded([full, other], told.append)
    for step in range(1, 5):
        trackers.log({"a": 1.0}, step)
    assert len(told) == 1 and "OSError: disk full" in told[0]
    trackers.finish()
    assert told[1] == "tracker 0: 3 of 4 records were not written"
    assert [step for step, _ in other.calls[:-1]] == [1, 2, 3, 4]
    # The number stands among the metrics from then on, in what still works.
    assert [row.get("tracking/dropped") for _, row in other.calls[:-1]] == [None, 1.0, 2.0, 3.0]
    assert full.calls == [(4, {"a": 1.0, "tracking/dropped": 3.0}), "finish"]


def test_an_unknown_name_lists_the_known_ones(run):
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandbb'.*jsonl, mlflow, swanlab, tensorboard, wandb"):
        open_trackers(["jsonl", "wandbb"], run)
    assert not run.folder.exists(), "nothing may start before all names are known"


def test_a_class_in_a_file_is_found_by_its_spec(run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from megarl.tracking import Tracker\n"
        "class Lines(Tracker):\n"
        "    def __init__(self, run):\n"
        "        self.run = run\n"
        "    def log(self, metrics, step):\n"
        "        with (self.run.folder.parent / 'lines').open('a') as file:\n"
        "            print(step, metrics['a'], file=file)\n"
        "class Apart(Lines):\n"
        "    apart = True\n"
        "class Other:\n"
        "    pass\n"
        "class Needy(Lines):\n"
        "    package = 'not_installed'\n"
    )
    for name, step in (("Lines", 1), ("Apart", 2)):
        trackers = open_trackers([f"{own}:{name}"], run)
        trackers.log({"a": 0.5}, step)
        trackers.finish()
    assert (tmp_path / "lines").read_text() == "1 0.5\n2 0.5\n"
    for name, message in (
        ("Nope", r"it has no Tracker called 'Nope'; there are \['Lines', 'Apart', 'Needy'\]$"),
        ("Other", r"'Needy'\]; Other must derive from megarl\.tracking\.tracker\.Tracker"),
        ("Needy", "pip install 'not_installed'"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_trackers([f"{own}:{name}"], run)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "tensorboard"])
def test_a_missing_package_names_the_extra(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"trainer\.logger='{name}'.*pip install 'megarl\[{name}\]'"):
        open_trackers([name], run)


def test_a_tracker_of_ones_own(run, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mine", None)  # which puts the registry back after the test
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

    monkeypatch.setitem(TRACKERS, "first", lambda info: first)
    monkeypatch.setitem(TRACKERS, "broken", broken)
    with pytest.raises(ConfigError, match="no login"):
        open_trackers(["first", "broken"], run)
    assert first.calls == ["finish"]
