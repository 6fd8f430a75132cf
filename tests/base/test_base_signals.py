"""Interrupts of the main thread: raised by its waits, never lost, and never twice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import signal
import threading
import time
import weakref

import pytest

from megarl.base import signals
from megarl.base.signals import (
    check_interrupt,
    ending_signal,
    interruptible,
    request_interrupt,
    signals_exit_in_order,
    signals_ignored,
    sleep,
    wait_for,
    while_waiting,
    withdraw_interrupt,
)

LONG_S = 30.0
PATIENCE_S, POLL_S = 0.4, 0.05


@pytest.fixture(autouse=True)
def less_patience(monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(signals, "POLL_S", POLL_S)


class Target:
    """Something with weak references."""


def busy():
    """Work of pure Python that never waits."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass


def blocked():
    """A C call that waits without slices."""
    threading.Event().wait(LONG_S)


def awaits_future():
    wait_for(concurrent.futures.Future[None](), LONG_S)


@pytest.mark.parametrize("work", [lambda: sleep(LONG_S), awaits_future, busy, blocked])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_weakref_callback_ends_the_work(work, number, recwarn):
    """Python prints an exception of a weakref callback, and ignores it."""
    calls = []
    target = Target()

    def interrupt(_):
        signal.raise_signal(number)
        calls.append("the callback returns: nothing was raised in it")

    watch = weakref.ref(target, interrupt)
    begin = time.monotonic()
    ends = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(ends) as caught, signals_exit_in_order():
        del target
        gc.collect()
        assert calls and watch() is None and ending_signal() == number
        work()
    assert caught.type is KeyboardInterrupt or caught.value.code == 143
    assert time.monotonic() - begin < LONG_S / 2
    assert ending_signal() == 0


def test_an_exception_that_python_ignored_is_raised_again(recwarn):
    """The work runs in a weakref callback for longer than the patience, and the exception is lost there."""
    target, lost = Target(), []

    def long_callback(_):
        request_interrupt()
        try:
            busy()
        except KeyboardInterrupt:
            lost.append(True)
            raise

    watch = weakref.ref(target, long_callback)
    with pytest.raises(KeyboardInterrupt), interruptible():
        del target
        assert lost and watch() is None
        sleep(LONG_S)


def test_the_cleanup_after_an_interrupt_is_not_interrupted():
    cleaned = False
    with contextlib.suppress(KeyboardInterrupt), signals_exit_in_order():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            sleep(LONG_S)
        finally:
            try:
                raise ValueError("an error of the cleanup, which follows from the interrupt")
            except ValueError:
                sleep(PATIENCE_S + 3 * POLL_S)
            cleaned = True
    assert cleaned


def test_a_second_signal_does_not_wait(monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", LONG_S)
    with pytest.raises(KeyboardInterrupt), signals_exit_in_order():
        os.kill(os.getpid(), signal.SIGINT)
        begin = time.monotonic()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            busy()
        finally:
            assert time.monotonic() - begin < LONG_S / 2


def test_a_shutdown_is_not_disturbed_by_an_earlier_request():
    done = False
    with pytest.raises(KeyboardInterrupt), interruptible():
        request_interrupt()
        with signals_ignored():
            sleep(PATIENCE_S + 3 * POLL_S)
            done = True
        check_interrupt()
    assert done


def test_requests_of_watches_can_be_withdrawn_and_signals_cannot():
    with interruptible():
        request_interrupt()
        withdraw_interrupt()
        check_interrupt()
    with pytest.raises(KeyboardInterrupt), signals_exit_in_order():
        signal.raise_signal(signal.SIGINT)
        withdraw_interrupt()  # and no wait follows: the end of the scope raises


def test_a_scope_that_ends_while_it_is_interrupted_ends_in_order(monkeypatch):
    """The default action of a late SIGUSR1, after the end of the scope, would be the end of the process."""
    kill, is_late, has_ended = signal.pthread_kill, threading.Event(), threading.Event()

    def kill_late(thread, number):
        is_late.set()
        time.sleep(0.2)
        kill(thread, number)
        has_ended.set()

    monkeypatch.setattr(signal, "pthread_kill", kill_late)
    with pytest.raises(KeyboardInterrupt), interruptible():
        request_interrupt()
        assert is_late.wait(60)
    assert has_ended.is_set()


def test_waits_of_other_threads_are_not_interrupted():
    ended = threading.Event()

    def wait():
        sleep(2 * POLL_S)
        ended.set()

    with pytest.raises(KeyboardInterrupt), interruptible():
        request_interrupt()
        thread = threading.Thread(target=wait)
        with signals_ignored():
            thread.start()
            thread.join()
        check_interrupt()
    assert ended.is_set()


def test_a_wait_ends_with_its_time_and_a_result_with_its_error():
    with pytest.raises(TimeoutError, match=r"no result within 0\.3 s"):
        wait_for(concurrent.futures.Future[None](), 0.3)
    failed: concurrent.futures.Future[None] = concurrent.futures.Future()
    failed.set_exception(TimeoutError("of the work"))
    with pytest.raises(TimeoutError, match="of the work"):
        wait_for(failed, 0.0)


def test_work_runs_while_the_main_thread_waits():
    """Not within the waits of the work itself, in other threads, after the end of a wait, or outside the context."""
    calls: list[float] = []

    def work():
        calls.append(time.monotonic())
        sleep(3 * POLL_S)

    with while_waiting(work):
        assert calls == []
        sleep(POLL_S / 2)
        assert calls == []
        thread = threading.Thread(target=sleep, args=(5 * POLL_S,))
        thread.start()
        thread.join()
        assert calls == []
        for _ in range(100):
            sleep(10 * POLL_S)
            if calls:  # on a busy machine a wait may be a single slice, after which nothing runs
                break
        assert 1 <= len(calls) <= 4
    made = len(calls)
    sleep(5 * POLL_S)
    assert len(calls) == made


def test_an_error_of_the_work_ends_the_wait():
    def fail():
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError), while_waiting(fail):
        sleep(LONG_S)
    sleep(2 * POLL_S)  # it does not run outside the context


def test_handlers_of_the_environment_return():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with signals_exit_in_order(), signals_exit_in_order():
        assert all(signal.getsignal(number) is not handler for number, handler in zip(numbers, before, strict=True))
    assert [signal.getsignal(number) for number in numbers] == before
