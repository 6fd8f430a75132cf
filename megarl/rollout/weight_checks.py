"""Weight updates of one engine rank: coverage of every update, and changes of the weights after verification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.models.checksum import ParamRectangle
from megarl.models.coverage import Coverage
from megarl.rollout.interface import NO_VERSION, RolloutEngine
from megarl.rollout.quantization import IncomingMatrices
from megarl.sharding.receiver import TensorSlice

NOT_OPEN = "no weight update is open: begin_update(version) comes first"


def check_complete(covers: Iterable[Coverage], version: int) -> None:
    """Check that every element was written.

    Raises:
        WeightSyncError: elements are missing; names the first parameter.
    """
    covers = list(covers)
    gaps = [cover for cover in covers if cover.written != cover.expected]
    if gaps:
        first = gaps[0]
        raise WeightSyncError(
            f"weight version {version} is incomplete: {len(gaps)} of {len(covers)} parameters, first "
            f"'{first.name}' with {first.written} of {first.expected} elements written",
            code="sync.missing-elements",
        )


class ShardWeights:
    """Parameters of one engine rank by name, replaced as a whole by weight updates.

    Args:
        tensors: parameters without padding.
        matrices: quantizes the matrices of linear layers; None = the parameters hold the weights as they are sent.

    Attributes:
        version: version of the weights; ``NO_VERSION`` while they are incomplete.
    """

    def __init__(self, tensors: Mapping[str, Tensor], matrices: IncomingMatrices | None = None) -> None:
        self.tensors = dict(tensors)
        self.matrices = matrices
        self.version = NO_VERSION
        self._covers: dict[str, Coverage] | None = None
        self._update_version = NO_VERSION

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the update, besides the parameters: matrices before their quantization."""
        return 0 if self.matrices is None else self.matrices.peak_bytes

    def begin(self, version: int) -> None:
        """Begin an update; an unfinished one is dropped.

        Raises:
            WeightSyncError: ``version`` is negative.
        """
        check_version(version)
        self.version, self._update_version = NO_VERSION, version
        self._covers = {
            name: Coverage(name, tuple(tensor.shape), WeightSyncError) for name, tensor in self.tensors.items()
        }
        if self.matrices is not None:
            self.matrices.clear()

    def write(self, slices: Iterable[TensorSlice]) -> None:
        """Check and write slices, each before the next one is drawn from the iterable.

        Raises:
            WeightSyncError: no update is open, or a slice has an unknown name, does not fit its parameter, or overlaps
                an earlier slice. The update is then lost.
        """
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        # A failure in the middle loses the update: it cannot be ended any more.
        covers, self._covers = self._covers, None
        for name, start, values in slices:
            if name not in covers:
                raise WeightSyncError(
                    f"'{name}' is not a parameter of this model ({len(covers)} parameters)",
                    code="sync.unknown-parameter",
                )
            covers[name].add(start, values.shape)
            if self.matrices is not None and name in self.matrices:
                self.matrices.write(name, start, values)
                continue
            box = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            self.tensors[name][box].copy_(values)
        self._covers = covers

    def end(self, version: int) -> None:
        """End the update.

        Raises:
            WeightSyncError: an element is missing, ``version`` is not the update's, or quantized weights are not
                finite.
        """
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        covers, self._covers = self._covers, None
        if version != self._update_version:
            raise WeightSyncError(
                f"update to weight version {self._update_version} was ended as version {version}",
                code="sync.version-mismatch",
            )
        check_complete(covers.values(), version)
        if self.matrices is not None:
            self.matrices.end(version)
        self.version = version

    def rectangle_checksum(self, part: ParamRectangle, *, convert: bool = False) -> int:
        """Return the checksum of a part of a parameter as it was sent; of a quantized one, as it arrived.

        Args:
            convert: see :meth:`megarl.models.checksum.ParamRectangle.checksum`.

        Raises:
            WeightSyncError: the parameter has another dtype than the part.
        """
        if self.matrices is not None and part.name in self.matrices:
            return self.matrices.checksum(part)
        return part.checksum(self.tensors[part.name], convert=convert)

    def drop(self) -> None:
        """Drop an open update; the weights are incomplete."""
        self.version, self._covers = NO_VERSION, None
        if self.matrices is not None:
            self.matrices.clear()


def check_version(version: int) -> None:
    """Check the version of an update.

    Raises:
        WeightSyncError: it is negative.
    """
    if version < 0:
        raise WeightSyncError(f"weight version {version}, expected a number >= 0", code="sync.negative-version")


class WeightFingerprint:
    """Detects changes of an engine's weights after their verification.

    Verification compares the written tensors. The fingerprint covers everything the engine holds, against any later
    change, at the cost of reading it once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._recorded: tuple[str, ...] = ()

    def record(self) -> None:
        """Record the current fingerprint; a no-op for engines without fingerprints."""
        self._recorded = self._engine.fingerprint()

    def verify(self, when: str) -> None:
        """Compare the current fingerprint with the recorded one, if any.

        Args:
            when: time of a possible change, for the error.

        Raises:
            WeightSyncError: the weights have changed; names the first rank. The record is cleared.
        """
        if not self._recorded:
            return
        current = self._engine.fingerprint()
        changed = [rank for rank, (old, new) in enumerate(zip(self._recorded, current, strict=True)) if old != new]
        if changed:
            self._recorded = ()
            raise WeightSyncError(
                f"the engine's weights on its rank {changed[0]} were compared with the actor's and have changed "
                f"{when}, according to the engine's checksum",
                code="sync.weights-changed",
            )

    def verify_and_clear(self, when: str) -> None:
        """Compare a last time before the weights are replaced or freed, and clear the record; see :meth:`verify`."""
        self.verify(when)
        self._recorded = ()
