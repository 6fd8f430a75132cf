"""An asyncio event loop in a thread of its own, and a monitor that reports what blocks it.

All conversations of a run and all requests to its chat endpoint share one event loop. An agent that calls a blocking
function (``time.sleep``, a synchronous HTTP client) stops them all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from megarl.base.signals import wait_for

_T = TypeVar("_T")
_STOP_S = 10.0
logger = logging.getLogger(__name__)
BLOCKED_S = 10.0
"""A loop that runs nothing new for this long is reported."""
_TICKS = 10
"""Checks per :data:`BLOCKED_S`."""


_Executors: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, concurrent.futures.ThreadPoolExecutor]
_TOKENIZERS: _Executors = WeakKeyDictionary()
_IMAGES: _Executors = WeakKeyDictionary()


async def in_tokenizer_thread(work: Callable[[], _T]) -> _T:
    """Do the tokenizer's work in a thread, so that the running event loop serves all conversations meanwhile.

    A loop has one such thread, since tokenizers are not thread-safe.
    """
    return await _in_threads(_TOKENIZERS, 1, work)


async def in_image_thread(work: Callable[[], _T]) -> _T:
    """Read or decode an image in a thread.

    A loop has two such threads: a large picture takes seconds and hundreds of megabytes, and must not delay other work.
    """
    return await _in_threads(_IMAGES, 2, work)


async def _in_threads(executors: _Executors, threads: int, work: Callable[[], _T]) -> _T:
    loop = asyncio.get_running_loop()
    if loop not in executors:
        executors[loop] = concurrent.futures.ThreadPoolExecutor(threads)
    return await loop.run_in_executor(executors[loop], work)


class EventLoopThread:
    """Runs coroutines of other threads in one event loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run a coroutine in the loop and wait for its result.

        Raises:
            TimeoutError: ``timeout_s`` seconds have passed; the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return wait_for(future, timeout_s)
        except BaseException:
            future.cancel()  # after an interrupted wait; no effect if the work itself failed
            raise

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.run(self._cancel_all(), _STOP_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_default_executor()


@asynccontextmanager
async def monitored_loop(
    report: Callable[[str], None] = logger.warning, blocked_s: float = BLOCKED_S
) -> AsyncIterator[None]:
    """Watch the running event loop from a thread, within the context, and report each blockage once.

    Args:
        report: prints a line for the user; called in the thread.
        blocked_s: seconds without progress of the loop.
    """
    closed = threading.Event()
    arguments = (asyncio.get_running_loop(), threading.get_ident(), report, blocked_s, closed)
    thread = threading.Thread(target=_watch, args=arguments, name="loop-monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()


def _watch(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    report: Callable[[str], None],
    blocked_s: float,
    closed: threading.Event,
) -> None:
    """Send a heartbeat through the loop, and report when it does not come back."""
    pause = blocked_s / _TICKS
    while True:
        beat, sent = threading.Event(), time.monotonic()
        try:
            loop.call_soon_threadsafe(beat.set)
        except RuntimeError:  # the loop is closed
            return
        ticks = 0
        # Ticks, not the clock: a process that was stopped, or a machine that slept, did not block the loop.
        while not beat.wait(pause) and not closed.is_set():
            ticks += 1
            if ticks == _TICKS:
                report(_describe(thread, blocked_s))
        if ticks >= _TICKS and beat.is_set():
            report(f"the event loop of the conversations runs again, after {time.monotonic() - sent:.0f} s")
        if closed.wait(pause):
            return


def _describe(thread: int, blocked_s: float) -> str:
    frame = sys._current_frames().get(thread)
    stack = "" if frame is None else "".join(traceback.format_stack(frame))
    return (
        f"the event loop of the conversations has been blocked for {blocked_s:g} s: no conversation, tool or request "
        "to the chat endpoint goes on. An agent or tool calls a blocking function; use an asynchronous one, or "
        f"asyncio.to_thread. Stack of the loop:\n{stack}"
    )
