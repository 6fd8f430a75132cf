"""SGLang behind the engine contract."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.base.packages import require_sglang
from megarl.models import ModelConfig, WeightMap, read_model_config
from megarl.models.hf_checkpoint import HFReader
from megarl.models.verification import ParamRectangle
from megarl.rollout.interface import (
    TAGS,
    Completion,
    EngineLost,
    EngineOptions,
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
from megarl.rollout.sglang.backend import (
    CLOSE_S,
    WATCH_S,
    CallWatch,
    ImageURLs,
    RequestLoop,
    ResponseContext,
    SchedulerLiveness,
    SGLangBackend,
    StoppedProcesses,
    parse_completion,
    placeholders_in,
    request_payload,
)
from megarl.rollout.sglang.model_checks import check_model_runs
from megarl.rollout.sglang.options import KEY, MODES, SGLangOptions, decodes
from megarl.rollout.sglang.weights import WeightSession
from megarl.sharding.receiver import check_version
from megarl.sharding.sglang_loader import VOCAB_MULTIPLE, SGLangShard

ABORT_AGAIN_S = 0.05
"""Seconds between attempts to abort a request, which SGLang may not have received yet."""
IDLE_S = 30.0
"""Seconds for SGLang to become idle after its last response."""
_FIRST_NUMBER = itertools.count()


class RunningRequest:
    """A request in SGLang; ``aborted`` is set by :meth:`SGLangEngine.abort`."""

    def __init__(self, request: Request, rid: str) -> None:
        self.request, self.rid, self.aborted = request, rid, False


class SGLangEngine(RolloutEngine):
    """SGLang in this process or behind a server, started without weights.

    Seeds: in SGLang's deterministic mode (``deterministic``; always on a CPU) the same prompt, parameters, seed and
    weights give the same tokens in any batch, up to rounding of the logits. Without it SGLang has no seeds per request:
    samples are independent and not reproducible.

    Args:
        folder: model folder; its config is read, and with ``stop_strings`` its tokenizer.

    Raises:
        ConfigError: SGLang or this engine does not support an option.
        ModelError: SGLang does not support the model.
        RolloutError: SGLang does not start.
    """

    options: SGLangOptions

    def __init__(self, config: ModelConfig, folder: str, options: SGLangOptions) -> None:
        if options.mode not in MODES:
            raise ConfigError(
                f"{KEY}.mode={options.mode!r}, expected one of: {', '.join(MODES)}", code="engine.option-choice"
            )
        check_model_runs(config, options)
        super().__init__(config, options)
        _check_divides(config, options.tensor_parallel_size)
        self._eos = frozenset(options.end_tokens(folder))
        check_token_ids("eos_token_ids", self._eos, config.vocab_size)
        self._decodes = decodes(folder, options)
        self._urls = ImageURLs()
        self._running: dict[str, RunningRequest] = {}
        # None interrupts a poll.
        self._ended: queue.SimpleQueue[tuple[RunningRequest, Completion | RolloutError] | None] = queue.SimpleQueue()
        self._names = (f"{os.getpid()}-{next(_FIRST_NUMBER)}-{n:012d}" for n in itertools.count())
        self._loop = RequestLoop()
        try:
            self._backend = _start(folder, self._max_length, options, self._loop)
        except BaseException:
            self._loop.close()
            raise
        self._liveness = SchedulerLiveness(self._backend, self._loop, options.health_timeout_s)
        try:
            self._session = WeightSession(config, options, self._backend, self._loop, self._watch, self._check_idle)
        except BaseException:
            self._end_backend()
            raise

    @property
    def weight_version(self) -> int:
        return self._session.version

    @property
    def url(self) -> str | None:
        """URL of its server, which other engines can use too; None in process."""
        return getattr(self._backend, "url", None)

    def submit(self, requests: Sequence[Request]) -> None:
        self._names_with(requests, self._running)
        if self.asleep:
            raise RolloutError(
                f"the engine's '{min(self.asleep)}' is asleep: wake it before submitting requests",
                code="engine.asleep",
            )
        self._check_alive()
        for request in requests:
            self._check_request(request)
        if not self._running:
            self._liveness.heard()
        for request in requests:
            entry = RunningRequest(request, next(self._names))
            self._running[request.request_id] = entry
            self._loop.start(self._serve(entry))

    def poll(self, timeout_s: float) -> list[Completion]:
        completions: list[Completion] = []
        deadline = time.monotonic() + timeout_s
        while self._running:
            remaining = 0.0 if completions else max(0.0, deadline - time.monotonic())
            try:
                item = self._ended.get(remaining > 0, min(remaining, WATCH_S))
            except queue.Empty:
                if completions:
                    break
                self._check_alive()  # also before the end of a short poll, since a server polls again and again
                if time.monotonic() >= deadline:
                    break
                continue
            if item is None:
                deadline = 0.0
                continue
            entry, result = item
            if self._running.get(entry.request.request_id) is not entry:
                continue
            del self._running[entry.request.request_id]
            self._liveness.heard()
            if isinstance(result, RequestRefused):
                name = entry.request.request_id
                result = Completion(name, [], [], "abort", self.weight_version, refusal=result)
            if isinstance(result, RolloutError):
                self._drop_requests()
                raise result
            completions.append(result)
        return completions

    def can_continue(self, request: Request) -> bool:
        """SGLang sees the tokens of this part only for stop strings and penalties, and looks for images in others."""
        if request.images and placeholders_in(request.prior_ids, self.config.vision):
            return False
        return not request.params.stop and request.params.repetition_penalty == 1

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            entry = self._running.get(name)
            if entry is not None and not entry.aborted:
                entry.aborted = True
                self._loop.start(self._abort_repeatedly(entry))

    def interrupt_poll(self) -> None:
        self._ended.put(None)

    def load_hf(self, path: str, version: int = 0) -> None:
        reader, shapes = HFReader(path), WeightMap(self.config).hf_shapes()
        if WeightMap(reader.config.with_trained_tower(self.config.trains_tower)).hf_shapes() != shapes:
            raise ModelError(f"model folder {path} holds another model than this engine", code="engine.other-model")
        # SGLang ignores tensors that the folder lacks.
        absent = [name for name in shapes if name not in reader]
        if absent:
            raise ModelError(
                f"model folder {path} lacks {len(absent)} of {len(shapes)} tensors, first '{absent[0]}'",
                code="model.missing-tensor",
            )
        check_version(version)
        self._check_idle()
        if not self.asleep:
            self._wait_until_idle()
        self._session.load_folder(path, version)

    @property
    def receiver(self) -> WeightSession:
        return self._session

    def sleep(self, tags: Iterable[Tag] = TAGS) -> None:
        """SGLang frees the memory only with its memory saver, which exists on GPUs."""
        chosen = check_tags(tags) - self.asleep
        check_none_running(self._running, "put the engine to sleep")
        if "weights" in chosen:
            self._session.abandon()
        if chosen and not self._closed:
            self._wait_until_idle()
            self._call_or_raise("release_memory_occupation", tags=_memory_tags(chosen))
        self.asleep |= chosen

    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        chosen = check_tags(tags) & self.asleep
        if self._closed:
            raise RolloutError("the engine was shut down", code="engine.shut-down")
        if chosen:
            self._call_or_raise("resume_memory_occupation", tags=_memory_tags(chosen))
        self.asleep -= chosen

    def checksum(self, rank: int = 0) -> dict[str, str]:
        return self._session.checksum(rank)

    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        return self._session.rectangle_checksums(rectangles)

    def fingerprint(self) -> tuple[str, ...]:
        return self._session.fingerprint()

    def shutdown(self) -> None:
        """A server that was already running continues."""
        if self._closed:
            return
        self._closed = True
        self.asleep = set(TAGS)
        self._drop_requests()
        self._session.shutdown()
        self._end_backend()

    def _end_backend(self) -> None:
        self._loop.call(self._backend.disconnect(), CLOSE_S, "closing connections")
        self._loop.close()
        self._backend.close()

    async def _serve(self, entry: RunningRequest) -> None:
        result: Completion | RolloutError
        try:
            if entry.aborted:
                raise RolloutError("aborted before it was sent", code="rollout.request-aborted")
            every_token = self.config.vocab_size if self.options.seeded else 0
            rest = entry.request.remainder
            build = partial(request_payload, rest, entry.rid, self._eos, every_token, self.config.vision, self._urls)
            # Images are encoded in another thread, since other requests wait for the loop.
            payload = await asyncio.to_thread(build) if rest.images else build()
            response = await self._backend.generate(payload)
            context = ResponseContext(self._eos, self.weight_version, self.config.experts)
            completion = parse_completion(rest, response, context)
            result = completion.after(entry.request.prior)
        except RolloutError as error:
            result = error
            if entry.aborted:
                nothing = Completion(entry.request.request_id, [], [], "abort", self.weight_version)
                result = nothing.after(entry.request.prior)
        except Exception as error:
            result = RolloutError(
                f"request '{entry.request.request_id}': {type(error).__name__}: {error}", code="sglang.request-failed"
            )
        self._ended.put((entry, result))

    async def _abort_repeatedly(self, entry: RunningRequest) -> None:
        while self._running.get(entry.request.request_id) is entry:
            await self._backend.abort(entry.rid)
            await asyncio.sleep(ABORT_AGAIN_S)

    def _drop_requests(self) -> None:
        """Forget all requests, and abort them in SGLang."""
        self.abort(list(self._running))
        self._running.clear()

    def _check_idle(self) -> None:
        """Refuse new weights while requests run or the weights are asleep."""
        if "weights" in self.asleep:
            raise WeightSyncError("the engine's weights are asleep: wake 'weights' first", code="engine.asleep")
        check_none_running(self._running, "update weights", WeightSyncError)
        self._check_alive()

    def _watch(self, action: str) -> CallWatch:
        stopped = StoppedProcesses(self._backend, self.options.health_timeout_s)
        return CallWatch(action, self.options.call_timeout_s, lambda: self._backend.failure() or stopped.failure())

    def _call_or_raise(self, method: str, **fields: Any) -> None:
        outcome = self._session.call(method, **fields)
        if not outcome.success:
            raise RolloutError(f"SGLang refused {method}: {outcome.message}", code="sglang.call-refused")

    def _wait_until_idle(self) -> None:
        """Wait until SGLang is idle, which it is a moment after its last response.

        Before that, releasing memory ends it, and it refuses new weights.
        """
        deadline = time.monotonic() + IDLE_S
        while True:
            outcome = self._session.call("flush_cache")
            if outcome.success:
                return
            if time.monotonic() >= deadline:
                raise RolloutError(f"SGLang is not idle: {outcome.message}", code="sglang.not-idle")
            time.sleep(ABORT_AGAIN_S)

    def _check_alive(self) -> None:
        if self._running:
            self._liveness.check()
        failure = self._backend.failure() or self._liveness.lost
        if failure is not None:
            self._running.clear()
            raise EngineLost(f"SGLang does not serve any more: {failure}", code="sglang.engine-lost")

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        if request.prior is not None and not self.can_continue(request):
            raise RequestRefused(
                f"request '{request.request_id}': SGLang cannot continue a response with stop strings or a repetition "
                "penalty, or one to images that has the token of an image or video; submit it without prior",
                code="sglang.no-continuation",
            )
        if request.params.stop and not self._decodes:
            raise RequestRefused(
                f"request '{request.request_id}': stop strings need a tokenizer in the model folder, and not "
                f"{KEY}.stop_strings=false",
                code="rollout.stop-without-tokenizer",
            )


@register_engine(
    "sglang",
    check=check_model_runs,
    vocab_multiple=VOCAB_MULTIPLE,
    returns_routes=True,
    returns_support=True,
    quantizes=True,
)
def create_sglang(model_path: str, options: EngineOptions) -> SGLangEngine:
    """Create the SGLang engine for the model in a folder; see :func:`megarl.rollout.create_engine`."""
    if not isinstance(options, SGLangOptions):
        options = SGLangOptions(**vars(options))
    config = read_model_config(model_path).with_trained_tower(options.trained_tower)
    return SGLangEngine(config, str(model_path), options)


def _start(folder: str, max_model_len: int, options: SGLangOptions, loop: RequestLoop) -> SGLangBackend:
    require_sglang()
    if options.url is not None:
        from megarl.rollout.sglang.http import attach

        return attach(options.url, folder, options, loop)
    if options.mode == "http":
        from megarl.rollout.sglang.http import start_server

        return start_server(folder, max_model_len, options, loop)
    from megarl.rollout.sglang.in_process import InProcessBackend

    return InProcessBackend(folder, max_model_len, options)


def _check_divides(config: ModelConfig, tp: int) -> None:
    try:
        SGLangShard(config, tp, 0).params  # noqa: B018 -- computed at the first access
    except ValueError as error:
        raise ConfigError(f"rollout.tensor_model_parallel_size={tp}: {error}", code="layout.engine-ranks") from None


def _memory_tags(tags: set[Tag]) -> list[str]:
    """SGLang's names of memory; its CUDA graphs sleep and wake with the KV cache."""
    return sorted([*tags, *(["cuda_graph"] if "kv_cache" in tags else [])])
