"""Runs inside each of SGLang's ranks: writes weights into the model, checked, and tells of what it holds.

SGLang calls :func:`load` with the model and a list of (name, tensor) for ``update_weights_from_tensor``. A name is an
order in JSON, the tensor its data. An exception would end the whole server, so none leaves here: every order is
answered, good or bad, over a connection to the engine (:mod:`megarl.rollout.sglang.replies`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.models.checksum import tensor_checksum
from megarl.rollout.coverage import Coverage, check_complete
from megarl.rollout.sglang.replies import Reply, send_reply

ALIGNMENT = 16
"""Bytes on whose multiples slabs begin, as views of other number formats need."""


class Rank:
    """One rank's parameters, and the update under way."""

    def __init__(self) -> None:
        self._covers: dict[str, Coverage] | None = None
        self._version = 0

    def begin(self, model: torch.nn.Module, order: dict[str, Any], data: Tensor) -> Reply:
        """Compares the model's parameters with those expected, and opens an update."""
        self._covers = None
        held, expected = dict(model.named_parameters()), order["params"]
        for name, (shape, _) in expected.items():
            if name not in held:
                raise WeightSyncError(f"SGLang has no parameter '{name}'")
            if list(held[name].shape) != shape:
                raise WeightSyncError(f"SGLang holds '{name}' with shape {list(held[name].shape)}, expected {shape}")
        extra = sorted(set(held) - set(expected))
        if extra:
            raise WeightSyncError(f"SGLang has a parameter '{extra[0]}' that no weights are sent for")
        for name, (_, live) in expected.items():
            held[name].data[live[0] :].zero_()
        self._version = order["version"]
        self._covers = {name: Coverage(name, tuple(live)) for name, (_, live) in expected.items() if math.prod(live)}
        return Reply()

    def write(self, model: torch.nn.Module, order: dict[str, Any], data: Tensor) -> Reply:
        """Writes slabs, after all of them were checked."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open in SGLang's rank")
        covers, self._covers = self._covers, None
        for name, start, shape, *_ in order["slabs"]:
            if name not in covers:
                raise WeightSyncError(f"'{name}' is not a parameter that this update writes")
            covers[name].add(start, shape)
        held = dict(model.named_parameters())
        for name, start, shape, dtype, offset in order["slabs"]:
            kind = getattr(torch, dtype)
            values = data[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            held[name].data[_box(start, shape)].copy_(values)
        _wait(data)
        self._covers = covers
        return Reply()

    def end(self, model: torch.nn.Module, order: dict[str, Any], data: Tensor) -> Reply:
        """Closes the update, if everything was written."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open in SGLang's rank")
        covers, self._covers = self._covers, None
        if order["version"] != self._version:
            raise WeightSyncError(f"update to weight version {self._version} was ended as version {order['version']}")
        check_complete(covers.values(), self._version)
        derive = getattr(model, "post_load_weights", None)
        if derive is not None:
            derive()
        return Reply()

    def checksum(self, model: torch.nn.Module, order: dict[str, Any], data: Tensor) -> Reply:
        """Digests of rows of parameters, under names of the sender's."""
        held = dict(model.named_parameters())
        return Reply(
            {key: tensor_checksum(held[name].data[first:][:rows]) for key, (name, first, rows) in order["rows"].items()}
        )

    def read(self, model: torch.nn.Module, order: dict[str, Any], data: Tensor) -> Reply:
        """Rows of one parameter."""
        tensor = dict(model.named_parameters())[order["name"]].data[order["first"] : order["first"] + order["rows"]]
        tensor = tensor.cpu().contiguous()
        facts = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return Reply(facts, tensor.flatten().view(torch.uint8).numpy().tobytes())


_RANK = Rank()
_ACTIONS = {
    "begin": _RANK.begin,
    "write": _RANK.write,
    "end": _RANK.end,
    "checksum": _RANK.checksum,
    "read": _RANK.read,
}


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carries out orders; see the module.

    Args:
        model: SGLang's, as its rank holds it.
        named_tensors: orders with their data; an order that names a file has its data there.
    """
    for text, data in named_tensors:
        order = json.loads(text)
        try:
            with torch.no_grad():
                reply = _ACTIONS[order["action"]](model, order, _data_of(order, data))
        except Exception as error:
            reply = Reply(
                error=f"{error}" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
            )
        send_reply(order["to"], order["ticket"], order["rank"], reply)


def _data_of(order: dict[str, Any], data: Tensor) -> Tensor:
    path = order.get("file")
    if path is None:
        return data
    return torch.from_file(path, shared=True, size=order["bytes"], dtype=torch.uint8)


def _box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _wait(data: Tensor) -> None:
    """Returns when nothing reads the sender's memory any more."""
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
