"""A Ray session: starts Ray on this machine or joins a cluster, and always shuts down cleanly."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

import psutil
import ray
from ray.exceptions import AuthenticationError

from megarl.base.errors import RayLost, ResourceError
from megarl.base.files import private_folder
from megarl.base.formatting import GIB
from megarl.base.logs import ProcessLogs
from megarl.base.processes import READ_ERRORS, child_processes, descendants, process_group, wait_for_ends
from megarl.base.signals import (
    ENDING_SIGNALS,
    check_interrupt,
    ending_signal,
    signals_exit_in_order,
    signals_held,
    signals_ignored,
)
from megarl.cluster.availability import available_cpus, check_cluster_answers, not_joined, unreachable
from megarl.cluster.local_ray import GCS, RayWatch, start_local_ray
from megarl.cluster.ray_internals import log_messages, log_unread_errors, read_authentication
from megarl.cluster.reaper import (
    ClusterToken,
    Reaper,
    delete_stale_tokens,
    end_ray,
    processes_of,
    session_folders,
    write_last_words,
)
from megarl.cluster.resources import PlacedPool, ResourcePool, place_pools

DEFAULT_OBJECT_STORE_BYTES = 200 * 2**20
_MINIMUM_OBJECT_STORE_BYTES = 75 * 2**20
STORE_SHARE, SHARED_MEMORY_SHARE = 0.3, 0.9
"""Largest object store of a Ray that starts here, as a share of the memory and of the free shared memory."""
RAY_LOGS = "ray"
"""Folder for Ray's own logs in the log folder of a run that failed."""
_EXIT_GRACE_S = 3.0
_KILL_S = 30.0
"""Seconds for killed processes to end, which takes long on a machine under load."""

logger = logging.getLogger(__name__)

if os.environ.get("RAY_RAYLET_PID") == str(os.getpid()):  # see megarl.cluster
    del os.environ["RAY_RAYLET_PID"]  # Ray has read it; it is not for the processes that start here


def local_store_bytes(needed: int) -> int:
    """Return the object store's size for a Ray that starts here: ``needed`` bytes, within this machine's limits."""
    limits = [int(STORE_SHARE * psutil.virtual_memory().total)]
    with contextlib.suppress(OSError):  # not Linux
        limits.append(int(SHARED_MEMORY_SHARE * shutil.disk_usage("/dev/shm").free))
    return max(DEFAULT_OBJECT_STORE_BYTES, min(needed, *limits))


