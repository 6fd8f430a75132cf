"""The engine's parameters, and the session in which they are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.rollout.coverage import Coverage, check_complete
from megarl.rollout.interface import NO_VERSION, Slab


class WeightStore:
    """Parameters by name, replaced whole by sessions; ``version`` is ``NO_VERSION`` while they are not whole.

    Args:
        params: names and shapes, from :meth:`megarl.models.WeightMap.rollout_params`.
        dtype: number format to hold; slabs of another are converted.
        device: where to hold them.
    """

    def __init__(self, params: Sequence[LocalParam], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {param.name: param.shape for param in params}
        self.tensors: dict[str, Tensor] = {}
        self.version = NO_VERSION
        self.dtype, self._device = dtype, device
        self._session: dict[str, Coverage] | None = None
        self._session_version = 0

    @property
    def allocated(self) -> bool:
        """Whether the parameters have memory."""
        return bool(self.tensors)

    def allocate(self) -> None:
        """Gives every parameter memory, filled with zeros; those that have it keep it and their values."""
        if not self.allocated:
            self.tensors = {
                name: torch.zeros(shape, dtype=self.dtype, device=self._device) for name, shape in self.shapes.items()
            }

    def free(self) -> None:
        """Drops all values, and a session under way."""
        self.tensors, self.version, self._session = {}, NO_VERSION, None

    def begin(self, version: int) -> None:
        """Opens a session; see :meth:`megarl.rollout.RolloutEngine.begin_update`."""
        if not self.allocated:
            raise WeightSyncError("the engine's weights are asleep: wake 'weights' before an update")
        if version < 0:
            raise WeightSyncError(f"weight version {version}, expected a number >= 0")
        self.version = NO_VERSION
        self._session_version = version
        self._session = {name: Coverage(name, shape) for name, shape in self.shapes.items()}

    def write(self, slabs: Iterable[Slab]) -> None:
        """Checks and writes slabs; see :meth:`megarl.rollout.RolloutEngine.update_weights`."""
        if self._session is None:
            raise WeightSyncError("no weight update is open: begin_update(version) comes first")
        # A failure in the middle loses the session: nothing can end it any more.
        session, self._session = self._session, None
        for slab in slabs:
            name, values = slab[0], slab[-1]
            if name not in session:
                raise WeightSyncError(f"'{name}' is not a parameter of this model ({len(session)} parameters)")
            start = tuple(slab[1]) if len(slab) == 3 else (0,) * values.dim()
            if len(slab) == 2 and tuple(values.shape) != self.shapes[name]:
                raise WeightSyncError(
                    f"'{name}': shape {list(values.shape)}, expected {list(self.shapes[name])} (no offset given)"
                )
            session[name].add(start, values.shape)
            region = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            self.tensors[name][region].copy_(values)
        self._session = session

    def end(self, version: int) -> None:
        """Closes the session; see :meth:`megarl.rollout.RolloutEngine.end_update`."""
        if self._session is None:
            raise WeightSyncError("no weight update is open: begin_update(version) comes first")
        session, self._session = self._session, None
        if version != self._session_version:
            raise WeightSyncError(f"update to weight version {self._session_version} was ended as version {version}")
        check_complete(session.values(), version)
        self.version = version
