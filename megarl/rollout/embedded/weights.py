"""The embedded engine's parameters, and the weight update that replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.rollout.interface import NO_VERSION, TensorSlice
from megarl.rollout.weight_checks import Coverage, check_complete


class WeightStore:
    """Parameters by name, replaced as a whole by weight updates; ``version`` is ``NO_VERSION`` while incomplete.

    Args:
        params: names and shapes, from :meth:`megarl.models.WeightMap.rollout_params`.
        dtype: dtype of the parameters; slices of another dtype are converted.
        device: device of the parameters.
    """

    def __init__(self, params: Sequence[LocalParam], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {param.name: param.shape for param in params}
        self.tensors: dict[str, Tensor] = {}
        self.version = NO_VERSION
        self.dtype, self._device = dtype, device
        self._covers: dict[str, Coverage] | None = None
        self._update_version = 0

    @property
    def allocated(self) -> bool:
        """Whether the parameters have memory."""
        return bool(self.tensors)

    def allocate(self) -> None:
        """Allocate all parameters, filled with zeros; a no-op if they are allocated."""
        if not self.allocated:
            self.tensors = {
                name: torch.zeros(shape, dtype=self.dtype, device=self._device) for name, shape in self.shapes.items()
            }

    def free(self) -> None:
        """Free all parameters and drop an open update."""
        self.tensors, self.version, self._covers = {}, NO_VERSION, None

    def begin(self, version: int) -> None:
        """Begin an update; see :meth:`megarl.rollout.RolloutEngine.begin_update`."""
        if not self.allocated:
            raise WeightSyncError("the engine's weights are asleep: wake 'weights' before an update")
        if version < 0:
            raise WeightSyncError(f"weight version {version}, expected a number >= 0")
        self.version = NO_VERSION
        self._update_version = version
        self._covers = {name: Coverage(name, shape) for name, shape in self.shapes.items()}

    def write(self, slices: Iterable[TensorSlice]) -> None:
        """Check and write slices; see :meth:`megarl.rollout.RolloutEngine.update_weights`."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open: begin_update(version) comes first")
        # A failure in the middle loses the update: it cannot be ended any more.
        covers, self._covers = self._covers, None
        for tensor_slice in slices:
            name, values = tensor_slice[0], tensor_slice[-1]
            if name not in covers:
                raise WeightSyncError(f"'{name}' is not a parameter of this model ({len(covers)} parameters)")
            start = tuple(tensor_slice[1]) if len(tensor_slice) == 3 else (0,) * values.dim()
            if len(tensor_slice) == 2 and tuple(values.shape) != self.shapes[name]:
                raise WeightSyncError(
                    f"'{name}': shape {list(values.shape)}, expected {list(self.shapes[name])} (no offset given)"
                )
            covers[name].add(start, values.shape)
            box = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            self.tensors[name][box].copy_(values)
        self._covers = covers

    def end(self, version: int) -> None:
        """End the update; see :meth:`megarl.rollout.RolloutEngine.end_update`."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open: begin_update(version) comes first")
        covers, self._covers = self._covers, None
        if version != self._update_version:
            raise WeightSyncError(f"update to weight version {self._update_version} was ended as version {version}")
        check_complete(covers.values(), version)
        self.version = version
