"""Restarts, with scripted cluster sessions; test_launch_cluster.py has real ones."""

import signal

import pytest

from megarl.base.errors import ResourceError
from megarl.ops.launch import command
from megarl.ops.launch.session import LaunchInterrupted, NodeLost
from megarl.ops.launch.settings import ClusterSettings, JobToRun

JOB = JobToRun(("train",), True, "x", 2, "cuda", 8)


@pytest.fixture
def launch(monkeypatch):
    """Run a launcher over scripted sessions: an exit code, an error of ``run_driver``, or, in a tuple, of ``start``."""

    def run(ends, max_restarts=2, hosts=("a", "b", "c"), job=JOB, unanswered=frozenset(), silent=()):
        used, messages = [], []

        class ScriptedSession:
            def __init__(self, settings, *args):
                used.append(settings)
                self.end = ends[len(used) - 1]
                self.lost = {error.host for error in [self.end] if isinstance(error, NodeLost)} | unanswered

            def close(self):
                pass

            def start(self):
                if isinstance(self.end, tuple):
                    raise self.end[0]

            def run_doctor(self):
                pass

            def run_driver(self):
                if isinstance(self.end, Exception):
                    raise self.end
                return self.end

        monkeypatch.setattr(command, "ClusterSession", ScriptedSession)
        monkeypatch.setattr(command, "silent_hosts", lambda hosts, *args: [host for host in hosts if host in silent])
        settings = ClusterSettings(hosts, "python", log_folder="logs")
        code = command.Launcher(settings, job, lambda host: [], max_restarts, 0.0, messages.append).run()
        return code, used, "\n".join(messages)

    return run


def test_failed_driver_is_restarted_until_it_succeeds(launch):
    code, used, messages = launch([1, 137, 0])
    assert (code, len(used)) == (0, 3)
    assert "the driver ended with code 1. Restart 1 of 2" in messages and "code 137. Restart 2 of 2" in messages
    assert [settings.log_folder for settings in used] == ["logs/attempt_1", "logs/attempt_2", "logs/attempt_3"]


def test_number_of_restarts_is_limited(launch):
    code, used, messages = launch([1, 1, 3])
    assert (code, len(used)) == (3, 3)
    assert "No restart is left of 2" in messages


@pytest.mark.parametrize(("code", "reason"), [(2, "wrong configuration"), (130, "interrupted")])
def test_no_restart_after_configuration_errors_and_interrupts(launch, code, reason):
    assert launch([code])[0] == code
    assert reason in launch([code])[2]


def test_exit_code_2_of_a_custom_command_restarts(launch):
    other = JobToRun(("x",), False, "x", 2, "cuda", 8)
    assert launch([2, 0], job=other)[0] == 0


def test_spare_replaces_a_lost_node(launch):
    code, used, messages = launch([NodeLost("b", "gone"), 0])
    assert code == 0
    assert [settings.hosts for settings in used] == [("a", "b"), ("a", "c")]
    assert "node b is lost: gone [launch.node-lost]. Restart 1 of 2" in messages


def test_a_host_that_does_not_answer_comes_after_the_spare(launch):
    """SLURM reports a silent node minutes after the driver has ended."""
    code, used, _ = launch([1, 0], unanswered={"b"})
    assert (code, [settings.hosts for settings in used]) == (0, [("a", "b"), ("a", "c")])
    code, used, messages = launch([1, 0], silent=("a",))
    assert (code, [settings.hosts for settings in used]) == (0, [("a", "b"), ("b", "c")])
    assert "no answer from a" in messages


def test_cluster_that_never_started_is_not_restarted(launch):
    code, used, messages = launch([(ResourceError("port taken", code="launch.start-timeout"),)])
    assert (code, len(used)) == (1, 1)
    assert "port taken [launch.start-timeout]. Nothing has run yet: no restart" in messages
    assert launch([(NodeLost("a", "x"),)])[0] == 1
    assert launch([1, (ResourceError("not back yet", code="launch.start-timeout"),), 0])[0] == 0


@pytest.mark.parametrize(("driver", "code"), [(0, 0), (None, 128 + signal.SIGTERM), (143, 143)])
def test_interrupted_launcher_returns_the_drivers_exit_code(launch, driver, code):
    assert launch([LaunchInterrupted(signal.SIGTERM, driver)])[0] == code
