"""The contract of rollout engines: token ids in, token ids and log-probs out, weights replaced in place.

Life of the weights: a new engine is stale. It has no weights and refuses requests. Weights come from a model folder
(:meth:`RolloutEngine.load_hf`) or from a weight update: the commands of :attr:`RolloutEngine.receiver`, in the order of
:class:`megarl.sharding.receiver.ReplicaReceiver`. Each rank of the engine reads its messages of a bucket itself; this
process passes on commands only. The engine is stale from ``begin`` on. It serves again if ``end`` finds every element
of every parameter written exactly once.
After a failure the update starts again. A rank holds the parameters of ``WeightMap.rollout_params``.

Life of a request: :meth:`RolloutEngine.submit` adds it, and :meth:`RolloutEngine.poll` returns its completion once,
when it has ended. Requests may be added at any time. An interrupted request may continue with other weights, or in
another engine: it is submitted again with its completion as :attr:`Request.prior` (partial rollout).
:meth:`RolloutEngine.generate` submits and polls for a list, and :class:`megarl.rollout.serving.EngineServer` does so
continuously in a thread.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from megarl.base.errors import ConfigError, MegarlError, ModelError, WeightSyncError, WorkerLost
from megarl.base.image_tokens import Image, image_spans
from megarl.config.schema.rollout import TrainingRolloutConfig, ValSamplingConfig
from megarl.data.tokenizers import end_token_of
from megarl.models import read_model_config
from megarl.models.end_tokens import read_end_tokens
from megarl.sharding.plan import NO_VERSION as NO_VERSION

if TYPE_CHECKING:  # the planner, which must start in seconds, imports this package
    from megarl.models import ModelConfig
    from megarl.models.verification import ParamRectangle
    from megarl.sharding.receiver import ReplicaReceiver

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
Tag: TypeAlias = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
DTYPES = ("float32", "bfloat16")

POLL_S = 3600.0
"""Seconds that one poll of :meth:`RolloutEngine.generate` waits for a completion."""

MAX_INT32 = 2**31 - 1
"""Largest ``top_k``: engines store it in 32 bits."""
MIN_INT64 = -(2**63)
"""Smallest id of an image token."""


class RolloutError(MegarlError):
    """A request that the engine cannot serve, or a failed generation."""


class RequestRefused(RolloutError):
    """One request that no engine can serve; other requests go on."""


class EngineLost(RolloutError, WorkerLost):
    """Processes of the engine have ended or do not answer; the engine serves nothing any more."""


def is_integer_type(kind: type) -> bool:
    """Return whether values of a type are integers."""
    return issubclass(kind, int | np.integer) and kind is not bool


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_new_tokens: maximum number of generated tokens, including the stop token.
        temperature: divides the logits; 0 = greedy (ties: the lowest id).
        top_p: sample from the smallest set of tokens with this total probability, after ``top_k``; 1 = all.
        top_k: sample from the ``top_k`` most likely tokens; -1 = all.
        min_p: sample from the tokens with at least this share of the largest probability; 0 = all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the response so far,
            before the temperature; 1 = none.
        stop_token_ids: generation stops after any of these, in addition to the engine's end-of-sequence tokens.
        stop: generation stops after the token that completes any of these strings in the decoded response. The whole
            token is kept.
        ignore_eos: no token stops generation, neither the engine's end-of-sequence tokens nor ``stop_token_ids``; the
            strings of ``stop`` and ``max_new_tokens`` do.
        support: sample from at most this many tokens, the most likely ones, and return them as
            :attr:`Completion.support`; 0 = return none.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    support: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "support"):
            if not is_integer_type(type(getattr(self, name))):
                raise RequestRefused(
                    f"{name}={getattr(self, name)!r}, expected an integer", code="rollout.sampling-type"
                )
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "a number >= 0 (0 = greedy)"),
            "top_p": (0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (self.top_k == -1 or 1 <= self.top_k <= MAX_INT32, f"-1 (all) or 1 to {MAX_INT32}"),
            "min_p": (0 <= self.min_p <= 1, "a number in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty <= 2, "a number in (0, 2]"),
            "support": (0 <= self.support <= MAX_INT32, f"0 (none) to {MAX_INT32}"),
        }
        for name, (holds, expected) in limits.items():
            if not holds:
                raise RequestRefused(
                    f"{name}={getattr(self, name)}, expected {expected}", code="rollout.sampling-range"
                )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestRefused(
                f"stop={self.stop!r:.100}, expected a tuple of non-empty texts", code="rollout.sampling-type"
            )

    @classmethod
    def of(cls, keys: TrainingRolloutConfig | ValSamplingConfig, max_new_tokens: int) -> SamplingParams:
        """Read the parameters of the section ``rollout``, or of its ``val_kwargs``."""
        return cls(
            max_new_tokens=max_new_tokens,
            temperature=keys.temperature,
            top_p=keys.top_p,
            top_k=keys.top_k,
            min_p=keys.min_p,
            repetition_penalty=keys.repetition_penalty,
            support=keys.support_tokens if isinstance(keys, TrainingRolloutConfig) else 0,
        )

    @property
    def largest_support(self) -> int:
        """Most tokens to sample from, by ``top_k`` and ``support``; :data:`MAX_INT32` = all."""
        return min(count for count in (self.top_k, self.support, MAX_INT32) if count > 0)


@dataclass(frozen=True)
class Request:
    """One sequence to generate; the n samples of a prompt are n requests with different seeds.

    Attributes:
        request_id: the caller's id, repeated in the completion; unique among running requests.
        prompt_ids: at least one token id, without padding.
        seed: seed of the request's random numbers. The same prompt, parameters, seed and weights give the same tokens
            in any batch, up to floating-point rounding of the logits.
        prior: completion of the same request before an interruption; None = a new request. Generation continues after
            its tokens: limits, stop rules, penalties and random numbers are those of the whole response, which is the
            new completion.
        routes_from: return the experts of the tokens from this position of the prompt on (routing replay); None = none.
        images: the images whose tokens the prompt has (:mod:`megarl.base.image_tokens`), in any order.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    prior: Completion | None = None
    routes_from: int | None = None
    images: Sequence[Image] = ()

    @property
    def prior_ids(self) -> Sequence[int]:
        """Tokens of the response that exist already."""
        return () if self.prior is None else self.prior.token_ids

    @property
    def remaining_routes_from(self) -> int | None:
        """First position whose experts the prior does not have; None if no experts are requested."""
        if self.routes_from is None or self.prior is None or self.prior.routes is None:
            return self.routes_from
        return self.routes_from + len(self.prior.routes)

    @property
    def remainder(self) -> Request:
        """The request for the rest of the response, after a prompt with its prior tokens."""
        left = self.params.max_new_tokens - len(self.prior_ids)
        prompt, params = [*self.prompt_ids, *self.prior_ids], replace(self.params, max_new_tokens=left)
        routes_from = self.remaining_routes_from
        return replace(self, prompt_ids=prompt, params=params, prior=None, routes_from=routes_from)


