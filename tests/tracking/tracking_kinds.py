"""Trackers whose process does what a network and a package can do: they are imported there by name."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from megarl.errors import ConfigError
from megarl.tracking import RunInfo, Tracker


class FileTracker(Tracker):
    """Appends what it gets to a file, and does what it finds in the run's ``config``: by call number, from 1 on."""

    apart = True

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

    def _note(self, what):
        with (self.folder / "told").open("a") as file:
            file.write(json.dumps(what) + "\n")


class WithoutLogin(FileTracker):
    @classmethod
    def check(cls):
        raise ConfigError("there is no login")


class CannotBeImported(FileTracker):
    package = "halfinstalled"

    @classmethod
    def check(cls):
        import megarl.no_such_module  # noqa: F401
