"""How the engine talks to SGLang, whether in its own process or over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from megarl.rollout.interface import EngineLost

_T = TypeVar("_T")

CLOSE_S = 10.0
"""Seconds for connections to close."""

WATCH_S = 0.5
"""Seconds between looks whether SGLang still runs, while something is waited for."""


class Call(NamedTuple):
    """A control call of SGLang, which has a name in Python and one in HTTP.

    Attributes:
        method: of the tokenizer manager.
        request: structure of ``sglang.srt.managers.io_struct``; None = the method takes no request.
        path: of the HTTP server.
    """

    method: str
    request: str | None
    path: str


CALLS = {
    call.method: call
    for call in (
        Call("begin_weight_update", "BeginWeightUpdateReqInput", "/begin_weight_update"),
        Call("end_weight_update", "EndWeightUpdateReqInput", "/end_weight_update"),
        Call("update_weights_from_tensor", "UpdateWeightsFromTensorReqInput", "/update_weights_from_tensor"),
        Call("update_weights_from_disk", "UpdateWeightFromDiskReqInput", "/update_weights_from_disk"),
        Call(
            "update_weights_from_distributed",
            "UpdateWeightsFromDistributedReqInput",
            "/update_weights_from_distributed",
        ),
        Call("init_weights_update_group", "InitWeightsUpdateGroupReqInput", "/init_weights_update_group"),
        Call("destroy_weights_update_group", "DestroyWeightsUpdateGroupReqInput", "/destroy_weights_update_group"),
        Call("release_memory_occupation", "ReleaseMemoryOccupationReqInput", "/release_memory_occupation"),
        Call("resume_memory_occupation", "ResumeMemoryOccupationReqInput", "/resume_memory_occupation"),
        Call("check_weights", "CheckWeightsReqInput", "/weights_checker"),
        Call("flush_cache", None, "/flush_cache"),
        Call("pause_generation", "PauseGenerationReqInput", "/pause_generation"),
        Call("continue_generation", "ContinueGenerationReqInput", "/continue_generation"),
    )
}


class Outcome(NamedTuple):
    """What SGLang answered to a call. It returns its failures and raises nothing.

    Attributes:
        success: whether it did as it was told.
        message: in its own words.
        ranks: what each of its ranks says, where the call is of that kind.
    """

    success: bool
    message: str
    ranks: Sequence[Mapping[str, Any]] = ()


CallServer = Callable[..., Outcome]
"""Makes one of :data:`CALLS` and waits for it: (method, **fields)."""


class Backend(Protocol):
    """A running SGLang. Its coroutines run on the engine's :class:`Loop`."""

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Generates one sequence: SGLang's own fields in and out.

        Raises:
            RolloutError: SGLang refused the request.
        """

    async def abort(self, rid: str) -> None:
        """Gives up a request; an unknown one is ignored."""

    async def call(self, method: str, **fields: Any) -> Outcome:
        """Makes one of :data:`CALLS`."""

    async def has(self, method: str) -> bool:
        """Whether this SGLang knows one of :data:`CALLS`."""

    async def loaders(self) -> list[str]:
        """The custom weight loaders that it was started with."""

    def failure(self) -> str | None:
        """Why it serves nothing any more; None while it runs."""

    @property
    def ranks_host(self) -> str | None:
        """Another host, of some of its ranks; None: all run on this one and can read this process's shared memory."""

    async def disconnect(self) -> None:
        """Closes connections, if there are any."""

    def close(self) -> None:
        """Ends it, if this process started it."""


class Loop:
    """An event loop in a thread of its own: requests go on while the engine's caller does other things."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sglang-requests")
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Runs a coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(
        self,
        work: Coroutine[Any, Any, _T],
        timeout_s: float,
        what: str,
        failure: Callable[[], str | None] = lambda: None,
    ) -> _T:
        """Runs a coroutine and waits for it.

        Args:
            work: the coroutine.
            timeout_s: most seconds to wait.
            what: it does, for errors.
            failure: says why it will never finish, or None.

        Raises:
            EngineLost: it takes longer than ``timeout_s``, or never finishes.
        """
        future, deadline = self.start(work), time.monotonic() + timeout_s
        while True:
            done, _ = concurrent.futures.wait([future], timeout=min(WATCH_S, max(0.0, deadline - time.monotonic())))
            if done:
                return future.result()
            reason = failure()
            if reason is not None or time.monotonic() >= deadline:
                future.cancel()
                reason = reason or f"it takes longer than {timeout_s:g} s"
                raise EngineLost(f"SGLang did not finish '{what}': {reason}")

    def close(self) -> None:
        """Cancels what still runs."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()