@dataclass(frozen=True)
class Completion:
    """Result of one request.

    Attributes:
        token_ids: generated tokens, including the stop token.
        log_probs: natural log-prob of each token at the request's temperature and repetition penalty over the whole
            vocabulary, before ``top_k``, ``top_p`` and ``min_p``; at temperature 1 for greedy requests. With
            ``support`` it is that of the renormalized distribution over the support.
        finish_reason: ``stop`` at a stop token or string, ``length`` at ``max_new_tokens``, ``abort`` after
            :meth:`RolloutEngine.abort`, with the tokens generated so far, possibly none.
        weight_version: version of the weights that generated it; the oldest if there were several.
        weight_versions: version of each token if they differ; empty if all equal ``weight_version``.
        routes: int16 ``[tokens, expert layers, experts per token]``, the experts of every token from
            :attr:`Request.routes_from` on except the last, whose output the engine does not compute. Tokens of an
            interrupted response keep their first experts. None if the request has no ``routes_from``, or the engine
            has computed nothing.
        support: int32 ``[tokens, SamplingParams.support]``, the tokens that each token was sampled from; -1 = none. Of
            a greedy request only the token itself. None if the request has no ``support``.
        refusal: why the engine cannot serve the request, which then has no tokens; None = it serves it.
        discarded_tokens: generated tokens of the request that an engine could not continue and threw away.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    weight_versions: tuple[int, ...] = ()
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    support: np.ndarray | None = field(default=None, compare=False, repr=False)
    refusal: RequestRefused | None = None
    discarded_tokens: int = field(default=0, compare=False)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight version of each token."""
        return self.weight_versions or (self.weight_version,) * len(self.token_ids)

    def after(self, prior: Completion | None) -> Completion:
        """Return the completion of the whole response; this one is of the part after ``prior``."""
        if prior is None or not prior.token_ids:
            return self
        versions = (*prior.versions, *self.versions)
        routes = [part for part in (prior.routes, self.routes) if part is not None]
        supports = [part for part in (prior.support, self.support) if part is not None]
        return replace(
            self,
            token_ids=[*prior.token_ids, *self.token_ids],
            log_probs=[*prior.log_probs, *self.log_probs],
            weight_version=min(versions),
            weight_versions=versions if len(set(versions)) > 1 else (),
            routes=np.concatenate(routes) if routes else None,
            support=np.concatenate(supports) if supports else None,
        )


