"""The embedded engine's parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.models.number_formats import dequantize_blocks, quantize_blocks
from megarl.rollout.quantization import IncomingMatrices, MatrixId
from megarl.rollout.weight_checks import ShardWeights


class WeightStore(ShardWeights):
    """Parameters whose memory is freed while the engine sleeps.

    Args:
        params: names and shapes, from :meth:`megarl.models.WeightMap.rollout_params`.
        dtype: dtype of the parameters; slices of another dtype are converted.
        float32: whether the parameter of a Hugging Face name is float32 instead
            (:meth:`megarl.models.WeightMap.is_float32`).
        rounds: whether the parameter of an engine's name is rounded to blockwise FP8
            (:meth:`megarl.models.WeightMap.is_linear`); None = none is.
    """

    def __init__(
        self,
        params: Sequence[LocalParam],
        dtype: torch.dtype,
        device: torch.device,
        float32: Callable[[str], bool] = lambda hf_name: False,
        rounds: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__({}, None if rounds is None else IncomingMatrices(params, rounds, self))
        self.shapes = {param.name: param.shape for param in params}
        self.dtype, self._device = dtype, device
        exact = [param.name for param in params if any(float32(piece.hf_name) for piece in param.pieces)]
        self._dtypes = dict.fromkeys(exact, torch.float32)

    @property
    def peak_bytes(self) -> int:
        """None: matrices arrive in their own memory."""
        return 0

    @property
    def allocated(self) -> bool:
        """Whether the parameters have memory."""
        return bool(self.tensors)

    def allocate(self) -> None:
        """Allocate all parameters, filled with zeros; a no-op if they are allocated."""
        if not self.allocated:
            self.tensors = {
                name: torch.zeros(shape, dtype=self._dtypes.get(name, self.dtype), device=self._device)
                for name, shape in self.shapes.items()
            }

    def free(self) -> None:
        """Free all parameters and drop an open update."""
        self.tensors = {}
        self.drop()

    def incoming(self, matrix: MatrixId, dtype: torch.dtype) -> Tensor:
        """Return the memory of a matrix itself; see :class:`~megarl.rollout.quantization.MatrixStorage`."""
        name, number = matrix
        return self.tensors[name] if number is None else self.tensors[name][number]

    def store(self, matrix: MatrixId, weights: Tensor) -> Tensor:
        """Round the weights of a matrix in place to values that blockwise FP8 holds."""
        quantized = quantize_blocks(weights)
        dequantize_blocks(quantized, weights)
        return quantized.finite

    def begin(self, version: int) -> None:
        """Begin an update of the parameters, which must have memory."""
        if not self.allocated:
            raise WeightSyncError("the engine's weights are asleep: wake 'weights' first", code="engine.asleep")
        super().begin(version)
