"""Verbs that save and restore a role that trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.base.errors import CheckpointError
from megarl.megatron import MegatronEngine
from megarl.megatron.checkpoint.pending_save import HostSnapshot, PendingSave
from megarl.megatron.checkpoint.role_state import RESUMABLE
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.workers.dispatch import Dispatch, SavedPart, verb
from megarl.workers.settings import RoleSettings


class SavingWorker:
    """A worker with an engine whose state can be saved, synchronously or in the background of training.

    A failed save is a result, not an error: the role is unaffected, and the driver decides.
    """

    shares_device = True
    """Whether other processes use the role's devices: then each phase returns cached memory."""

    settings: RoleSettings
    engine: MegatronEngine
    _pending: PendingSave | None = None
    _begin_failure: str = ""
    _snapshot: HostSnapshot | None = None

    def free_device(self) -> dict[str, int]:
        """Offload the configured parts at the end of a phase; returns the released device bytes of each."""
        return self.engine.offload(return_cached=self.shares_device)

    @verb(Dispatch.ALL)
    def save_checkpoint(self, path: str, contents: Sequence[str] = RESUMABLE, in_background: bool = False) -> None:
        """Begin to write a checkpoint; :meth:`finish_checkpoint` completes it and returns the result.

        Args:
            path: a folder that all ranks share.
            contents: parts to save: ``model``, ``optimizer``, ``extra``, ``hf_model``.
            in_background: copy the state to host memory and return; otherwise return when it is written.
        """
        if in_background and self._snapshot is None:
            self._snapshot = HostSnapshot(self.engine.runtime.device)
        self._begin_failure, self._pending = "", None
        try:
            self._pending = begin_save(
                self.engine,
                Path(path),
                contents,
                snapshot=self._snapshot if in_background else None,
                copy_from=self.settings.model_path,
                export_files=self.settings.export_files,
            )
        except CheckpointError as error:
            self._begin_failure = error.text
        self.free_device()

    @verb(Dispatch.ALL)
    def checkpoint_written(self) -> bool:
        """Return whether this rank has finished writing, successfully or not."""
        return self._pending is None or self._pending.is_written

    @verb(Dispatch.ALL)
    def finish_checkpoint(self) -> SavedPart:
        """Wait for the writing, and complete the checkpoint."""
        pending, self._pending = self._pending, None
        if pending is None:
            return SavedPart(failure=self._begin_failure or "no save was started")
        try:
            written = pending.finish()
        except CheckpointError as error:
            return SavedPart(failure=error.text)
        return SavedPart(written.entries, written.seconds)

    @verb(Dispatch.ALL)
    def load_checkpoint(self, path: str, contents: Sequence[str] = RESUMABLE) -> None:
        """Restore a saved state, also in another layout.

        Raises:
            CheckpointError: something is missing, corrupt, or of another model.
        """
        load_sharded(self.engine, Path(path), contents)
        self.free_device()
