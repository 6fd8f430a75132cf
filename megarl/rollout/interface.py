"""What every rollout engine promises: token ids in, token ids and log-probs out, weights replaced in place.

Life of an engine's weights: an engine starts stale (it has none) and serves nothing until they are whole. They come
from a model folder (:meth:`RolloutEngine.load_hf`) or in a session, ``begin_update(version)``, any number of
``update_weights(slabs, rank)``, ``end_update(version)``: the engine is stale from the first call on, and serves again
only if the last finds every element of every parameter written exactly once. A session that fails is begun anew. An
engine of several tensor-parallel ranks is given the shard of each, as ``WeightMap.rollout_params(tp, rank)`` has it.

Life of a request: :meth:`RolloutEngine.submit` hands it in, :meth:`RolloutEngine.poll` gives its completion, once, when
it has ended; others may come and go meanwhile. :meth:`RolloutEngine.generate` is both for a whole list.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from megarl.errors import MegarlError, WeightSyncError, WorkerLost

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
Tag: TypeAlias = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

Slab: TypeAlias = "tuple[str, Sequence[int], Tensor] | tuple[str, Tensor]"
"""Parameter name, offset of the rectangle inside the parameter (absent: the whole parameter), its values."""

POLL_S = 3600.0
"""Seconds that :meth:`RolloutEngine.generate` waits for a completion before it asks again."""

NO_VERSION = -1
"""``weight_version`` of a stale engine."""


class RolloutError(MegarlError):
    """A request that the engine cannot serve, or a generation that went wrong."""


class EngineLost(RolloutError, WorkerLost):
    """Processes of the engine's own have ended or do not answer: it serves nothing any more."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_new_tokens: most tokens to generate, the stop token included.
        temperature: divides the logits; 0 takes the most likely token (ties: the lowest id).
        top_p: sample from the fewest most likely tokens that hold this mass, after ``top_k``; 1 keeps all.
        top_k: sample from this many most likely tokens; -1 keeps all.
        stop_token_ids: generation ends after any of these, besides the engine's end-of-sequence tokens.
        stop: generation ends after the token by which the decoded answer contains any of these strings; that token
            stays, whatever else it decodes to.
        ignore_eos: nothing stops generation but ``max_new_tokens``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RolloutError(f"max_new_tokens={self.max_new_tokens}, expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise RolloutError(f"temperature={self.temperature}, expected a number >= 0 (0 = greedy)")
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p={self.top_p}, expected a number in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise RolloutError(f"top_k={self.top_k}, expected -1 (all) or at least 1")


@dataclass(frozen=True)
class Request:
    """One sequence to generate; the n samples of a prompt are n requests with different seeds.

    Attributes:
        request_id: the caller's name for it, given back in the completion; no two requests under way share it.
        prompt_ids: at least one token id, without padding.
        params: how to sample.
        seed: source of the request's random numbers. The same prompt, parameters, seed and weights give the same
            tokens, whatever else is in the batch (up to floating-point rounding of the logits).
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Completion:
    """What came of one request.

    Attributes:
        request_id: as in the request.
        token_ids: generated tokens, the stop token included.
        log_probs: one per token, natural logarithm, under the distribution at the request's temperature over the
            whole vocabulary, before ``top_k`` and ``top_p``; a greedy request's are at temperature 1.
        finish_reason: ``stop`` at a stop token or string, ``length`` at ``max_new_tokens``, ``abort`` if the engine was
            told to give up: then the tokens are those it had by then, perhaps none.
        weight_version: version of the weights that generated it, the oldest if there were several.
        weight_versions: one per token if they differ; empty if all are ``weight_version``.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    weight_versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineHealth:
    """State of an engine; ``ready`` says whether it would serve a request now.

    Attributes:
        ready: not stale, nothing asleep, not shut down.
        stale: its weights are absent or incomplete.
        weight_version: version of its weights, -1 while it is stale.
        asleep: tags that :meth:`RolloutEngine.sleep` put away.
    """

    ready: bool
    stale: bool
    weight_version: int
    asleep: tuple[Tag, ...] = ()


@dataclass(frozen=True)
class EngineOptions:
    """What every engine is built with, besides the model.

    Attributes:
        dtype: number format of weights and activations, ``float32`` or ``bfloat16``.
        device: ``cpu``, ``cuda`` or ``cuda:<n>``.
        tensor_parallel_size: devices that hold one copy of the weights.
        max_num_seqs: sequences generated at a time; more requests wait in a queue.
        max_model_len: most tokens of prompt and answer together; None = the model's ``max_position_embeddings``.
        eos_token_ids: tokens that end every sequence; None = those of the model folder.
    """

    dtype: str = "float32"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] | None = None

    def device_of(self, rank: int) -> str:
        """Where a tensor-parallel rank computes: ranks have consecutive devices, from ``device`` on."""
        kind, _, first = self.device.partition(":")
        return kind if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


