"""A callback that records the listening sockets of all processes of a run, by the names of their log files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
from support.listeners import listening_processes

from megarl.base.processes import descendants
from megarl.trainer.callbacks import Callback, TrainerView

FILE = "listeners.json"


class RecordListeners(Callback):
    """Write the addresses of listening sockets by process, after each step."""

    def on_step_end(self, view: TrainerView) -> None:
        """Record the workers, which are no children of this process if a fork server started them, and Ray."""
        found = {"Ray": sorted(listening_processes(descendants()))}
        for log in (view.folder / "logs").glob("*.log"):
            pids = re.findall(r" begins, pid (\d+)", log.read_text(encoding="utf-8"))
            found[log.stem] = sorted(listening_processes([psutil.Process(int(pids[-1]))]))
        Path(view.folder, FILE).write_text(json.dumps(found), encoding="utf-8")
