"""An output that is being written, in a hidden folder beside its place, until it is whole.

A killed conversion leaves that folder, and nothing at the output's own place. The next one with the same source and
options goes on with the files that are missing; ``--restart`` begins anew; removing the folder cleans up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.files import flush_path
from megarl.replacing import put_in_place, restore_replaced

_JOURNAL = "conversion.json"
_LOCK = "conversion.lock"


class Unfinished:
    """A folder in the making.

    Args:
        path: the output's own place.
        overwrite: what is there may be replaced.

    Raises:
        CheckpointError: ``path`` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path.absolute()
        self.folder = self.path.parent / f".{self.path.name}.converting"
        self.finished: set[str] = set()
        self._fingerprint = ""
        self._writing = threading.Lock()
        restore_replaced(self.path)
        if os.path.lexists(self.path) and not overwrite:
            raise CheckpointError(f"{path} exists already; choose another place, or --overwrite it")

    @contextlib.contextmanager
    def opened(self, plan: Mapping[str, Any], restart: bool) -> Iterator[None]:
        """Scope in which this process, and no other, writes the folder.

        Args:
            plan: what determines every byte of the output; what was finished under another plan is not used.
            restart: forget what an interrupted conversion finished.

        Raises:
            CheckpointError: another process converts to the same place, or an interrupted conversion of something
                else is there and ``restart`` is off.
        """
        self._fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / _LOCK, "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CheckpointError(f"another process is converting to {self.path}") from None
                self._take_over(restart)
                yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder}: {error}") from error

    def record(self, name: str) -> None:
        """Notes a file that is whole and on the disk."""
        with self._writing:
            self.finished.add(name)
            self._write_journal()

    def publish(self) -> None:
        """Flushes the folder and gives it its own name; what had that name is replaced."""
        for name in (_JOURNAL, _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        for folder, _, names in os.walk(self.folder):
            for name in names:
                flush_path(Path(folder) / name)
            flush_path(Path(folder))
        put_in_place(self.folder, self.path)

    def _take_over(self, restart: bool) -> None:
        known = self._read_journal()
        if known is not None and not restart and known.get("plan") != self._fingerprint:
            raise CheckpointError(
                f"{self.folder} is what an interrupted conversion of another source, or with other options, left: "
                f"--restart discards it"
            )
        finished = [] if known is None or restart else known["finished"]
        self.finished = {name for name in finished if (self.folder / name).is_file()}
        for path in self.folder.iterdir():
            if path.name not in {*self.finished, _LOCK, _JOURNAL}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._write_journal()

    def _write_journal(self) -> None:
        content = json.dumps({"plan": self._fingerprint, "finished": sorted(self.finished)})
        fresh = self.folder / f"{_JOURNAL}.new"
        fresh.write_text(content, encoding="utf-8")
        os.replace(fresh, self.folder / _JOURNAL)

    def _read_journal(self) -> dict[str, Any] | None:
        try:
            journal = json.loads((self.folder / _JOURNAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return journal if isinstance(journal, dict) and isinstance(journal.get("finished"), list) else None