class RolloutEngine(abc.ABC):
    """A generator of token sequences whose weights are replaced between batches. Not thread-safe."""

    @property
    @abc.abstractmethod
    def weight_version(self) -> int:
        """Version of the weights that :meth:`generate` uses; -1 while the engine is stale."""

    @property
    @abc.abstractmethod
    def stale(self) -> bool:
        """Whether the weights are absent or incomplete, so that nothing is served."""

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests in; returns without waiting for them. All are taken, or none.

        Raises:
            WeightSyncError: the engine is stale.
            RolloutError: a request cannot be served, its id is under way, or something is asleep.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions of requests that have ended and were not given before, in any order.

        An engine without processes of its own computes here, and only here.

        Args:
            timeout_s: wait for the first completion about so long (an engine may finish a step that it began); 0 takes
                what is there. Nothing under way: returns at once.

        Raises:
            RolloutError: the model gave non-finite numbers; the requests under way are lost.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Gives up requests: :meth:`poll` brings what they have, ``finish_reason="abort"``. Unknown ids are ignored."""

    def _names_with(self, requests: Sequence[Request], under_way: Iterable[str]) -> set[str]:
        """Names of the requests under way and of new ones, for :meth:`submit`.

        Raises:
            WeightSyncError: the engine is stale.
            RolloutError: two have one name.
        """
        if self.stale:
            raise WeightSyncError(
                "the engine's weights are absent or incomplete; it serves nothing until they are whole"
            )
        names = set(under_way)
        for request in requests:
            if request.request_id in names:
                raise RolloutError(f"request '{request.request_id}' is under way already: ids must differ")
            names.add(request.request_id)
        return names

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generates every request to its end. Nothing else may be under way.

        Returns:
            Completions in the order of the requests.

        Raises:
            WeightSyncError, RolloutError: as :meth:`submit` and :meth:`poll`.
        """
        self.submit(requests)
        done: dict[str, Completion] = {}
        while len(done) < len(requests):
            done.update((completion.request_id, completion) for completion in self.poll(POLL_S))
        return [done[request.request_id] for request in requests]

    @abc.abstractmethod
    def load_hf(self, path: str, version: int = 0) -> None:
        """Replaces all weights by those of a Hugging Face folder.

        Raises:
            ModelError: the folder is incomplete or of another model.
        """

    @abc.abstractmethod
    def begin_update(self, version: int) -> None:
        """Opens a session that replaces all weights; the engine is stale until it ends. Drops an unfinished session.

        Raises:
            WeightSyncError: ``version`` is negative, the weights are asleep, or requests are under way.
        """

    @abc.abstractmethod
    def update_weights(self, slabs: Iterable[Slab], rank: int = 0) -> None:
        """Writes one bucket into the shard of a tensor-parallel rank, in place.

        Each slab is checked before it is written, then written before the next is drawn from the iterable. The
        tensors are not kept: their memory may be reused as soon as the call returns.

        Raises:
            WeightSyncError: no session is open, there is no such rank, or a slab has an unknown name, does not fit its
                parameter, or overlaps what the session already wrote. The session is then lost.
        """

    @abc.abstractmethod
    def end_update(self, version: int) -> None:
        """Closes the session.

        Raises:
            WeightSyncError: some element was not written, or ``version`` is not the session's; the engine stays stale.
        """

    @abc.abstractmethod
    def sleep(self, tags: Iterable[Tag] = TAGS) -> None:
        """Frees what the tags name: ``kv_cache``; ``weights`` (the engine is stale until a whole new session)."""

    @abc.abstractmethod
    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Makes what :meth:`sleep` freed usable again; weights come back empty."""

    @abc.abstractmethod
    def health(self) -> EngineHealth:
        """State of the engine; never raises."""

    @abc.abstractmethod
    def weights(self, rank: int = 0) -> Mapping[str, Tensor]:
        """A rank's parameters as held, by name: to be read, for verification; valid until weights change.

        During a session they are what was written by then.
        """

    @abc.abstractmethod
    def checksum(self, rank: int = 0) -> dict[str, str]:
        """Digest of each of a rank's parameters as held, by :func:`megarl.models.checksum.tensor_checksum`."""

    def fingerprint(self) -> tuple[str, ...]:
        """By rank, a digest of all that it holds, by means of the engine's own; equal as long as nothing changes.

        Empty: the engine has no such means.
        """
        return ()

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Frees everything; the engine serves nothing afterwards. May be called twice."""
