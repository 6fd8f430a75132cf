"""The embedded engine: weights, KV cache and continuous batching behind the engine contract."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.base.errors import ConfigError, DataError, MegarlError, ModelError, WeightSyncError
from megarl.models import LocalParam, ModelConfig, WeightMap, read_model_config
from megarl.models.end_tokens import eos_in
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.number_formats import dequantize_blocks, quantize_blocks
from megarl.models.verification import ParamRectangle, tensor_checksum
from megarl.models.vision_tower import ImageFeatures, StoredTower
from megarl.rollout.embedded.decoder import KNOWN_PARAMETERS, TransformerDecoder
from megarl.rollout.embedded.generation import ContinuousBatcher, FinishedRequest, RouteTable
from megarl.rollout.embedded.kv_cache import KVCache
from megarl.rollout.embedded.sampling import Decode, Sampler, StopRules, load_decode
from megarl.rollout.interface import (
    TAGS,
    Completion,
    EngineOptions,
    FinishReason,
    Request,
    RequestRefused,
    RolloutEngine,
    RolloutError,
    Tag,
    check_none_running,
    check_tags,
    check_token_ids,
)
from megarl.rollout.registry import register_engine
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

# Maximum prompt tokens per forward pass; a longer prompt has its own pass. On a CPU a pass of this size keeps a small
# model's activations in a core's cache. A GPU needs larger ones.
PROMPT_TOKENS = {"cpu": 1024, "cuda": 16384}
# Cache lengths are rounded up to a multiple, so that similar calls reuse the cache.
LENGTH_MULTIPLE = 32


class WeightStore(ShardWeights):
    """Parameters whose memory is freed while the engine sleeps.

    Args:
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

    def allocate(self) -> None:
        """Allocate all parameters, filled with zeros; a no-op if they are allocated."""
        if not self.tensors:
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
        if not self.tensors:
            raise WeightSyncError("the engine's weights are asleep: wake 'weights' first", code="engine.asleep")
        super().begin(version)


