"""The weight loader inside each of SGLang's ranks, and the ranks' parameters under the names of the weight map.

SGLang calls :func:`load` with the model and a list of (name, tensor) for ``update_weights_from_tensor``. The name is
the address of the engine, in JSON. The rank connects to it, and runs and answers its commands until the engine hangs
up. So the buckets of an update do not pass SGLang's front end and scheduler, and no rank waits for another one between
them. Weights are not among the commands, except with the transport ``inline``: the rank's
:class:`~megarl.sharding.receiver.BucketReceiver` reads them from the training ranks.

SGLang does not report errors of a custom loader, and an exception would end the server. So the loader never raises: it
replies with an error. Both ends prove to each other that they have the key of the call, since a rank unpickles the
commands.

For latent attention with a query latent, SGLang stores both projections into latents in one parameter: the rows of
``kv_a_proj_with_mqa`` follow those of ``q_a_proj``. In models with gated delta nets the parameters of full attention
belong to the layer itself, without ``self_attn``.

A trained vision tower is part of updates: SGLang fuses its projections, and pads its MLP and positions. A frozen one is
not: SGLang loads it from the model folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.child_process import environment_variables
from megarl.base.errors import WeightSyncError
from megarl.base.ports import GLOO_INTERFACE
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import LocalParam, ModelConfig, WeightMap
from megarl.models.declaration import FP8_BLOCK
from megarl.models.number_formats import FP8_DTYPE, quantize_blocks, scales_shape
from megarl.models.tower_class import engine_split, tower_shapes
from megarl.models.verification import ParamRectangle, tensor_checksum
from megarl.sharding.placement import ProcessLocation, current_location
from megarl.sharding.plan import TransferUsage
from megarl.sharding.quantization import IncomingMatrices, MatrixId
from megarl.sharding.receiver import NOT_CONNECTED, BucketReceiver, ReceiverSpec, ShardWeights
from megarl.sharding.sender import Message
from megarl.sharding.transports.interface import synchronize

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it divides the rows; the reshard plan does the same."""

VOCAB_PARAMS = ("model.embed_tokens.weight", "lm_head.weight")

QUERY_LATENT, KEY_VALUE_LATENT = ".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight"
FUSED_LATENTS = ".self_attn.fused_qkv_a_proj_with_mqa.weight"

