"""Saves a run: begun by the driver, written by the workers, and made a checkpoint when all of them have written.

One save is under way at a time; the next one waits for it. A save that fails is told and counted, the checkpoints
before it stay, and training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster import Pending, WorkerGroup, wait_all
from megarl.config.saving import HF_MODEL, CheckpointConfig
from megarl.errors import CheckpointError
from megarl.files import FileEntry
from megarl.trainer.checkpoint_export import HF_FOLDER, BackgroundExport
from megarl.trainer.checkpoint_manifest import Score
from megarl.trainer.checkpoint_store import CheckpointStore
from megarl.trainer.metrics import Metrics
from megarl.workers.saved_part import SavedPart

logger = logging.getLogger(__name__)


@dataclass
class Flight:
    """A save under way."""

    step: int
    groups: Sequence[WorkerGroup]
    score: Score | None
    blocked_s: float = 0.0
    known: dict[str, FileEntry] | None = None
    """What the workers have written, once all have."""
    write_s: float = 0.0
    export: BackgroundExport | None = None
    """Follows the workers' writing, where one is asked for in the background."""

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """What the workers have written."""
        return self.known or {}


class CheckpointSaver:
    """Begins saves and brings them to their end.

    Args:
        store: where the checkpoints go.
        saved: by role, what to save and whether in the background.
        tell: shows the user a line.

    Attributes:
        newest: folder of the last checkpoint that was completed.
        failure: why the last save failed; None where it did not.
        failed: saves that failed.
        slowest_s: seconds that the slowest save took, from its beginning to its end; None before the first.
    """

    def __init__(
        self,
        store: CheckpointStore,
        saved: Mapping[str, CheckpointConfig],
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.store = store
        self.newest: Path | None = None
        self.failure: str | None = None
        self.failed = 0
        self.slowest_s: float | None = None
        self._saved = saved
        self._tell = tell
        self._flight: Flight | None = None
        self._metrics: Metrics = {}

    @property
    def score_under_way(self) -> Score | None:
        """What validation said of the weights that are being saved."""
        return None if self._flight is None else self._flight.score

    def begin(
        self, step: int, groups: Sequence[WorkerGroup], write_own: Callable[[Path], None], score: Score | None = None
    ) -> None:
        """Saves; returns when the state may change again, which is before it is written where a role's is.

        Args:
            step: after which it is saved.
            groups: the roles that learn.
            write_own: writes the driver's own files into a folder.
            score: what validation said of these weights.

        Raises:
            WorkerError: a worker died; a save that failed for another reason is told.
        """
        self.wait()
        self._flight = flight = Flight(step, groups, score)
        with self._blocking(flight):
            try:
                folder = self.store.begin(step)
                write_own(folder)
            except (OSError, CheckpointError) as error:
                self._give_up(flight, str(error))
                return
            wait_all([self._submit(group, folder) for group in groups])
        if not any(self._saved[group.role].async_save for group in groups):
            self.wait()

    def advance(self) -> None:
        """Completes the save under way if all workers have written; returns at once otherwise."""
        flight = self._flight
        if flight is None:
            return
        if flight.known is None and not (self._written(flight) and self._finish_workers(flight)):
            return
        export = self._export_of(flight)
        if export is None or export.is_done:
            self.wait()

    def wait(self) -> None:
        """Completes the save under way, however long that takes."""
        flight = self._flight
        if flight is None:
            return
        if flight.known is None and not self._finish_workers(flight):
            return
        failure: CheckpointError | None = None
        with self._blocking(flight):
            try:
                if export := self._export_of(flight):
                    export.wait()
                self.newest = self.store.commit(flight.step, flight.files, flight.score)
            except CheckpointError as error:
                failure = error
        if failure is not None:
            self._give_up(flight, str(failure))
        else:
            self._complete(flight)

    def _written(self, flight: Flight) -> bool:
        with self._blocking(flight):
            written = wait_all([group.submit("checkpoint_written") for group in flight.groups])
        return all(done for ranks in written for done in ranks)

    def _finish_workers(self, flight: Flight) -> bool:
        """Waits until the workers have written; whether all went well. If not, the save is given up."""
        with self._blocking(flight):
            parts = wait_all([group.submit("finish_checkpoint") for group in flight.groups])
        ranks: list[tuple[str, SavedPart]] = [
            (group.role, part) for group, saved in zip(flight.groups, parts, strict=True) for part in saved
        ]
        failures = dict.fromkeys(part.failure for _, part in ranks if part.failure)
        if failures:
            self._give_up(flight, "; ".join(failures))
            return False
        flight.known = {f"{role}/{name}": entry for role, part in ranks for name, entry in part.entries.items()}
        flight.write_s = max((part.seconds for _, part in ranks), default=0.0)
        return True

    def _export_of(self, flight: Flight) -> BackgroundExport | None:
        """The exports that follow what the workers have written, begun where they have not; None where none do."""
        roles = [group.role for group in flight.groups if self._exports_later(group.role)]
        if roles and flight.export is None:
            # The export takes the place of the config and tokenizer that the workers have written there.
            replaced = tuple(f"{role}/{HF_FOLDER}/" for role in roles)
            flight.known = {name: entry for name, entry in flight.files.items() if not name.startswith(replaced)}
            flight.export = BackgroundExport([self.store.unfinished(flight.step) / role for role in roles])
        return flight.export

    def _exports_later(self, role: str) -> bool:
        """Whether a role's export is made of its checkpoint: where training is not to wait for it."""
        saved = self._saved[role]
        return saved.async_save and {"model", HF_MODEL} <= {*saved.save_contents}

    def take_metrics(self) -> Metrics:
        """``checkpoint/*`` of the saves that ended since the last call, added up; empty where none did."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _note(self, flight: Flight, metrics: Metrics) -> None:
        """Adds to the metrics of saves that ended since they were taken: two may, where one waited for the other."""
        for name, value in {"checkpoint/blocked_s": flight.blocked_s, **metrics}.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        self._metrics["checkpoint/failed_saves"] = float(self.failed)

    def _submit(self, group: WorkerGroup, folder: Path) -> Pending:
        checkpoint: CheckpointConfig = self._saved[group.role]
        path = str(folder / group.role)
        later = (HF_MODEL,) if self._exports_later(group.role) else ()
        contents = [name for name in checkpoint.save_contents if name not in later]
        return group.submit("save_checkpoint", path, contents, checkpoint.async_save)

    def _complete(self, flight: Flight) -> None:
        self._flight, self.failure = None, None
        self.slowest_s = max(self.slowest_s or 0.0, flight.blocked_s + flight.write_s)
        gigabytes = sum(entry.size for entry in flight.files.values()) / 2**30
        self._note(flight, {"checkpoint/write_s": flight.write_s, "checkpoint/gb": gigabytes})

    def _give_up(self, flight: Flight, why: str) -> None:
        self.store.abort(flight.step)
        self._flight, self.failure = None, why
        self.failed += 1
        self._note(flight, {})
        kept = self.newest or "those of before"
        self._tell(f"the checkpoint of step {flight.step} was not saved: {why}. Training goes on; kept: {kept}")

    @contextmanager
    def _blocking(self, flight: Flight) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            flight.blocked_s += time.perf_counter() - begin
