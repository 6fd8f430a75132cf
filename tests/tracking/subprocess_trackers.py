"""Trackers that simulate network and package failures; subprocesses import them by name."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.tracking import RunInfo, Tracker


class FileTracker(Tracker):
    """Appends its records to a file; the run's ``config`` has a failure by step."""

    in_subprocess = True

    def __init__(self, run: RunInfo) -> None:
        self.folder, self.config = run.folder, run.config
        self.calls = 0
        if "closed" in run.config and not Path(run.config["closed"]).exists():
            raise ConnectionError("nobody listens")

    def log(self, metrics, step):
        self.calls += 1
        behaviour = self.config.get(str(step))
        if behaviour == "refuse":
            raise ValueError("not a number")
        if behaviour == "die once" and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os._exit(3)
        if behaviour == "hang once" and not (self.folder / "hung").exists():
            (self.folder / "hung").touch()
            threading.Event().wait()
        self._note([step, metrics])

    def finish(self):
        if self.config.get("finish") == "hang":
            threading.Event().wait()
        self._note("finish")

    def leftover(self):
        return "look into the file"

    def _note(self, record):
        with (self.folder / "records").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class WithoutLogin(FileTracker):
    @classmethod
    def check(cls):
        raise ConfigError("there is no login", code="tracking.no-login")


class CannotBeImported(FileTracker):
    package = "halfinstalled"

    @classmethod
    def check(cls):
        import megarl.no_such_module  # noqa: F401