TOWER_PROJECTIONS = {
    ".attn.qkv.": (".attn.qkv_proj.", 0),
    ".mlp.gate_proj.": (".mlp.gate_up_proj.", 0),
    ".mlp.up_proj.": (".mlp.gate_up_proj.", 1),
}
"""SGLang's names of a vision tower's projections, by those in the weight map, and their order in a fused parameter."""
FEATURE_CACHES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules of SGLang that hold the features of images as ``embedding_cache``, the second one in earlier versions."""

ALWAYS_FLOAT32 = (".linear_attn.A_log", ".self_attn.sinks", ".w13_weight_bias", ".w2_weight_bias")
"""Ends of the names of parameters that SGLang holds in float32 in every dtype, sinks depending on its kernels."""
SCALES = "_scale_inv"
"""End of the name of a parameter's scales."""
UNUSED_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of parameters that SGLang adds for a KV cache in FP8; they stay 1."""


@dataclass(frozen=True)
class SGLangShard:
    """A model's shard in one of SGLang's ranks; can be sent to its process.

    Names, shapes and places of parameters follow from the attributes, and are computed once: large models have many.
    SGLang's tensors are looked up at each use, because it may free or replace them between weight syncs.

    Attributes:
        quantized: the matrices of linear layers are in blockwise FP8.
    """

    config: ModelConfig
    tp: int
    rank: int
    quantized: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the attributes; the receiver computes the parameters."""
        return type(self), (self.config, self.tp, self.rank, self.quantized)

    @cached_property
    def params(self) -> tuple[LocalParam, ...]:
        """Parameters of the rank in the weight map; ValueError if the model does not divide over the ranks."""
        return tuple(WeightMap(self.config).rollout_params(self.tp, self.rank, vocab_multiple=VOCAB_MULTIPLE))

    def views(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return views of the rank's parameters under the names of the weight map, without vocabulary padding.

        Raises:
            WeightSyncError: SGLang lacks a parameter, has another one, or holds one in another shape.
        """
        held = {name: param.data for name, param in model.named_parameters()}
        places = self._places
        shapes = self._shapes(places)
        for name, shape in shapes.items():
            if name not in held:
                raise WeightSyncError(f"SGLang has no parameter '{name}'", code="sglang.parameter-missing")
            if list(held[name].shape) != shape:
                raise WeightSyncError(
                    f"SGLang holds '{name}' with shape {list(held[name].shape)}, expected {shape}",
                    code="sglang.parameter-shape",
                )
        unused = UNUSED_SCALES if self.quantized else ()
        expected = shapes.keys() | self.frozen_tower(model).keys()
        extra = sorted(name for name in held if name not in expected and not name.endswith(unused))
        if extra:
            raise WeightSyncError(
                f"SGLang has a parameter '{extra[0]}' without weights in the update", code="sglang.parameter-extra"
            )
        return {name: place.view(held[place.name]) for name, place in places.items()}

    def frozen_tower(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a vision tower that a weight update does not write."""
        if self.config.vision is None or self.config.trains_tower:
            return {}
        return {name: param.data for name, param in model.named_parameters() if self._is_in_tower(name)}

    def quantized_views(self, model: torch.nn.Module, views: Mapping[str, Tensor]) -> QuantizedViews:
        """Return views of the quantized matrices' codes and scales; see :meth:`QuantizedViews.check`."""
        held, fused = {name: param.data for name, param in model.named_parameters()}, _fused_latents(views)
        scales = {}
        for name in self._quantized(views):
            owner, row = fused.get(name, (name, 0))
            *stack, height, _ = scales_shape(views[name].shape)
            first = row // FP8_BLOCK
            scales[name] = held[owner + SCALES] if stack else held[owner + SCALES][first : first + height]
        result = QuantizedViews({name: views[name] for name in scales}, scales)
        result.check()
        return result

    def clear_padding(self, model: torch.nn.Module) -> None:
        """Fill the rank's padding, and other ranks' parameters, with zeros."""
        held, places = dict(model.named_parameters()), self._places
        for param in self.params:
            place = places[param.name]
            part = held[place.name].data[place.first :][: place.padded[0]]
            for dimension, size in enumerate(place.shape if param.pieces else (0,)):
                part.narrow(dimension, size, part.shape[dimension] - size).zero_()

    @cached_property
    def _places(self) -> dict[str, _Place]:
        fused = _fused_latents({param.name: param for param in self.params})
        layer = ".self_attn." if self.config.linear is None else "."
        places = {}
        for name, shape, _ in self.params:
            padded, (owner, first) = list(shape), fused.get(name, (name.replace(".self_attn.", layer), 0))
            if name in VOCAB_PARAMS:
                padded[0] = -(-self.config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // self.tp
            elif self._is_in_tower(name):
                owner, first, padded = self._tower_place(name, shape)
            places[name] = _Place(owner, first, shape, tuple(padded))
        return places

    def _is_in_tower(self, name: str) -> bool:
        return self.config.vision is not None and name.startswith(self.config.vision.prefix)

    def _tower_place(self, name: str, shape: tuple[int, ...]) -> tuple[str, int, list[int]]:
        """Return SGLang's parameter, the first row in it, and the shape with padding."""
        assert self.config.vision is not None
        padded, split = list(shape), engine_split(name)
        if split is not None and split.multiple > 1:
            size = tower_shapes(self.config.vision)[name][split.dimension]
            padded[split.dimension] = split.padded(size) // self.tp
        part = next((part for part in TOWER_PROJECTIONS if part in name), "")
        module, order = TOWER_PROJECTIONS.get(part, ("", 0))
        return name.replace(part, module), order * padded[0], padded

    def _shapes(self, places: Mapping[str, _Place]) -> dict[str, list[int]]:
        """Return the shapes of SGLang's parameters, with padding."""
        # The parts of a fused parameter are in row order, so the last one's end is the number of rows.
        shapes = {place.name: [place.first + place.padded[0], *place.padded[1:]] for place in places.values()}
        quantized = {places[name].name for name in self._quantized(places)}
        return shapes | {name + SCALES: list(scales_shape(tuple(shapes[name]))) for name in quantized}

    def _quantized(self, names: Iterable[str]) -> list[str]:
        return list(filter(WeightMap(self.config).is_linear, names)) if self.quantized else []


class _Place(NamedTuple):
    """A part of SGLang's parameter ``name``, from the row ``first`` on.

    Attributes:
        padded: shape with the padding at the end of a dimension.
    """

    name: str
    first: int
    shape: tuple[int, ...]
    padded: tuple[int, ...]

    def view(self, parameter: Tensor) -> Tensor:
        """Return a view of the part without padding."""
        return parameter[self.first :][tuple(map(slice, self.shape))]


def _fused_latents(params: Mapping[str, LocalParam] | Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return SGLang's fused parameter and the first row in it, by name in the weight map."""
    fused = {}
    for name, param in params.items():
        layer = name.removesuffix(QUERY_LATENT)
        if layer != name:
            fused[name] = (layer + FUSED_LATENTS, 0)
            fused[layer + KEY_VALUE_LATENT] = (layer + FUSED_LATENTS, param.shape[0])
    return fused


class QuantizedViews(NamedTuple):
    """Views of the quantized matrices of a rank, by their names in the weight map; stacked for experts.

    Attributes:
        codes: e4m3 ``[rows, columns]``.
        scales: float32, one per block.
    """

    codes: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]

    def check(self) -> None:
        """Check the dtypes of codes and scales.

        Raises:
            WeightSyncError: SGLang holds a parameter in another format, such as scales that are powers of two.
        """
        for name, codes in self.codes.items():
            if codes.dtype != FP8_DTYPE:
                raise WeightSyncError(
                    f"SGLang holds '{name}' as {codes.dtype}, expected {FP8_DTYPE} for {QUANTIZATION_KEY}={FP8}",
                    code="sglang.fp8-codes",
                )
            scales = self.scales[name]
            if scales.dtype != torch.float32:
                raise WeightSyncError(
                    f"SGLang holds the scales of '{name}' as {scales.dtype}: powers of two (ue8m0), which megarl does "
                    f"not write. Choose another kernel with server_args.fp8_gemm_runner_backend, such as triton, or "
                    f"set {QUANTIZATION_KEY}=null",
                    code="sglang.fp8-scales",
                )

    def incoming(self, matrix: MatrixId, dtype: torch.dtype) -> Tensor:
        """Allocate memory for the unquantized weights of a matrix."""
        return torch.empty_like(self._select(self.codes, matrix), dtype=dtype)

    def store(self, matrix: MatrixId, weights: Tensor) -> Tensor:
        """Write codes and scales of a complete matrix; see :class:`~megarl.sharding.quantization.MatrixStorage`."""
        quantized = quantize_blocks(weights)
        self._select(self.codes, matrix).copy_(quantized.codes)
        self._select(self.scales, matrix).copy_(quantized.scales)
        return quantized.finite

    def _select(self, tensors: Mapping[str, Tensor], matrix: MatrixId) -> Tensor:
        name, number = matrix
        return tensors[name] if number is None else tensors[name][number]


LOST = (OSError, EOFError, AuthenticationError)
"""Errors of a connection whose other end is gone, or is not the expected one."""


class Reply(NamedTuple):
    """A rank's reply to a command: values that JSON can encode, or the text and code of an error."""

    values: Any = None
    error: str = ""
    code: str = ""


def set_socket_options(connection: Connection, send_timeout_s: float = 0.0) -> None:
    """Set socket options: no delay, keep-alive probes, and a timeout of sends; 0 = none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):  # on Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        seconds, part = divmod(send_timeout_s, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))


class RankLoader:
    """Receives weight updates into one rank's parameters; commands return values that JSON can encode."""

    def __init__(self) -> None:
        self._shard: SGLangShard | None = None
        self._weights = ShardWeights({})
        self._receiver: BucketReceiver | None = None
        self._tower: dict[str, Tensor] = {}  # a frozen one, on the host: SGLang frees its own while it sleeps
        self._tower_updated = False  # by the last update, of an engine that trains it

    def attach(self, model: torch.nn.Module, shard: SGLangShard) -> ProcessLocation:
        """Compare the model's parameters with the shard; return the location of this process."""
        self._shard = shard
        views, matrices = self._views(model), None
        if shard.quantized:
            quantized = shard.quantized_views(model, views)
            matrices = IncomingMatrices(shard.params, quantized.codes.__contains__, quantized)
        self._weights = ShardWeights(views, matrices)
        if not self._tower:
            self._tower = self._copy_tower(model, shard)
        return current_location(str(_device(model)))

    def connect(self, model: torch.nn.Module, spec: ReceiverSpec) -> None:
        """Create the receiver of this rank."""
        self._receiver = BucketReceiver.connect(spec, self._weights, _device(model))

    def begin(self, model: torch.nn.Module, version: int) -> None:
        """Begin an update."""
        assert self._shard is not None
        self._weights.tensors = views = self._views(model)
        if self._weights.matrices is not None:
            self._weights.matrices.storage = self._shard.quantized_views(model, views)
        self._shard.clear_padding(model)
        for name, data in self._shard.frozen_tower(model).items():
            data.copy_(self._tower[name])
        if self._shard.config.trains_tower or self._tower_updated:
            drop_image_features()
        self._tower_updated = self._shard.config.trains_tower
        self._connected().begin(version)

    def tower_loaded(self, model: torch.nn.Module) -> None:
        """Take over the vision tower of a folder that SGLang has loaded."""
        assert self._shard is not None
        self._tower_updated = False
        self._tower = self._copy_tower(model, self._shard)
        drop_image_features()

    def open(self, model: torch.nn.Module, session: int, interface: str | None) -> None:
        """Prepare to receive; gloo groups with the training ranks use a network interface, None = this rank's."""
        with environment_variables({} if interface is None else {GLOO_INTERFACE: interface}):
            self._connected().peers.open(session)

    def bucket(self, model: torch.nn.Module, index: int, messages: Sequence[Message]) -> None:
        """Write the rank's messages of a bucket."""
        self._connected().import_bucket(index, messages)
        synchronize(_device(model))  # nothing reads the senders' memory any more

    def end(self, model: torch.nn.Module, version: int) -> None:
        """End the update if every element was written."""
        self._connected().end(version)
        derive = getattr(model, "post_load_weights", None)
        if derive is not None:
            derive()

    def close(self, model: torch.nn.Module, completed: bool) -> TransferUsage:
        """End receiving; return the resources of this process."""
        return self._connected().close(completed)

    def checksum(self, model: torch.nn.Module) -> dict[str, str]:
        """Return the digest of each parameter."""
        return {name: tensor_checksum(tensor) for name, tensor in self._views(model).items()}

    def sums(self, model: torch.nn.Module, rectangles: Sequence[ParamRectangle]) -> list[int]:
        """Return checksums of parameter parts, computed on this rank's device."""
        self._weights.tensors = self._views(model)
        # A sent value converts to float32 and back without a change.
        return [self._weights.rectangle_checksum(r, convert=r.name.endswith(ALWAYS_FLOAT32)) for r in rectangles]

    def _views(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Look up the parameters, which SGLang may replace when it loads a folder."""
        if self._shard is None:
            raise WeightSyncError("no engine is attached to this SGLang", code="sglang.not-attached")
        return self._shard.views(model)

    def _copy_tower(self, model: torch.nn.Module, shard: SGLangShard) -> dict[str, Tensor]:
        tower = shard.frozen_tower(model)
        if tower and self._tower_updated:
            raise WeightSyncError(
                "this SGLang has the vision tower that an earlier run trained, and not the model folder's; restart it",
                code="sglang.trained-tower",
            )
        return {name: data.to("cpu", copy=True) for name, data in tower.items()}

    def _connected(self) -> BucketReceiver:
        if self._receiver is None:
            raise WeightSyncError(NOT_CONNECTED, code="sync.no-receivers")
        return self._receiver


def drop_image_features() -> None:
    """Drop the features of images, which SGLang keeps by image when it empties its other caches.

    Raises:
        WeightSyncError: this version of SGLang keeps them elsewhere.
    """
    caches = [vars(sys.modules[name]) for name in FEATURE_CACHES if name in sys.modules]
    found = [names["embedding_cache"] for names in caches if "embedding_cache" in names]
    if not found:
        raise WeightSyncError(
            "this version of SGLang keeps the features of images where megarl cannot drop those of an earlier vision "
            "tower: install the version of megarl's sglang extra",
            code="sglang.image-features",
        )
    for cache in found:
        if cache is not None:
            cache.clear()


_LOADER = RankLoader()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Run the engine's commands until it hangs up; see the module docstring."""
    for text, _ in named_tensors:
        call = json.loads(text)
        host, port = call["address"]
        # An engine that is lost or unreachable misses the replies. SGLang must keep running.
        with contextlib.suppress(*LOST), Client((host, port), authkey=bytes.fromhex(call["key"])) as connection:
            set_socket_options(connection)
            connection.send_bytes(json.dumps({"call_id": call["call_id"], "rank": call["rank"]}).encode())
            while True:
                connection.send_bytes(json.dumps(_run(model, connection.recv_bytes())).encode())


def _run(model: torch.nn.Module, command: bytes) -> Reply:
    try:
        action, arguments = pickle.loads(command)  # noqa: S301 - of this run, over its own socket
        with torch.no_grad():
            return Reply(getattr(_LOADER, action)(model, *arguments))
    except WeightSyncError as error:
        return Reply(error=error.text, code=error.code)
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}", code="sync.rank-failed")


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
