"""SGLang with its front end in this process; its scheduler runs in processes of its own, one per device."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from megarl.rollout.interface import RolloutError
from megarl.rollout.sglang import features
from megarl.rollout.sglang.backend import CALLS, Outcome
from megarl.rollout.sglang.environment import applied, environment, load_shim, needs_shim
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.server_args import LOADER, server_args

# SGLang's front end keeps its configuration in one place for the whole process.
_RUNNING = threading.Lock()
_CHILD_FAILED = threading.Event()


def note_failed_child(signum: int | None = None, frame: Any = None) -> None:
    """Called by signal when one of SGLang's processes ends: the engine serves nothing more, this process lives on."""
    _CHILD_FAILED.set()


class InProcess:
    """An ``sglang.Engine`` without its own loop: requests run on the engine's :class:`Loop`.

    Its processes end with :meth:`close`. ``Engine.shutdown`` is not used: it ends every child of this process, whoever
    started it.

    Args:
        folder: the model.
        max_model_len: most tokens of prompt and answer together.
        options: of the engine.

    Raises:
        RolloutError: SGLang does not start, or this process has such an engine already.
    """

    ranks_host = None

    def __init__(self, folder: str, max_model_len: int, options: SGLangOptions) -> None:
        if not _RUNNING.acquire(blocking=False):
            raise RolloutError(
                "this process already holds an SGLang engine, and SGLang can have one per process: shut it down first, "
                "or use rollout.engine_kwargs.sglang.mode=http"
            )
        _CHILD_FAILED.clear()
        self._closed = False
        try:
            self._engine = _start(folder, max_model_len, options)
        except BaseException:
            _RUNNING.release()
            raise
        self._manager = self._engine.tokenizer_manager
        self._processes = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Backend`."""
        try:
            return await self._engine.async_generate(**payload)
        except ValueError as error:
            raise RolloutError(str(error)) from None

    async def abort(self, rid: str) -> None:
        """See :class:`Backend`."""
        self._manager.abort_request(rid=rid)

    async def call(self, method: str, **fields: Any) -> Outcome:
        """See :class:`Backend`."""
        call = CALLS[method]
        function = getattr(self._manager, method)
        arguments = () if call.request is None else (features.request_of(call.request, fields),)
        return _outcome(await function(*arguments))

    async def has(self, method: str) -> bool:
        """See :class:`Backend`."""
        return hasattr(self._manager, method)

    async def loaders(self) -> list[str]:
        """See :class:`Backend`."""
        return [LOADER]

    def failure(self) -> str | None:
        """See :class:`Backend`."""
        gone = [process.pid for process in self._processes if not process.is_running() or _is_zombie(process)]
        if self._closed:
            return "it was shut down"
        if gone or _CHILD_FAILED.is_set():
            return f"one of its processes ended (running: {len(self._processes) - len(gone)})"
        return None

    async def disconnect(self) -> None:
        """There are no connections."""

    def close(self) -> None:
        """See :class:`Backend`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._engine.shutdown)
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        _end(self._processes)
        _RUNNING.release()


def _start(folder: str, max_model_len: int, options: SGLangOptions) -> Any:
    if needs_shim(options):
        load_shim()
    with applied(environment(options)), _own_settings_kept():
        import sglang

        arguments = server_args(folder, max_model_len, options)
        if threading.current_thread() is threading.main_thread():
            # Without this SGLang ends this process when one of its own fails.
            arguments["custom_sigquit_handler"] = note_failed_child
        before = set(psutil.Process().children(recursive=True))
        try:
            return sglang.Engine(**arguments)
        except Exception as error:
            _end([p for p in psutil.Process().children(recursive=True) if p not in before and _is_sglangs(p)])
            raise RolloutError(f"SGLang did not start: {error}") from error


@contextlib.contextmanager
def _own_settings_kept() -> Iterator[None]:
    """Puts back what SGLang sets for the whole process as it is imported and started: logging and the loops' kind."""
    root = logging.getLogger()
    handlers, level, policy = list(root.handlers), root.level, asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)


def _outcome(answer: Any) -> Outcome:
    """SGLang answers with nothing, with (success, message, perhaps ranks, ...), or with an object that has these."""
    if answer is None:
        return Outcome(True, "")
    if isinstance(answer, tuple):
        ranks = answer[2] if len(answer) > 2 and isinstance(answer[2], list) else ()
        return Outcome(bool(answer[0]), str(answer[1]), ranks)
    return Outcome(bool(answer.success), str(getattr(answer, "message", "")))


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _is_sglangs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" not in " ".join(process.cmdline())
    return False


def _end(processes: list[psutil.Process]) -> None:
    """Ends processes and their children, and waits until they are gone."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [*process.children(recursive=True), process]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)
