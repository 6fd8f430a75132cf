"""Asynchronous checkpoint saves: the driver starts them, workers write, and the driver commits complete ones.

At most one save is pending; the next one waits for it. A failed save is reported and counted. Earlier checkpoints stay,
and training continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.base.atomic_write import replace_folder
from megarl.base.checkpoint_files import HF_FOLDER
from megarl.base.errors import CheckpointError, MegarlError
from megarl.base.files import FileEntry
from megarl.base.formatting import duration
from megarl.base.reductions import Metrics
from megarl.cluster.calls import PendingCall, wait_all
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.schema.model import HF_MODEL, CheckpointConfig
from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import open_source
from megarl.convert.source import HUGGING_FACE
from megarl.trainer.state.checkpoint_manifest import Score
from megarl.trainer.state.checkpoint_store import CheckpointStore
from megarl.workers.dispatch import SavedPart

logger = logging.getLogger(__name__)

WORKERS = 2
LATE_S = 1.0
"""Seconds that training may wait for an earlier save before the user is told."""


class BackgroundExport:
    """Converts the checkpoints of some roles to Hugging Face format in a thread; starts at once.

    The thread reads the written files in small bands, so it needs neither the workers nor memory for the model.

    Args:
        folders: of the roles, in a pending save.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._failure: Exception | None = None
        # A daemon: the process can end without it, and an unfinished save is never committed.
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the export has succeeded or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the export.

        Raises:
            CheckpointError: an export failed, for example on a full disk.
        """
        self._thread.join()
        if self._failure is not None:
            failure = self._failure
            reason = failure.text if isinstance(failure, MegarlError) else f"{type(failure).__name__}: {failure}"
            raise CheckpointError(
                f"the Hugging Face export failed: {reason}", code="checkpoint.export-failed"
            ) from failure

    def _run(self) -> None:
        try:
            for folder in self._folders:
                # Config and tokenizer are read from the folder that the export replaces.
                fresh = folder / f"{HF_FOLDER}.export"
                convert(
                    open_source(folder), fresh, HUGGING_FACE, ConversionOptions(workers=WORKERS, show_progress=False)
                )
                replace_folder(fresh, folder / HF_FOLDER)
        except Exception as error:  # raised by `wait`
            self._failure = error


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    groups: Sequence[WorkerGroup]
    score: Score | None
    blocked_s: float = 0.0
    entries: dict[str, FileEntry] | None = None
    """Files of the workers, after all have written."""
    write_s: float = 0.0
    export: BackgroundExport | None = None
    """Background export after the workers have written; None without one."""

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """Files of the workers."""
        return self.entries or {}


class CheckpointSaver:
    """Starts saves and commits them.

    Args:
        saved: contents of a save and whether it is asynchronous, by role.

    Attributes:
        newest: folder of the last complete checkpoint.
        failure: why the last save failed; None if it succeeded.
        slowest_s: seconds of the slowest save; None before the first.
    """

    def __init__(
        self,
        store: CheckpointStore,
        saved: Mapping[str, CheckpointConfig],
        message: Callable[[str], None] = logger.warning,
    ) -> None:
        self.store = store
        self.newest: Path | None = None
        self.failure: str | None = None
        self.failed = 0
        self.slowest_s: float | None = None
        self._saved = saved
        self._message = message
        self._pending: PendingCheckpoint | None = None
        self._completed: list[Path] = []
        self._told_late = False
        self._metrics: Metrics = {}

    @property
    def score_under_way(self) -> Score | None:
        """Validation score of the weights that are being saved."""
        return None if self._pending is None else self._pending.score

    def begin(
        self,
        step: int,
        groups: Sequence[WorkerGroup],
        write_driver_files: Callable[[Path], None],
        score: Score | None = None,
    ) -> None:
        """Start a save; return when the state may change again, for asynchronous roles before it is written.

        Raises:
            WorkerError: a worker died. Other failures are reported to the user.
        """
        self._wait_for_earlier(step)
        self._pending = pending = PendingCheckpoint(step, groups, score)
        with self._blocking(pending):
            try:
                folder = self.store.begin(step)
                write_driver_files(folder)
            except (OSError, CheckpointError) as error:
                self._give_up(pending, error.text if isinstance(error, CheckpointError) else str(error))
                return
            wait_all([self._submit(group, folder) for group in groups])
        if not any(self._saved[group.role].async_save for group in groups):
            self.wait()

    def _wait_for_earlier(self, step: int) -> None:
        """Complete an earlier save; report a storage that is too slow for ``trainer.save_freq``, the first time."""
        earlier, begin = self._pending, time.perf_counter()
        self.wait()
        if earlier is None:
            return
        waited = time.perf_counter() - begin
        self._metrics["checkpoint/waited_s"] = self._metrics.get("checkpoint/waited_s", 0.0) + waited
        if waited > LATE_S and not self._told_late:
            self._told_late = True
            self._message(
                f"the checkpoint of step {earlier.step} was still being written at step {step}: training waited "
                f"{duration(waited)} for it. No save is lost; raise trainer.save_freq or use a faster storage. "
                "checkpoint/waited_s counts further waits"
            )

    def advance(self) -> None:
        """Commit the pending save if all workers have written; does not wait for them."""
        pending = self._pending
        if pending is None:
            return
        if pending.entries is None and not (self._written(pending) and self._finish_workers(pending)):
            return
        export = self._export_of(pending)
        if export is None or export.is_done:
            self.wait()

    def wait(self) -> None:
        """Wait for the pending save and commit it."""
        pending = self._pending
        if pending is None:
            return
        if pending.entries is None and not self._finish_workers(pending):
            return
        failure: CheckpointError | None = None
        with self._blocking(pending):
            try:
                if export := self._export_of(pending):
                    export.wait()
                self.newest = self.store.commit(pending.step, pending.files, pending.score)
            except CheckpointError as error:
                failure = error
        if failure is not None:
            self._give_up(pending, failure.text)
        else:
            self._complete(pending)

    def _written(self, pending: PendingCheckpoint) -> bool:
        with self._blocking(pending):
            written = wait_all([group.submit("checkpoint_written") for group in pending.groups])
        return all(done for ranks in written for done in ranks)

    def _finish_workers(self, pending: PendingCheckpoint) -> bool:
        """Wait until the workers have written; on a failure give the save up and return False."""
        with self._blocking(pending):
            parts = wait_all([group.submit("finish_checkpoint") for group in pending.groups])
        ranks: list[tuple[str, SavedPart]] = [
            (group.role, part) for group, saved in zip(pending.groups, parts, strict=True) for part in saved
        ]
        failures = dict.fromkeys(part.failure for _, part in ranks if part.failure)
        if failures:
            self._give_up(pending, "; ".join(failures))
            return False
        pending.entries = {f"{role}/{name}": entry for role, part in ranks for name, entry in part.entries.items()}
        pending.write_s = max((part.seconds for _, part in ranks), default=0.0)
        return True

    def _export_of(self, pending: PendingCheckpoint) -> BackgroundExport | None:
        """Return the background export of the save, started if needed; None without one."""
        roles = [group.role for group in pending.groups if self._exports_in_background(group.role)]
        if roles and pending.export is None:
            # The export replaces the config and tokenizer that the workers have written.
            replaced = tuple(f"{role}/{HF_FOLDER}/" for role in roles)
            pending.entries = {name: entry for name, entry in pending.files.items() if not name.startswith(replaced)}
            pending.export = BackgroundExport([self.store.unfinished(pending.step) / role for role in roles])
        return pending.export

    def _exports_in_background(self, role: str) -> bool:
        """Whether the export of a role is converted from its checkpoint, without blocking training."""
        saved = self._saved[role]
        return saved.async_save and {"model", HF_MODEL} <= {*saved.save_contents}

    def take_metrics(self) -> Metrics:
        """Return the summed metrics ``checkpoint/*`` of the saves that ended since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def take_completed(self) -> list[Path]:
        """Return the folders of the checkpoints that were completed since the last call, and reset the list."""
        completed, self._completed = self._completed, []
        return completed

    def _note(self, pending: PendingCheckpoint, metrics: Metrics) -> None:
        """Add the metrics of a save; two saves may end in one step, if one waited for the other."""
        for name, value in {"checkpoint/blocked_s": pending.blocked_s, **metrics}.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        self._metrics["checkpoint/failed_saves"] = float(self.failed)

    def _submit(self, group: WorkerGroup, folder: Path) -> PendingCall:
        checkpoint: CheckpointConfig = self._saved[group.role]
        path = str(folder / group.role)
        excluded = (HF_MODEL,) if self._exports_in_background(group.role) else ()
        contents = [name for name in checkpoint.save_contents if name not in excluded]
        return group.submit("save_checkpoint", path, contents, checkpoint.async_save)

    def _complete(self, pending: PendingCheckpoint) -> None:
        self._pending, self.failure = None, None
        assert self.newest is not None
        self._completed.append(self.newest)
        self.slowest_s = max(self.slowest_s or 0.0, pending.blocked_s + pending.write_s)
        gigabytes = sum(entry.size for entry in pending.files.values()) / 2**30
        self._note(pending, {"checkpoint/write_s": pending.write_s, "checkpoint/gb": gigabytes})

    def _give_up(self, pending: PendingCheckpoint, reason: str) -> None:
        self.store.abort(pending.step)
        self._pending, self.failure = None, reason
        self.failed += 1
        self._note(pending, {})
        kept = self.newest or "earlier checkpoints"
        self._message(
            f"the checkpoint of step {pending.step} was not saved: {reason}. Training continues; kept: {kept}"
        )

    @contextmanager
    def _blocking(self, pending: PendingCheckpoint) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            pending.blocked_s += time.perf_counter() - begin
