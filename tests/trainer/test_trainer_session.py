"""Job session: order of opening and closing, resolved device, resume and SIGTERM, without Ray."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.expected_errors import raises

from megarl.base.errors import RayLost
from megarl.trainer.jobs import session as session_module
from megarl.trainer.jobs.session import open_job


@pytest.fixture(autouse=True)
def interrupts():
    """Python's handler of SIGINT, which a background job of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def events(monkeypatch):
    """Order in which resources open and close; Ray, devices and tracing are fakes."""
    events: list[str] = []
    quiet = dict.fromkeys(("lost", "finish"), lambda: None)
    ray = SimpleNamespace(dashboard_url="", spills=lambda needed: None, last_words=lambda *_: None, **quiet)
    monkeypatch.setattr(session_module, "RaySession", lambda **_: resource("ray", events, ray))
    monkeypatch.setattr(session_module, "RunTracing", lambda *_: resource("tracing", events))
    pools = SimpleNamespace(trainer=SimpleNamespace(pool=SimpleNamespace(device="cpu")))
    monkeypatch.setattr(session_module, "reserve_pools", lambda ray, run, own: pools)
    return events


@contextmanager
def resource(name, events, value=None):
    events.append(f"+{name}")
    try:
        yield value or name
    finally:
        events.append(f"-{name}")


def test_resources_close_in_reverse_order_after_an_error(train_config, events, tmp_path):
    config = train_config({"trainer.device": "auto"})
    with pytest.raises(RuntimeError, match="failed"), open_job(config, tmp_path) as session:
        session.start(resource("endpoint", events), None, resource("rewards", events))
        assert session.recorded_config()["trainer"]["device"] == "cpu" and session.tracing == "tracing"
        assert session.config is config
        raise RuntimeError("failed")
    assert events == ["+endpoint", "+rewards", "+ray", "+tracing", "-tracing", "-ray", "-rewards", "-endpoint"]


@pytest.mark.parametrize("save_freq", [-1, 5])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handled_while_a_job_that_saves_trains(train_config, events, tmp_path, number, save_freq):
    previous = signal.getsignal(number)
    with open_job(train_config({"trainer.save_freq": save_freq}), tmp_path) as session:
        session.start()
        with session.starting_workers():
            assert signal.getsignal(number) is previous
        with session.training(cast(Any, SimpleNamespace()), cast(Any, None)):
            assert (signal.getsignal(number) is not previous) == (save_freq > 0)
        assert signal.getsignal(number) is previous


def test_a_run_that_was_ended_by_ctrl_c_is_interrupted_after_its_last_save(train_config, events, tmp_path):
    saved = False
    with pytest.raises(KeyboardInterrupt), open_job(train_config({"trainer.save_freq": 5}), tmp_path) as session:
        session.start()
        with session.training(cast(Any, SimpleNamespace()), cast(Any, None)):
            os.kill(os.getpid(), signal.SIGINT)
            saved = session.stop.step_done(None) == "Ctrl-C"
    assert saved


def test_the_death_of_a_process_of_ray_ends_training_with_the_way_to_go_on(train_config, events, tmp_path):
    state = SimpleNamespace(describe_interruption=lambda cause: f"({cause}). To go on: COMMAND")
    summaries: list[str] = []
    reporter = SimpleNamespace(finish=lambda folder, stopped: summaries.append(stopped))
    with (
        raises("ray.process-died", "(a lost process of Ray). To go on: COMMAND\n", "the GCS died", error=RayLost),
        open_job(train_config({"trainer.save_freq": 5}), tmp_path) as session,
    ):
        session.start()
        cast(Any, session._ray).lost = lambda: "the GCS"
        with session.training(cast(Any, state), cast(Any, reporter)):
            raise KeyboardInterrupt  # by the watch over Ray, or an error of a worker
    assert events[-1] == "-ray" and summaries == ["a lost process of Ray"]


def test_training_needs_its_checkpoint_before_any_process(train_config, events, tmp_path):
    with (
        raises("resume.no-checkpoint", "trainer.resume_mode=must"),
        open_job(train_config({"trainer.resume_mode": "must"}), tmp_path),
    ):
        pass
    assert not events


def test_an_evaluation_neither_resumes_nor_handles_signals(evaluate_config, events, tmp_path):
    previous = signal.getsignal(signal.SIGTERM)
    with open_job(evaluate_config(), tmp_path) as session:
        assert session.resume is None and session.stop.reason is None
        session.start()
        with session.starting_workers():
            pass
        assert signal.getsignal(signal.SIGTERM) is previous
