"""Replay order: the groups of each batch of an asynchronous run, as a file that a later run repeats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.run_writer import RUN_WRITER

REPLAY_FILE = "batch_order.jsonl"
"""Name of the file in the folder of a run; a line holds ``batch`` (number from 0) and ``groups`` (numbers)."""


class ReplayOrder:
    """Order of batches, read from the file of an earlier run.

    Args:
        path: the file, ``trainer.replay_order``.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._batches = read_order(Path(path))

    def groups(self, batch: int) -> list[int]:
        """Return the groups of a batch.

        Raises:
            ConfigError: the file has no such batch.
        """
        if batch not in self._batches:
            raise ConfigError(f"trainer.replay_order={self._path} ends before batch {batch}; train fewer steps")
        return self._batches[batch]


class OrderFile:
    """Records the groups of each batch; see :data:`REPLAY_FILE`.

    Args:
        path: the file.
        first: number of the next batch; a resumed run drops the lines from there on.
    """

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        earlier = read_order(path) if first and path.exists() else {}
        kept = {number: groups for number, groups in earlier.items() if number < first}
        RUN_WRITER.forget(path)
        RUN_WRITER.replace(path, "".join(_line(number, groups) for number, groups in kept.items()))

    def add(self, batch: int, groups: Sequence[int]) -> None:
        """Append a batch."""
        RUN_WRITER.append(self.path, _line(batch, groups))


def read_order(path: Path) -> dict[int, list[int]]:
    """Read the groups of each batch by its number; a truncated last line, left by a killed process, is skipped.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trainer.replay_order={path} cannot be read: {error}") from None
    batches: dict[int, list[int]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            batches[int(row["batch"])] = [int(group) for group in row["groups"]]
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ConfigError(f"trainer.replay_order={path}, line {number}: no batch with its groups") from None
    return batches


def _line(batch: int, groups: Sequence[int]) -> str:
    return json.dumps({"batch": batch, "groups": list(groups)}) + "\n"