def no_support(tokens: int, width: int) -> np.ndarray:
    """Return the support of tokens that no engine sampled, int32 ``[tokens, width]``."""
    return np.full((tokens, width), -1, np.int32)


@dataclass(frozen=True)
class EngineOptions:
    """Options of every engine.

    Attributes:
        dtype: dtype of weights and activations, ``float32`` or ``bfloat16``.
        device: ``cpu``, ``cuda`` or ``cuda:<n>``.
        max_num_seqs: maximum number of running sequences; further requests wait in a queue.
        max_model_len: maximum tokens of prompt and response; None = the model's ``max_position_embeddings``.
        eos_token_ids: tokens that end every sequence; None = those of the model folder and its tokenizer.
        return_routes: requests may have :attr:`Request.routes_from`; the engine then records experts.
        return_support: requests may have :attr:`SamplingParams.support`.
        image_options: settings of the image processor, see :class:`megarl.base.image_files.ImageProcessor`.
        trained_tower: weight updates include the vision tower, if the model has one.
        quantization: ``fp8`` = the engine holds linear layers in blockwise FP8; None = all weights are in ``dtype``.
    """

    dtype: str = "float32"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    return_routes: bool = False
    return_support: bool = False
    quantization: str | None = None
    image_options: Mapping[str, Any] = field(default_factory=dict)
    trained_tower: bool = False

    def end_tokens(self, folder: str) -> tuple[int, ...]:
        """Return the tokens that end every sequence of the model in a folder; ModelError for a malformed file."""
        if self.eos_token_ids is not None:
            return self.eos_token_ids
        token = end_token_of(folder)
        # transformers may give a tokenizer without one a default that the model lacks
        has_token = token is not None and token < read_model_config(folder).vocab_size
        return read_end_tokens(folder, token if has_token else None).ids

    def device_of(self, rank: int) -> str:
        """Return the device of a tensor-parallel rank: consecutive devices, starting with ``device``."""
        kind, _, first = self.device.partition(":")
        return kind if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


