"""What follows an attempt, by attempts whose end is written down; real ones are in test_launch_cluster.py."""

import signal

import pytest

from megarl.errors import ResourceError
from megarl.launch import restarts
from megarl.launch.attempt import Interrupted, NodeLost
from megarl.launch.settings import ClusterSettings, JobToRun

JOB = JobToRun(("train",), True, "x", 2, "cuda", 8)


@pytest.fixture
def launch(monkeypatch):
    """Runs a launcher over attempts that end as listed: a code, an error of ``run``, or, in a tuple, of ``start``."""

    def run(ends, max_restarts=2, hosts=("a", "b", "c"), job=JOB):
        used, said = [], []

        class Scripted:
            def __init__(self, settings, *args):
                used.append(settings)
                self.end = ends[len(used) - 1]

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def start(self):
                if isinstance(self.end, tuple):
                    raise self.end[0]

            def check(self):
                pass

            def run(self):
                if isinstance(self.end, Exception):
                    raise self.end
                return self.end

        monkeypatch.setattr(restarts, "Attempt", Scripted)
        settings = ClusterSettings(hosts, "python", log_folder="logs")
        code = restarts.Launcher(settings, job, lambda host: [], max_restarts, 0.0, said.append).run()
        return code, used, "\n".join(said)

    return run


def test_failure_is_tried_again_until_it_works(launch):
    code, used, said = launch([1, 137, 0])
    assert (code, len(used)) == (0, 3)
    assert "the driver ended with code 1. Restart 1 of 2" in said and "code 137. Restart 2 of 2" in said
    assert [settings.log_folder for settings in used] == ["logs/attempt_1", "logs/attempt_2", "logs/attempt_3"]


def test_restarts_are_counted(launch):
    code, used, said = launch([1, 1, 3])
    assert (code, len(used)) == (3, 3)
    assert "No restart is left of 2" in said


@pytest.mark.parametrize(("code", "why"), [(2, "wrong configuration"), (130, "interrupted")])
def test_what_another_attempt_would_not_mend(launch, code, why):
    assert launch([code])[0] == code
    assert why in launch([code])[2]


def test_code_2_of_a_program_of_ones_own_says_nothing(launch):
    other = JobToRun(("x",), False, "x", 2, "cuda", 8)
    assert launch([2, 0], job=other)[0] == 0


def test_spare_takes_the_place_of_a_lost_node(launch):
    code, used, said = launch([NodeLost("b", "gone"), 0])
    assert code == 0
    assert [settings.hosts for settings in used] == [("a", "b"), ("a", "c")]
    assert "node b is lost: gone. Restart 1 of 2" in said


def test_cluster_that_never_was_is_not_tried_again_but_one_that_was_is(launch):
    code, used, said = launch([(ResourceError("port taken"),)])
    assert (code, len(used)) == (1, 1)
    assert "port taken. Nothing has run yet: no restart" in said
    assert launch([(NodeLost("a", "x"),)])[0] == 1
    assert launch([1, (ResourceError("not back yet"),), 0])[0] == 0


@pytest.mark.parametrize(("driver", "code"), [(0, 0), (None, 128 + signal.SIGTERM), (143, 143)])
def test_interrupted_launcher_ends_as_its_driver(launch, driver, code):
    assert launch([Interrupted(signal.SIGTERM, driver)])[0] == code
