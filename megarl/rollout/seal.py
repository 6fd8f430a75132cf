"""Whether an engine still holds the weights that were once found right in it."""

from __future__ import annotations

from megarl.errors import WeightSyncError
from megarl.rollout.interface import RolloutEngine


class Seal:
    """Put on an engine's weights when they were compared with the actor's, and looked at again later.

    The comparison is of what was written. This is of all that the engine holds, whoever changes it and by whatever way,
    and costs no more than reading it once.

    Args:
        engine: whose weights it is about.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._mark: tuple[str, ...] = ()

    def put(self) -> None:
        """From here on the weights are not to change. Does nothing where the engine has no fingerprint."""
        self._mark = self._engine.fingerprint()

    def check(self, when: str) -> None:
        """Looks whether they have changed since; without a seal, does nothing.

        Args:
            when: they may have, for the error.

        Raises:
            WeightSyncError: they have; names the first rank. The seal is lifted.
        """
        if not self._mark:
            return
        mark, now = self._mark, self._engine.fingerprint()
        changed = [rank for rank, (one, other) in enumerate(zip(mark, now, strict=True)) if one != other]
        if changed:
            self._mark = ()
            raise WeightSyncError(
                f"the engine's weights on its rank {changed[0]} were compared with the actor's and have changed "
                f"{when}, by the engine's own checksum"
            )

    def break_up(self, when: str) -> None:
        """The weights are about to be replaced or dropped: a last look, and no seal any more; see :meth:`check`."""
        self.check(when)
        self._mark = ()
