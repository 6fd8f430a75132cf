"""The embedded engine's parameters, and their updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.models.number_formats import dequantize_blocks, quantize_blocks
from megarl.sharding.placement import current_location
from megarl.sharding.plan import TransferUsage
from megarl.sharding.quantization import IncomingMatrices, MatrixId
from megarl.sharding.receiver import (
    NOT_CONNECTED,
    BucketReceiver,
    ReceiverSpec,
    ReplicaReceiver,
    ShardWeights,
    route_messages,
)
from megarl.sharding.sender import Message


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
        """Return the memory of a matrix itself; see :class:`~megarl.sharding.quantization.MatrixStorage`."""
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


class EmbeddedReceiver(ReplicaReceiver):
    """The only rank's receiver, in this process; ``check_idle`` raises if the engine cannot begin an update now."""

    def __init__(self, weights: WeightStore, device: torch.device, check_idle: Callable[[], None]) -> None:
        self._weights, self._device, self._check_idle = weights, device, check_idle
        self._receiver: BucketReceiver | None = None
        self.locations = [current_location(str(device))]

    def connect(self, specs: Sequence[ReceiverSpec]) -> None:
        (spec,) = specs
        self._receiver = BucketReceiver.connect(spec, self._weights, self._device)

    def begin(self, version: int) -> None:
        self._check_idle()
        self._connected().begin(version)

    def open(self, session: int) -> None:
        self._connected().peers.open(session)

    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        receiver = self._connected()
        receiver.import_bucket(index, *route_messages(messages, [receiver.rank]))

    def close(self, completed: bool) -> list[TransferUsage]:
        return [self._connected().close(completed)]

    def end(self, version: int) -> None:
        self._connected().end(version)

    def _connected(self) -> BucketReceiver:
        if self._receiver is None:
            raise WeightSyncError(NOT_CONNECTED, code="sync.no-receivers")
        return self._receiver
