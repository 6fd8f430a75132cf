"""SGLang with its front end in this process; its schedulers run in separate processes, one per device."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from megarl.base.child_process import environment_variables
from megarl.base.processes import READ_ERRORS, command_line, descendants, has_ended, wait_for_ends
from megarl.rollout.interface import RequestRefused, RolloutError
from megarl.rollout.sglang.backend import CONTROL_CALLS, ControlResult, stopped_processes
from megarl.rollout.sglang.options import (
    LOADER,
    RankRendezvous,
    SGLangOptions,
    environment,
    load_shim,
    needs_shim,
    request_of,
    server_args,
)

# SGLang's front end has one configuration per process.
_RUNNING = threading.Lock()
_CHILD_FAILED = threading.Event()


def note_failed_child(signum: int | None = None, frame: Any = None) -> None:
    """Signal handler for the end of an SGLang process: the engine is lost, but this process continues."""
    _CHILD_FAILED.set()


class InProcessBackend:
    """An ``sglang.Engine`` without its event loop: requests run on the engine's :class:`RequestLoop`.

    :meth:`close` ends its processes. ``Engine.shutdown`` is not used, since it ends every child of this process.

    Raises:
        RolloutError: SGLang does not start, or this process has an SGLang engine already.
    """

    def __init__(self, folder: str, max_model_len: int, options: SGLangOptions) -> None:
        self._closed = False
        self._rendezvous = RankRendezvous(options)
        self._engine = _start(folder, max_model_len, options, self._rendezvous)
        self._manager = self._engine.tokenizer_manager
        self._ranks = options.local_ranks
        self.ranks_host = options.nodes.hosts[1] if options.nodes else None
        self._processes = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        try:
            # Engine.async_generate lacks some of the fields.
            response: dict[str, Any] = await anext(
                self._manager.generate_request(request_of("GenerateReqInput", payload), None)
            )
        except ValueError as error:
            raise RequestRefused(f"SGLang refused a request: {error}", code="sglang.request-refused") from None
        return response

    async def abort(self, rid: str) -> None:
        self._manager.abort_request(rid=rid)

    async def call(self, method: str, **fields: Any) -> ControlResult:
        call = CONTROL_CALLS[method]
        function = getattr(self._manager, method)
        arguments = () if call.request is None else (request_of(call.request, fields),)
        return _call_result(await function(*arguments))

    async def has(self, method: str) -> bool:
        return hasattr(self._manager, method)

    async def loaders(self) -> list[str]:
        return [LOADER]

    async def ask_scheduler(self) -> None:
        await self._manager.get_internal_state()

    def stopped(self) -> list[int]:
        return stopped_processes(self._processes)

    def failure(self) -> str | None:
        if self._closed:
            return "it was shut down"
        ended = [n for n, process in enumerate(self._processes) if has_ended(process)]
        if not ended and not _CHILD_FAILED.is_set():
            return None
        ranks = [f"rank {number}" for number in ended if number < self._ranks]
        running = f"running: {len(self._processes) - len(ended)}"
        return f"one of its processes ended ({', '.join([*ranks, running])})"

    async def disconnect(self) -> None:
        return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._engine.shutdown)
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        _end(self._processes)
        _RUNNING.release()


class FollowerNode:
    """The ranks of an SGLang on another node than its front end; they end with this process.

    Raises:
        RolloutError: SGLang does not start, or this process has an SGLang engine already.
    """

    def __init__(self, folder: str, max_model_len: int, options: SGLangOptions) -> None:
        # Otherwise the constructor returns at the end of the ranks.
        with environment_variables({"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}):
            self._engine = _start(folder, max_model_len, options, RankRendezvous(options))


@contextlib.contextmanager
def _only_engine() -> Iterator[None]:
    """Reserve this process for an engine that starts in the block; an error frees it."""
    if not _RUNNING.acquire(blocking=False):
        raise RolloutError(
            "this process already holds an SGLang engine, and SGLang can have one per process: shut it down first, "
            "or use rollout.engine_kwargs.sglang.mode=http",
            code="sglang.one-per-process",
        )
    _CHILD_FAILED.clear()
    try:
        yield
    except BaseException:
        _RUNNING.release()
        raise


def _start(folder: str, max_model_len: int, options: SGLangOptions, rendezvous: RankRendezvous) -> Any:
    if needs_shim(options):
        load_shim()
    variables = environment(options) | rendezvous.variables
    with _only_engine(), environment_variables(variables), _process_settings_restored():
        import sglang

        arguments = server_args(folder, max_model_len, options) | rendezvous.arguments
        if threading.current_thread() is threading.main_thread():
            # Without this SGLang ends this process when one of its processes fails.
            arguments["custom_sigquit_handler"] = note_failed_child
        before = set(descendants())
        try:
            return sglang.Engine(**arguments)
        except Exception as error:
            _end([p for p in descendants() if p not in before and _is_sglang_process(p)])
            raise RolloutError(f"SGLang did not start: {error}", code="sglang.start-failed") from error


@contextlib.contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Restore process-wide settings that SGLang changes on import and start: logging and the event loop policy."""
    root = logging.getLogger()
    handlers, level, policy = list(root.handlers), root.level, asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)


def _call_result(result: Any) -> ControlResult:
    """Convert SGLang's result: None, a tuple (success, message, ranks, ...), or an object with these attributes."""
    if result is None:
        return ControlResult(True, "")
    if isinstance(result, tuple):
        ranks = result[2] if len(result) > 2 and isinstance(result[2], list) else ()
        return ControlResult(bool(result[0]), str(result[1]), ranks)
    return ControlResult(bool(result.success), str(getattr(result, "message", "")))


def _is_sglang_process(process: psutil.Process) -> bool:
    command = command_line(process)
    if "multiprocessing.forkserver" in command and process.ppid() == os.getpid():
        return False  # later engines use it
    return bool(command) and "resource_tracker" not in command


def _end(processes: list[psutil.Process]) -> None:
    """Kill processes and their children, and wait for their end."""
    family = [member for process in processes for member in (*descendants(process), process)]
    for process in family:
        with contextlib.suppress(*READ_ERRORS):
            process.send_signal(signal.SIGKILL)
    wait_for_ends(family, 30)
