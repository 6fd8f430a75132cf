"""An asyncio event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from megarl.base.signals import wait_for

_T = TypeVar("_T")
_STOP_S = 10.0


class EventLoopThread:
    """Runs coroutines of other threads in one event loop.

    Args:
        name: name of the thread.
    """

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
