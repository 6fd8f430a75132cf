"""Watch over the processes of a local Ray that no run survives: the GCS and the raylet."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psutil

from megarl.base.processes import has_ended, process_name
from megarl.base.signals import request_interrupt, withdraw_interrupt

GCS, RAYLET = "Ray's control process (GCS)", "Ray's node process (raylet)"
_NAMES = {"gcs_server": GCS, "raylet": RAYLET}
_TICK_S = 0.5


class RayWatch:
    """A thread that interrupts the main thread soon after the GCS or the raylet has died.

    Ray itself notices a dead raylet by errors of all workers, and for a dead GCS aborts this process after a minute.

    Args:
        processes: of a local Ray.

    Attributes:
        finished: the work is complete.
    """

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.finished = False
        self._watched = [(name, process) for process in processes if (name := _NAMES.get(process_name(process)))]
        self._closed = threading.Event()
        self._lock = threading.Lock()  # no interrupt is requested once the watch is finished or closed
        if self._watched and threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._watch, name="ray watch", daemon=True).start()

    def lost(self) -> str | None:
        """Return :data:`GCS` or :data:`RAYLET` if that process has died, else None."""
        for name, process in self._watched:
            if has_ended(process):
                return name
        return None

    def finish(self) -> None:
        """Mark the work as complete: a death interrupts nothing any more."""
        with self._lock:
            self.finished = True
        withdraw_interrupt()

    def close(self) -> None:
        """End the watch, before Ray is shut down."""
        with self._lock:
            self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_S):
            if self.lost() is not None:
                with self._lock:
                    if not self.finished and not self._closed.is_set():
                        request_interrupt()
                return
