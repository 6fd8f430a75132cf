"""A run as its folder tells it, while it runs, after its end, or after it was killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.tracking.balance_file import BALANCE_FILE, BalanceRows, read_balance
from megarl.tracking.metrics_file import FILE_NAME, MetricsRow, read_metrics

CONFIG_FILE, FACTS_FILE, SUMMARY_FILE, SAMPLES_FOLDER = "config.yaml", "run.json", "summary.json", "samples"
SILENT_SECONDS = 600.0
"""A run without a summary that has logged nothing for so long, and for ten of its steps, has ended."""
_DEEPEST = 4


class NoRunError(ValueError):
    """A folder holds no run."""


@dataclass(frozen=True)
class RunRecord:
    """What a run left.

    Attributes:
        folder: its files.
        name: of the experiment.
        rows: of the metrics file.
        config: complete, as nested plain values; empty where the run has no ``config.yaml``.
        facts: of ``run.json``: command, software, machine, differences from the defaults; empty for want of the file.
        summary: of ``summary.json`` (:class:`megarl.trainer.reporting.RunSummary`); empty for want of the file.
        status: ``finished``, ``running`` or ``ended early``.
        problems: files that could not be read, and why.
        balance: what each data-parallel rank had to do.
    """

    folder: Path
    name: str
    rows: list[MetricsRow]
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    status: str = "finished"
    problems: tuple[str, ...] = ()
    balance: BalanceRows = field(default_factory=dict)

    @property
    def train_samples(self) -> Path:
        """Folder of the training answers that were kept; it may be missing."""
        return self.folder / SAMPLES_FOLDER / "train"

    @property
    def validation_samples(self) -> Path:
        """Folder of the validation answers that were kept; it may be missing."""
        return self.folder / SAMPLES_FOLDER / "validation"

    def setting(self, key: str) -> Any:
        """The value of a dotted configuration key; None where there is none."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def find_runs(paths: list[Path]) -> list[Path]:
    """The folders of runs among and below the given ones, in order: a sweep's folder stands for all its runs.

    Raises:
        NoRunError: a path is no folder, or there is no run in it.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise NoRunError(f"{path}: no such folder")
        below = list(_runs_below(path, _DEEPEST))
        if not below:
            raise NoRunError(f"{path}: no run in it or below it (a run's folder holds {FILE_NAME})")
        found.update(dict.fromkeys(run.resolve() for run in below))
    return list(found)


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    """Runs do not nest: a checkpoint below a run's folder has its metrics too."""
    if (path / FILE_NAME).is_file():
        if (path / "trainer_state.json").is_file():
            return  # a checkpoint
        yield path
    elif depth:
        folders = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        for entry in sorted(folders, key=_by_number):
            yield from _runs_below(entry, depth - 1)


def _by_number(path: Path) -> tuple[int, str]:
    """Runs of a sweep are called by their numbers."""
    return (int(path.name), "") if path.name.isdigit() else (-1, path.name)


def read_run(folder: Path, now: float | None = None) -> RunRecord:
    """Read a run's folder; a file that is missing or broken leaves its part of the record empty, and is named.

    Args:
        folder: of the run.
        now: seconds since the epoch, by which a silent run counts as ended; None = the clock's.
    """
    problems: list[str] = []
    config = _read(folder / CONFIG_FILE, problems)
    facts, summary = (_read(folder / name, problems) for name in (FACTS_FILE, SUMMARY_FILE))
    try:
        rows = read_metrics(folder / FILE_NAME)
    except ValueError as error:
        rows = []
        problems.append(str(error))
    try:
        balance = read_balance(folder / BALANCE_FILE)
    except ValueError as error:
        balance = {}
        problems.append(str(error))
    trainer = config.get("trainer")
    name = trainer.get("experiment_name") if isinstance(trainer, Mapping) else None
    status = "finished" if summary else _status(folder / FILE_NAME, rows, time.time() if now is None else now)
    return RunRecord(folder, str(name or folder.name), rows, config, facts, summary, status, tuple(problems), balance)


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
        else:
            value = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a mapping")
        return {}
    return value


def _status(metrics: Path, rows: list[MetricsRow], now: float) -> str:
    seconds = [row["timing_s/step"] for row in rows[-10:] if "timing_s/step" in row]
    patience = max(SILENT_SECONDS, sum(seconds))
    changed = metrics.stat().st_mtime if metrics.exists() else 0.0
    return "running" if now - changed < patience else "ended early"