class RolloutEngine(abc.ABC):
    """A generator of token sequences whose weights are replaced between batches. Not thread-safe.

    Attributes:
        asleep: tags whose memory is free.

    Raises:
        ConfigError: an option is out of range.
        ModelError: ``return_routes`` is set for a dense model, whose tokens have no experts.
    """

    def __init__(self, config: ModelConfig, options: EngineOptions) -> None:
        if options.dtype not in DTYPES:
            raise ConfigError(
                f"dtype={options.dtype!r}, expected one of: {', '.join(DTYPES)}", code="engine.option-choice"
            )
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if getattr(options, name) < 1:
                raise ConfigError(f"{name}={getattr(options, name)}, expected at least 1", code="engine.option-range")
        if options.return_routes and config.experts is None:
            raise ModelError(
                f"return_routes=True, but {config.architecture} is a dense model, whose tokens have no experts",
                code="model.no-experts",
            )
        self.config, self.options = config, options
        self.asleep: set[Tag] = set()
        self._closed = False
        self._max_length = options.max_model_len or config.max_position_embeddings

    @property
    @abc.abstractmethod
    def weight_version(self) -> int:
        """Version of the current weights; -1 while the engine is stale."""

    @property
    def stale(self) -> bool:
        """Whether the weights are absent or incomplete, so that requests are refused."""
        return self.weight_version < 0

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests without waiting for them: all, or none on an error.

        Raises:
            WeightSyncError: the engine is stale.
            RequestRefused: a request cannot be served, or its id is already running.
            RolloutError: the engine is asleep.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the completions of requests that have ended since the last call, in any order.

        An engine without processes computes in this call only. A request that turns out to be unusable is returned with
        its ``refusal``.

        Args:
            timeout_s: approximate maximum wait for the first completion (a started step is finished); 0 = do not wait.
                Without running requests the call returns at once.

        Raises:
            RolloutError: the model's outputs are not finite, or the engine failed; the running requests are lost, and
                the engine can take others.
        """

    def interrupt_poll(self) -> None:  # noqa: B027 -- without it, a poll ends at its time limit
        """Make the current :meth:`poll` return soon, or the next one if none is in progress; from any thread."""

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests: :meth:`poll` returns their tokens so far with ``finish_reason="abort"``. Unknown ids are
        ignored.
        """

    def can_continue(self, request: Request) -> bool:
        """Return whether a request may have its :attr:`Request.prior`."""
        return True

    def _names_with(self, requests: Sequence[Request], running: Iterable[str]) -> set[str]:
        """Return the ids of running and new requests; refuses a stale engine and an id that is running already."""
        if self.stale:
            raise WeightSyncError(
                "the engine's weights are absent or incomplete; it serves requests after a complete weight sync",
                code="engine.stale-weights",
            )
        names = set(running)
        for request in requests:
            if request.request_id in names:
                raise RequestRefused(
                    f"request '{request.request_id}' is running already: ids must differ",
                    code="rollout.duplicate-request",
                )
            names.add(request.request_id)
        return names

    def _check_request(self, request: Request) -> None:
        """Check length, token ids, images and routes of a request.

        Raises:
            RequestRefused: the prompt is empty, the prior leaves nothing to generate, prompt and response exceed
                ``max_model_len``, a token id is outside the vocabulary, the prompt's tokens of images do not match the
                images, or the engine records no experts.
        """
        vocab_size = self.config.vocab_size
        name, prompt, limit = f"request '{request.request_id}'", request.prompt_ids, request.params.max_new_tokens
        if not is_integer_type(type(request.seed)):
            raise RequestRefused(f"{name}: seed={request.seed!r}, expected an integer", code="rollout.seed-type")
        if not len(prompt):
            raise RequestRefused(f"{name}: the prompt is empty, expected token ids", code="rollout.empty-prompt")
        if len(prompt) + limit > self._max_length:
            raise RequestRefused(
                f"{name}: a prompt of {len(prompt)} and max_new_tokens={limit} exceed the engine's "
                f"max_model_len={self._max_length}",
                code="rollout.request-too-long",
            )
        if len(request.prior_ids) >= limit:
            raise RequestRefused(
                f"{name}: prior has {len(request.prior_ids)} tokens, expected fewer than {limit}",
                code="rollout.prior-too-long",
            )
        if request.routes_from is not None:
            if not self.options.return_routes:
                raise RequestRefused(
                    f"{name}: routes_from={request.routes_from}, but the engine has return_routes=False",
                    code="rollout.routes-off",
                )
            if not 0 <= request.routes_from <= len(prompt):
                raise RequestRefused(
                    f"{name}: routes_from={request.routes_from}, expected 0 to {len(prompt)}, the prompt's end",
                    code="rollout.routes-range",
                )
        lowest = 0 if self.config.vision is None else MIN_INT64
        check_token_ids(f"{name}: prompt_ids", prompt, vocab_size, lowest)
        _check_images(name, request)
        check_token_ids(f"{name}: prior", request.prior_ids, vocab_size)
        check_token_ids(f"{name}: stop_token_ids", request.params.stop_token_ids, vocab_size)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all requests to their end, in order. No other request may be running."""
        self.submit(requests)
        done: dict[str, Completion] = {}
        while len(done) < len(requests):
            done.update((completion.request_id, completion) for completion in self.poll(POLL_S))
        if refusals := [completion.refusal for completion in done.values() if completion.refusal]:
            raise refusals[0]
        return [done[request.request_id] for request in requests]

    @abc.abstractmethod
    def load_hf(self, path: str, version: int = 0) -> None:
        """Load all weights from a Hugging Face folder; ModelError if it is incomplete or holds another model."""

    @property
    @abc.abstractmethod
    def receiver(self) -> ReplicaReceiver:
        """The receiving side of weight updates."""

    @abc.abstractmethod
    def sleep(self, tags: Iterable[Tag] = TAGS) -> None:
        """Free the memory of these tags: ``kv_cache``, or ``weights`` (stale until a new update)."""

    @abc.abstractmethod
    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Allocate the memory that :meth:`sleep` freed; weights come back empty."""

    @abc.abstractmethod
    def checksum(self, rank: int = 0) -> dict[str, str]:
        """Return the digests of a rank's parameters, by :func:`megarl.models.verification.tensor_checksum`."""

    @abc.abstractmethod
    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        """Return checksums of each rank's parameters in parts, computed there; of quantized ones, as they arrived.

        Args:
            rectangles: parts by tensor-parallel rank.

        Raises:
            WeightSyncError: a parameter has another dtype than the rectangle.
        """

    def fingerprint(self) -> tuple[str, ...]:
        """Return a digest of each rank's weights, computed by the engine; empty if it cannot compute one."""
        return ()

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Free everything; the engine serves nothing afterwards. May be called twice."""


def check_tags(tags: Iterable[Tag]) -> set[Tag]:
    """Return sleep tags as a set, or raise RolloutError for an unknown one."""
    chosen = set(tags)
    if unknown := chosen - set(TAGS):
        raise RolloutError(
            f"sleep tag {sorted(unknown)[0]!r} is unknown; known ones: {', '.join(TAGS)}",
            code="engine.unknown-sleep-tag",
        )
    return chosen


def check_none_running(running: Sized, action: str, error: type[MegarlError] = RolloutError) -> None:
    """Raise an error that tells to do ``action`` later, if requests are running."""
    if running:
        raise error(f"{len(running)} requests are running: {action} when none is", code="engine.requests-running")


def check_token_ids(source: str, ids: Iterable[int], vocab_size: int, lowest: int = 0) -> None:
    """Check that the token ids of ``source`` are integers in the vocabulary; RequestRefused if one is not.

    Args:
        lowest: smallest id; below 0 if tokens of images are allowed.
    """
    values = list(ids)
    for kind in set(map(type, values)):
        if not is_integer_type(kind):
            raise RequestRefused(
                f"{source}: expected integers, there is a {kind.__name__}", code="rollout.token-id-type"
            )
    if values and not (min(values) >= lowest and max(values) < vocab_size):
        outside = next(token for token in values if not lowest <= token < vocab_size)
        raise RequestRefused(
            f"{source}: {outside} is no token id, the vocabulary has {vocab_size}", code="rollout.token-id-range"
        )


def _check_images(name: str, request: Request) -> None:
    """Check that the prompt has exactly the tokens of the request's images; RequestRefused if not."""
    try:
        spans = image_spans(request.prompt_ids)
    except ValueError as error:
        raise RequestRefused(f"{name}: prompt_ids: {error}", code="rollout.image-tokens") from None
    images = {image.key: (image.rows, image.columns) for image in request.images}
    for span in spans:
        if images.get(span.key) != (span.rows, span.columns):
            found = "no such image" if span.key not in images else "{} x {} tokens".format(*images[span.key])
            raise RequestRefused(
                f"{name}: the prompt has {span.rows} x {span.columns} tokens of image {span.key:x} at token "
                f"{span.start}, images has {found}",
                code="rollout.image-missing",
            )
    if unused := set(images) - {span.key for span in spans}:
        raise RequestRefused(
            f"{name}: the prompt has no tokens of image {min(unused):x}, one of {len(request.images)} in images",
            code="rollout.image-unused",
        )