class RaySession:
    """Starts Ray on this machine, or joins a running cluster, for the duration of a ``with`` block.

    On every exit (normal, exception, Ctrl-C, SIGTERM or SIGHUP) the devices are released and worker processes are
    killed. If Ray was started here, all its processes have ended when the block is left, and its session folder is
    deleted. SIGTERM and SIGHUP raise :class:`SystemExit` at its next wait. If this process is killed outright, a
    :class:`~megarl.cluster.reaper.Reaper` prints its last words and ends the Ray that was started here; a joined
    cluster stays.

    Args:
        address: cluster to join; default: ``RAY_ADDRESS`` if set, otherwise Ray is started here, reachable by loopback
            only.
        num_cpus: CPU slots of a started Ray; default: the cores that this process may run on.
        object_store_bytes: shared memory for objects of a started Ray; beyond it Ray spills to disk.
        dashboard: whether a started Ray has its dashboard, for this machine only.

    Attributes:
        dashboard_url: dashboard address of a started Ray; empty without one.
        token_file: file with the token of a started Ray, which its clients and dashboard need; empty in a joined
            cluster, whose authentication the user's environment sets.

    Raises:
        ResourceError: ``num_cpus`` or ``object_store_bytes`` is too small, the address does not respond, or Ray does
            not start in two attempts.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        num_cpus: int | None = None,
        object_store_bytes: int = DEFAULT_OBJECT_STORE_BYTES,
        logs: ProcessLogs | None = None,
        dashboard: bool = False,
    ) -> None:
        if num_cpus is not None and num_cpus < 1:
            raise ResourceError(f"num_cpus={num_cpus} must be at least 1", code="ray.num-cpus")
        if object_store_bytes < _MINIMUM_OBJECT_STORE_BYTES:
            raise ResourceError(
                f"object_store_bytes={object_store_bytes} is below Ray's minimum of {_MINIMUM_OBJECT_STORE_BYTES}",
                code="ray.object-store-size",
            )
        self.address = address or os.environ.get("RAY_ADDRESS") or None
        self.num_cpus = num_cpus
        self.object_store_bytes = object_store_bytes
        self.logs = logs
        self.dashboard = dashboard
        self.dashboard_url = ""
        self.token_file = ""
        self._token: ClusterToken | None = None
        self._reaper: Reaper | None = None
        self._watch = RayWatch([])
        self._pools: list[PlacedPool] = []
        self._daemons: list[psutil.Process] = []
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> RaySession:
        if ray.is_initialized():
            raise ResourceError("this process has a Ray session already; close it first", code="ray.session-open")
        self._signals.enter_context(signals_exit_in_order())
        try:
            # Until Ray is complete: half a Ray cannot be shut down, and Ray installs handlers that abort this process.
            # A connection may take long, so Ctrl-C interrupts it.
            with signals_held((signal.SIGTERM, signal.SIGHUP) if self.address else ENDING_SIGNALS):
                self._connect() if self.address else self._start()
            check_interrupt()
        except BaseException:
            self._daemons = self._find_daemons()
            self.close(keep_logs=True)
            self._signals.close()
            raise
        self._daemons = self._find_daemons()
        self._watch = RayWatch(self._daemons)
        log_unread_errors()
        log_messages()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with self._signals:
            return self._end(error)

    def _end(self, error: BaseException | None) -> bool:
        """Shut down after the block; return whether to ignore its exception: Ray died after the run had finished."""
        lost, finished, number = self.lost(), error is None or self._watch.finished, ending_signal()
        self.close(keep_logs=lost is not None or isinstance(error, Exception))
        if lost is not None and ray.is_initialized():  # the GCS
            atexit.register(_exit_without_ray, 0 if finished else 128 + number if number else 1)
        if error is not None and number in (signal.SIGTERM, signal.SIGHUP):
            raise SystemExit(128 + number)  # Ray turns the code of an exit during its calls into 1
        if lost is not None and finished:
            logger.warning("%s died when the work was complete; nothing is lost", lost)
            return True
        if lost is not None and not isinstance(error, RayLost):
            raise RayLost(f"{lost} died, so the run ends{self._logs_of_ray()}", code="ray.process-died") from error
        return False

    def lost(self) -> str | None:
        """Name the process of a Ray that was started here, GCS or raylet, that has died; None if both live."""
        return self._watch.lost()

    def finish(self) -> None:
        """Mark the work as complete: the death of the GCS or the raylet is only a warning from now on."""
        self._watch.finish()
        self.last_words(None)

    def last_words(self, sentence: str | None, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Leave words for the case that this process dies at once; see :func:`.reaper.write_last_words`."""
        if self._token is not None:
            with contextlib.suppress(OSError):  # a full disk
                write_last_words(self._token.file, sentence, files)

    def spills(self, needed: int) -> str | None:
        """Describe an object store with less than ``needed`` bytes over all nodes; None if it is large enough."""
        have = int(ray.cluster_resources().get("object_store_memory", 0))
        if have >= needed:
            return None
        remedy = "megarl launch --object-store-gb" if self.address else "a larger /dev/shm, or more memory"
        return (
            f"a step may keep {needed / GIB:.1f} GiB of token columns in Ray's object store, which has "
            f"{have / GIB:.1f} GiB; Ray moves the rest to disk, which is slow. More space: {remedy}"
        )

    def place(self, pools: Iterable[ResourcePool], timeout_s: float = 60.0) -> dict[str, PlacedPool]:
        """Check and reserve pools by :func:`~.resources.place_pools`; the session releases them when it ends."""
        placed = place_pools(pools, timeout_s, self.logs)
        self._pools += placed.values()
        return placed

    def close(self, *, keep_logs: bool = False) -> None:
        """Shut everything down; safe to call twice. A second Ctrl-C does not interrupt it.

        Args:
            keep_logs: copy the logs of a Ray that was started here to the logs of the run.
        """
        lost = self.lost()
        self._watch.close()
        with signals_ignored():
            children = self._daemons + [child for daemon in self._daemons for child in descendants(daemon)]
            if lost == GCS:
                # They would wait for the lost process, and abort this one after a minute.
                atexit.unregister(ray.shutdown)
                sys.excepthook = sys.__excepthook__
            elif ray.is_initialized():
                for pool in self._pools:
                    # A cluster that is already gone has nothing to release.
                    with contextlib.suppress(Exception):
                        pool.close()
                ray.shutdown()
            _end_processes(children, 0.0 if lost == GCS else _EXIT_GRACE_S)
            if self._token is not None:
                # Processes that have left the tree above, or that started meanwhile.
                end_ray(self._token.file, self._reaper.pid if self._reaper else None)
                if self.logs is not None:
                    _copy_logs(session_folders(self._token.file), self.logs.folder / RAY_LOGS, keep_logs)
                self._token.close()
                read_authentication()  # of the user's environment, for clusters joined later
            if self._reaper is not None:
                self._reaper.close()
            self._pools, self._daemons, self._token, self._reaper = [], [], None, None

    def _start(self) -> None:
        """Start Ray; a start that fails, as on a machine under load, is repeated once."""
        delete_stale_tokens()
        temp_dir = str(private_folder(os.environ.get("RAY_TMPDIR")) / "ray")
        self._token = ClusterToken(temp_dir)
        self._reaper = Reaper(self._token.file)
        self.token_file = str(self._token.file)
        for is_last in (False, True):
            try:
                self.dashboard_url = start_local_ray(
                    num_cpus=self.num_cpus or available_cpus(),
                    object_store_bytes=self.object_store_bytes,
                    temp_dir=temp_dir,
                    dashboard=self.dashboard,
                    token=self._token,
                    group=self._reaper.pid,
                )
                return
            except Exception as error:  # Ray raises many types, and for its time limit ``Exception`` itself
                ray.shutdown()
                _end_processes(processes_of(self._token.file, self._reaper.pid), _EXIT_GRACE_S)
                if is_last:
                    raise ResourceError(
                        f"Ray did not start on this machine, in two attempts: {error}{self._logs_of_ray()}. Usual "
                        "causes are a full /tmp or /dev/shm, a limit of processes (ulimit -u) and a machine under "
                        "load; `megarl doctor` checks them",
                        code="ray.start-failed",
                    ) from error
                logger.warning("Ray did not start and is started again: %s", error)

    def _logs_of_ray(self) -> str:
        return f"; Ray's logs: {self.logs.folder / RAY_LOGS}" if self.logs else ""

    def _connect(self) -> None:
        address = str(self.address)
        check_cluster_answers(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
            # ``auto`` is not probed before
            build = unreachable if "Could not find any running Ray instance" in str(error) else not_joined
            raise build(address, str(error)) from error
        self._token = ClusterToken(str(private_folder()))  # only its folder is used, for the last words
        self._reaper = Reaper(self._token.file)

    def _find_daemons(self) -> list[psutil.Process]:
        """List the processes of a Ray that was started here, without the reaper, whose group they joined."""
        if self._reaper is None:
            return []
        group = self._reaper.pid
        return [child for child in child_processes() if child.pid != group and process_group(child) == group]


def _exit_without_ray(code: int) -> None:
    """End this process at its exit: Ray's threads, which cannot be shut down without the GCS, would crash later."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _copy_logs(sessions: Sequence[Path], target: Path, everything: bool) -> None:
    """Copy the logs of Ray's sessions, or only Nsight Systems' profiles; with the modes of the run's files."""
    for session in sessions:
        logs = session / "logs"
        with contextlib.suppress(OSError):  # a full disk
            for path in (logs if everything else logs / "nsight").rglob("*"):
                if path.is_file():
                    copy = target / session.name / path.relative_to(logs)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)  # without Ray's modes, which are open to all users


def _end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Wait for processes to end, then kill the remaining ones (``psutil`` detects a reused pid)."""
    alive = wait_for_ends(processes, grace_s)
    for process in alive:
        with contextlib.suppress(*READ_ERRORS):
            process.kill()
    wait_for_ends(alive, _KILL_S)