class EmbeddedReceiver(ReplicaReceiver):
    """The only rank's receiver, in this process.

    Args:
        check_idle: raises if the engine cannot begin an update now.
        changed: called after an update.
    """

    def __init__(
        self,
        weights: WeightStore,
        device: torch.device,
        check_idle: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._weights, self._device, self._check_idle, self._changed = weights, device, check_idle, changed
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
        self._changed()

    def _connected(self) -> BucketReceiver:
        if self._receiver is None:
            raise WeightSyncError(NOT_CONNECTED, code="sync.no-receivers")
        return self._receiver


class EmbeddedEngine(RolloutEngine):
    """Continuous batching in plain torch, in the caller's process.

    Args:
        options: ``tensor_parallel_size`` must be 1; ``eos_token_ids`` defaults to those of ``config.json``.
        decode: decodes tokens to text; None = requests with stop strings are refused.
        images: returns the features of images for the engine's weights by name; None = requests with images are
            refused.

    Raises:
        ConfigError: the engine does not support an option.
        ModelError: the engine does not support the model (:func:`check_model`), or see :class:`RolloutEngine`.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions | None = None,
        decode: Decode | None = None,
        images: Callable[[Callable[[], Mapping[str, Tensor]]], ImageFeatures] | None = None,
    ) -> None:
        options = options or EngineOptions()
        if options.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={options.tensor_parallel_size}: the embedded engine runs on one device; "
                "use 1 and as many replicas as there are devices",
                code="engine.one-device",
            )
        check_model(config)
        super().__init__(config, options)
        self._decode = decode
        self._device = torch.device(options.device)
        self._prompt_tokens = PROMPT_TOKENS[self._device.type]
        eos = options.eos_token_ids
        self._eos = frozenset(eos_in(config.settings) if eos is None else eos)
        check_token_ids("eos_token_ids", self._eos, config.vocab_size)
        weight_map = WeightMap(config)
        params = weight_map.rollout_params(1, 0)
        rounds = None if options.quantization is None else weight_map.is_linear
        self._weights = WeightStore(params, getattr(torch, options.dtype), self._device, weight_map.is_float32, rounds)
        self._weights.allocate()
        self._images = None if images is None else images(lambda: self._weights.tensors)
        self._receiver = EmbeddedReceiver(self._weights, self._device, self._check_idle, self._weights_changed)
        self._cache: KVCache | None = None
        self._batcher: ContinuousBatcher | None = None
        self._running: set[str] = set()
        self._interrupted = threading.Event()
        self._dropped: list[FinishedRequest] = []
        self._rotated = 0

    @property
    def weight_version(self) -> int:
        return self._weights.version

    def submit(self, requests: Sequence[Request]) -> None:
        names = self._names_with(requests, self._running)
        if "kv_cache" in self.asleep:
            raise RolloutError("the engine's 'kv_cache' is asleep: wake it before generate", code="engine.asleep")
        for request in requests:
            self._check_request(request)
        self._add_images(requests)
        if requests:
            self._make_room(requests).add(requests)
        self._running = names

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        try:
            ended, self._dropped = [self._completion(ended, "abort") for ended in self._dropped], []
            with torch.inference_mode():
                while self._batcher and not (ended or self._interrupted.is_set()) and time.monotonic() < deadline:
                    ended = [self._completion(e, "stop" if e.stopped else "length") for e in self._batcher.advance()]
        except Exception as error:
            lost = len(self._running)
            # A step that failed halfway leaves slots and lanes in disorder, and NaN in the cache corrupts later ones.
            self._cache, self._batcher, self._running, self._dropped = None, None, set(), []
            if isinstance(error, MegarlError):
                raise RolloutError(f"{error.text}; {lost} running requests are lost", code=error.code) from error
            reason = f"{type(error).__name__}: {error}"
            raise RolloutError(f"{reason}; {lost} running requests are lost", code="engine.step-failed") from error
        finally:
            self._interrupted.clear()
        return ended

    def interrupt_poll(self) -> None:
        """Return from :meth:`poll` after the current decoding step."""
        self._interrupted.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        if self._batcher:
            with torch.inference_mode():
                self._dropped += self._batcher.drop(set(request_ids))

    def load_hf(self, path: str, version: int = 0) -> None:
        reader, weight_map = HFReader(path), WeightMap(self.config)
        if WeightMap(reader.config.with_trained_tower(self.config.trains_tower)).hf_shapes() != weight_map.hf_shapes():
            raise ModelError(f"model folder {path} holds another model than this engine", code="engine.other-model")
        self._check_idle()
        self._weights.begin(version)
        local = weight_map.rollout_params(1, 0)
        params = load_local(reader, local, self._weights.dtype, float32=weight_map.is_float32)
        with torch.no_grad():
            self._weights.write((name, (0,) * tensor.dim(), tensor) for name, tensor in params)
        self._weights.end(version)
        self._weights_changed()

    @property
    def receiver(self) -> EmbeddedReceiver:
        return self._receiver

    def sleep(self, tags: Iterable[Tag] = TAGS) -> None:
        tags = check_tags(tags)
        check_none_running(self._running, "put the engine to sleep")
        self.asleep |= tags
        self._batcher = None
        if "kv_cache" in tags:
            self._cache = None
        if "weights" in tags:
            self._weights.free()
            if self._images is not None:
                self._images.end_phase(offloads=True)
        if torch.device(self.options.device).type == "cuda":
            torch.cuda.empty_cache()  # torch keeps freed blocks, which the trainer on the same GPU could not use

    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Allocate the weights; the next :meth:`submit` allocates the KV cache."""
        tags = check_tags(tags)
        if self._closed:
            raise RolloutError("the engine was shut down", code="engine.shut-down")
        self.asleep -= tags
        if "weights" in tags:
            self._weights.allocate()

    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        (parts,) = rectangles
        return [[self._weights.rectangle_checksum(part) for part in parts]]

    def checksum(self, rank: int = 0) -> dict[str, str]:
        if rank:
            raise WeightSyncError(
                f"tensor-parallel rank {rank}, expected 0: the embedded engine has one rank", code="engine.rank-range"
            )
        return {name: tensor_checksum(tensor) for name, tensor in self._weights.tensors.items()}

    def fingerprint(self) -> tuple[str, ...]:
        return (hashlib.blake2b(repr(self.checksum()).encode(), digest_size=16).hexdigest(),)

    def shutdown(self) -> None:
        self.sleep()
        self._closed = True

    def _check_idle(self) -> None:
        check_none_running(self._running, "update weights", WeightSyncError)

    def _weights_changed(self) -> None:
        if self._images is not None:
            self._images.clear()

    def _add_images(self, requests: Sequence[Request]) -> None:
        """Compute features of new images; RequestRefused if that is impossible for one of them."""
        if self._images is not None:
            try:
                self._images.add(image for request in requests for image in request.images)
            except DataError as error:
                raise RequestRefused(error.text, code=error.code) from error

    def _make_room(self, requests: Sequence[Request]) -> ContinuousBatcher:
        """Return the running batch, or a new one, with a cache that holds these requests too."""
        # The last token of a response is never stored.
        longest = max(len(r.prompt_ids) + r.params.max_new_tokens - 1 for r in requests)
        length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        slots = min(self.options.max_num_seqs, len(self._running) + len(requests))
        cache = self._cache
        if cache is None:
            self._cache = cache = KVCache(self.config, slots, length, self._weights.dtype, self._device)
        elif slots > cache.slots or length > cache.length:
            # Double the slots, so that requests added one by one do not grow the cache every time.
            slots = min(self.options.max_num_seqs, max(slots, 2 * cache.slots)) if slots > cache.slots else cache.slots
            cache.grow(slots, max(length, cache.length))
        if self._batcher is None or cache.length > self._rotated:
            decoder = TransformerDecoder(self.config, self._weights.tensors, cache.length)
            self._rotated = cache.length
            if self._batcher is None:
                self._batcher = self._new_batcher(decoder, cache)
            self._batcher.decoder = decoder
        return self._batcher

    def _new_batcher(self, decoder: TransformerDecoder, cache: KVCache) -> ContinuousBatcher:
        lanes = self.options.max_num_seqs
        rules = StopRules(lanes, self._eos, self.config.vocab_size, self._decode, self._device)
        experts = self.config.experts if self.options.return_routes else None
        routes = None if experts is None else RouteTable(experts, lanes, self._device)
        sampler = Sampler(lanes, self._device)
        return ContinuousBatcher(decoder, cache, sampler, rules, lanes, self._prompt_tokens, routes, self._images)

    def _completion(self, ended: FinishedRequest, reason: FinishReason) -> Completion:
        request, tokens, log_probs, _, routes, support = ended
        if not all(map(math.isfinite, log_probs)):
            raise RolloutError(
                f"weight version {self.weight_version} gives log-probs that are not finite, in request "
                f"'{request.request_id}'",
                code="rollout.logprobs-not-finite",
            )
        self._running.discard(request.request_id)
        rest = Completion(
            request.request_id, tokens, log_probs, reason, self.weight_version, routes=routes, support=support
        )
        return rest.after(request.prior)

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        if request.images and self._images is None:
            raise RequestRefused(
                f"request '{request.request_id}': this engine was built without a vision tower, and takes no images",
                code="rollout.no-vision-tower",
            )
        if request.params.stop:
            if self._decode is None:
                raise RequestRefused(
                    f"request '{request.request_id}': stop strings need an engine with a tokenizer",
                    code="rollout.stop-without-tokenizer",
                )
            self._decode([])  # loads the tokenizer: a broken one fails here, not in a step of other requests


def check_model(config: ModelConfig) -> None:
    """Check that the forward pass computes with every parameter; ModelError if a custom family declares others."""
    weight_map = WeightMap(config)
    names = {name for layer in range(config.num_layers) for name in weight_map.layer_rollout_names(layer)}
    unknown = sorted(names - KNOWN_PARAMETERS)
    if unknown:
        raise ModelError(
            f"rollout engine 'embedded' does not run {config.architecture}: it does not compute with the parameter "
            f"'{unknown[0]}' of its layers; set rollout.name=sglang",
            code="engine.unsupported-model",
        )


@register_engine(
    "embedded",
    check=lambda config, options: check_model(config),
    returns_routes=True,
    returns_support=True,
    quantizes=True,
)
def create_embedded(model_path: str, options: EngineOptions) -> EmbeddedEngine:
    """Create the embedded engine for the model in a folder; see :func:`megarl.rollout.create_engine`."""
    options = replace(options, eos_token_ids=options.end_tokens(model_path))
    config = read_model_config(model_path).with_trained_tower(options.trained_tower)
    images = None if config.vision is None else partial(_image_features, config, model_path, options)
    has_tokenizer = Path(model_path, "tokenizer_config.json").is_file()
    return EmbeddedEngine(config, options, load_decode(model_path) if has_tokenizer else None, images)


def _image_features(
    config: ModelConfig, model_path: str, options: EngineOptions, weights: Callable[[], Mapping[str, Tensor]]
) -> ImageFeatures:
    """Create the features of images, from the folder's frozen tower or the engine's own weights."""
    assert config.vision is not None
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    tower = StoredTower(config.vision, weights, device, dtype) if config.vision.trained else None
    return ImageFeatures(config, model_path, device, dtype, dict(options.image_options), tower)
