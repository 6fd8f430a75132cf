"""Replay order: a file with groups and weight versions of each batch, which a later asynchronous run repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from megarl.agents.types import SampleId, VersionSpan
from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.run_writer import RUN_WRITER

REPLAY_FILE = "batch_order.jsonl"
"""Name of the file in the folder of a run, one batch per line; see :class:`OrderedBatch`."""
PARTIAL_KEY = "async_training.partial_rollout"


class OrderedBatch(NamedTuple):
    """A batch of a run; a line of the file has its number (from 0) as ``batch`` and these fields.

    Attributes:
        groups: numbers of the groups.
        versions: per group and sample the spans of its generated tokens; None without partial rollouts.
    """

    groups: list[int]
    versions: list[list[list[VersionSpan]]] | None

    def line(self, number: int) -> str:
        """Write the batch as a line."""
        row: dict[str, object] = {"batch": number, "groups": self.groups}
        return json.dumps(row if self.versions is None else row | {"versions": self.versions}) + "\n"


class ReplayOrder:
    """Order of batches, read from the file of an earlier run.

    Args:
        path: the file, ``trainer.replay_order``.
        partial_rollout: ``async_training.partial_rollout`` of this run.

    Raises:
        ConfigError: the file cannot be read, or the earlier run had another ``partial_rollout``.
    """

    def __init__(self, path: str, *, partial_rollout: bool) -> None:
        self._path = path
        self._batches = read_order(Path(path))
        self._spans: dict[SampleId, list[VersionSpan]] = {}
        for batch in self._batches.values():
            if (batch.versions is not None) != partial_rollout:
                recorded = str(not partial_rollout).lower()
                raise ConfigError(
                    f"trainer.replay_order={path} was recorded with {PARTIAL_KEY}={recorded}; set that value",
                    code="async.replay-partial-rollout",
                )
            for number, samples in zip(batch.groups, batch.versions or [[]] * len(batch.groups), strict=True):
                self._spans |= {SampleId(number, sample): spans for sample, spans in enumerate(samples)}

    def groups(self, batch: int) -> list[int]:
        """Return the groups of a batch.

        Raises:
            ConfigError: the file has no such batch.
        """
        if batch not in self._batches:
            raise ConfigError(
                f"trainer.replay_order={self._path} ends before batch {batch}; train fewer steps",
                code="async.replay-too-short",
            )
        return self._batches[batch].groups

    def spans(self, name: SampleId) -> list[VersionSpan]:
        """Return the weight versions of a sample's generated tokens; empty if the earlier run did not train on it."""
        return self._spans.get(name, [])


class OrderFile:
    """Records each batch; see :data:`REPLAY_FILE`.

    Args:
        path: the file.
        first: number of the next batch; a resumed run drops the lines from there on.
    """

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        earlier = read_order(path) if first and path.exists() else {}
        kept = {number: batch for number, batch in earlier.items() if number < first}
        RUN_WRITER.forget(path)
        RUN_WRITER.replace(path, "".join(batch.line(number) for number, batch in kept.items()))

    def add(self, number: int, batch: OrderedBatch) -> None:
        """Append a batch."""
        RUN_WRITER.append(self.path, batch.line(number))


def read_order(path: Path) -> dict[int, OrderedBatch]:
    """Read each batch by its number; a truncated last line, left by a killed process, is skipped.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"trainer.replay_order={path} cannot be read: {error}", code="async.replay-unreadable"
        ) from None
    batches: dict[int, OrderedBatch] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            batches[int(row["batch"])] = _batch(row)
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ConfigError(
                f"trainer.replay_order={path}, line {number}, is no batch with its groups; name the batch_order.jsonl "
                "of a run",
                code="async.replay-bad-line",
            ) from None
    return batches


def _batch(row: dict[str, Any]) -> OrderedBatch:
    groups, versions = [int(group) for group in row["groups"]], row.get("versions")
    if versions is not None:
        if len(versions) != len(groups):
            raise ValueError(f"{len(versions)} entries of versions for {len(groups)} groups")
        versions = [
            [[VersionSpan(int(version), int(tokens)) for version, tokens in spans] for spans in samples]
            for samples in versions
        ]
    return OrderedBatch(groups, versions)
