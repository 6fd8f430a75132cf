"""Interface between the engine and a running SGLang, in process or over HTTP: control calls, requests, liveness."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import psutil

from megarl.base.image_files import lossless_png
from megarl.base.image_tokens import Image, image_spans, with_placeholders
from megarl.base.processes import READ_ERRORS
from megarl.config.schema.rollout import SUPPORT_TIES
from megarl.models.model_config import Experts, Vision
from megarl.rollout.interface import Completion, EngineLost, Request, RequestRefused, RolloutError, SamplingParams
from megarl.rollout.sglang.options import ROUTES_ARGUMENT
from megarl.rollout.sglang.support import parse_support

_T = TypeVar("_T")
CLOSE_S = 10.0
"""Seconds for connections to close."""
WATCH_S = 0.5
"""Seconds between checks that SGLang still runs, during a wait."""
NAN_STOP = "NaN happened"
"""Stop string that SGLang reports for a response it ended because of NaN logits."""
LONGEST_GAP_S = 2.0
"""A longer time between two checks counts as this: nobody looked at responses meanwhile."""
URL_CACHE_BYTES = 256 << 20
"""Data URLs of images that stay in host memory, in bytes."""


class ControlCall(NamedTuple):
    """A control call: a structure of ``sglang.srt.managers.io_struct`` (None = no request), and its HTTP path."""

    request: str | None
    path: str


CONTROL_CALLS = {
    "begin_weight_update": ControlCall("BeginWeightUpdateReqInput", "/begin_weight_update"),
    "end_weight_update": ControlCall("EndWeightUpdateReqInput", "/end_weight_update"),
    "update_weights_from_tensor": ControlCall("UpdateWeightsFromTensorReqInput", "/update_weights_from_tensor"),
    "update_weights_from_disk": ControlCall("UpdateWeightFromDiskReqInput", "/update_weights_from_disk"),
    "release_memory_occupation": ControlCall("ReleaseMemoryOccupationReqInput", "/release_memory_occupation"),
    "resume_memory_occupation": ControlCall("ResumeMemoryOccupationReqInput", "/resume_memory_occupation"),
    "check_weights": ControlCall("CheckWeightsReqInput", "/weights_checker"),
    "flush_cache": ControlCall(None, "/flush_cache"),
}
"""Control calls by their methods of SGLang's tokenizer manager."""


class ControlResult(NamedTuple):
    """Result of a control call, and of each rank if it has some; SGLang returns failures and never raises."""

    success: bool
    message: str
    ranks: Sequence[Mapping[str, Any]] = ()


class SGLangBackend(Protocol):
    """A running SGLang. Its coroutines run on the engine's :class:`RequestLoop`."""

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Generate one sequence, with SGLang's request and response fields.

        Raises:
            RequestRefused: SGLang refused the request.
            RolloutError: SGLang failed.
        """

    async def abort(self, rid: str) -> None:
        """Abort a request; an unknown one is ignored."""

    async def call(self, method: str, **fields: Any) -> ControlResult:
        """Make one of :data:`CONTROL_CALLS`."""

    async def has(self, method: str) -> bool:
        """Return whether this SGLang supports one of :data:`CONTROL_CALLS`."""

    async def loaders(self) -> list[str]:
        """Return the custom weight loaders that it was started with."""

    async def ask_scheduler(self) -> None:
        """Wait for a response of the scheduler, which responds between two batches."""

    def stopped(self) -> list[int]:
        """Return the pids of its processes on this host that are stopped, as by SIGSTOP."""

    def failure(self) -> str | None:
        """Return the reason why it serves nothing any more; None while it runs."""

    @property
    def ranks_host(self) -> str | None:
        """Host that runs some of the ranks; None = all run here and read shared memory."""

    async def disconnect(self) -> None:
        """Close connections, if any."""

    def close(self) -> None:
        """End SGLang if this process started it."""


class CallWatch:
    """Ends a wait for SGLang that is too long, or will never end for the reason that ``failure`` returns."""

    def __init__(self, action: str, timeout_s: float, failure: Callable[[], str | None] = lambda: None) -> None:
        self._action, self._timeout_s, self._failure = action, timeout_s, failure
        self._deadline = time.monotonic() + timeout_s

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next :meth:`check`."""
        return min(WATCH_S, max(0.0, self._deadline - time.monotonic()))

    def check(self) -> None:
        """Raise EngineLost with the reason if there is nothing more to wait for."""
        if (reason := self._failure()) is not None:
            raise EngineLost(f"SGLang did not finish '{self._action}': {reason}", code="sglang.engine-lost")
        if time.monotonic() >= self._deadline:
            text = f"SGLang did not finish '{self._action}': it took longer than {self._timeout_s:g} s"
            raise EngineLost(text, code="sglang.call-timeout")


def watched_result(future: concurrent.futures.Future[_T], watch: CallWatch) -> _T:
    """Wait for the end of a coroutine and return its result.

    Raises:
        EngineLost: see :meth:`CallWatch.check`; the coroutine is cancelled.
    """
    while True:
        done, _ = concurrent.futures.wait([future], timeout=watch.pause_s)
        if done:
            return future.result()
        try:
            watch.check()
        except EngineLost:
            future.cancel()
            raise


class RequestLoop:
    """An event loop in a separate thread: requests progress while the engine's caller does other work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sglang-requests")
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float, action: str) -> _T:
        """Run a coroutine and return its result; EngineLost after ``timeout_s`` seconds, naming the ``action``."""
        return watched_result(self.start(work), CallWatch(action, timeout_s))

    def close(self) -> None:
        """Cancel all running coroutines and end the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()


class ImageURLs:
    """Data URLs of images as lossless PNGs, the last used ones kept for the other samples of a prompt; thread-safe.

    From the files themselves, SGLang would get other pixels than training: it drops transparency, which is white here,
    and decodes a JPEG on the GPU.
    """

    def __init__(self) -> None:
        self._urls: OrderedDict[int, str] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def of(self, image: Image) -> str:
        """Return the URL of an image; errors as in :func:`megarl.base.image_files.decode_image`."""
        with self._lock:  # of equal images at once, one is encoded
            url = self._urls.pop(image.key, None)
            if url is None:
                file = lossless_png(image.data, f"image {image.key:x}")
                url = f"data:;base64,{base64.b64encode(file).decode()}"
                self._size += len(url)
            self._urls[image.key] = url
            while self._size > URL_CACHE_BYTES:
                self._size -= len(self._urls.popitem(last=False)[1])
            return url


def request_payload(
    request: Request,
    rid: str,
    eos: frozenset[int],
    every_token: int,
    vision: Vision | None = None,
    urls: ImageURLs | None = None,
) -> dict[str, Any]:
    """Return SGLang's request fields of one request.

    In deterministic mode, the only one with seeds, SGLang draws by rank if any request of a batch filters by rank, else
    by token id. A seed would then mean other tokens in another batch. Therefore every request filters by rank here, if
    only by a filter that passes all tokens.

    An image has one token in ``input_ids``, which SGLang replaces by the number that its image processor computes.

    Args:
        rid: SGLang's id of the request; no id may be a prefix of another, since SGLang aborts by prefix.
        every_token: vocabulary size in deterministic mode, else 0.
        vision: of the model; None for models of text only.
        urls: of images in other requests; None = none are held.

    Raises:
        RequestRefused: ``min_p`` in deterministic mode, whose sampler lacks it; or the text of a prompt with images
            has a token that stands for an image or video.
    """
    params = request.params
    if every_token and params.min_p:
        raise RequestRefused(
            f"min_p={params.min_p}: SGLang's deterministic mode has no min_p; set it to 0, or set "
            "rollout.engine_kwargs.sglang.deterministic=false",
            code="sglang.no-min-p",
        )
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": every_token if every_token and params.top_k == -1 else params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if not params.ignore_eos:
        sampling["stop_token_ids"] = sorted(eos.union(params.stop_token_ids))
    if params.stop:
        sampling["stop"] = list(params.stop)
    if every_token:
        sampling["sampling_seed"] = request.seed
    payload = {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "return_logprob": True, "rid": rid}
    if vision is not None and request.images:
        payload |= _image_fields(request, vision, urls or ImageURLs())
    if params.support:
        sampling["top_k"] = min(params.largest_support, params.support - SUPPORT_TIES)
        payload["return_sampling_mask"] = True
    if request.routes_from is not None:
        payload |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
    return payload


def placeholders_in(ids: Sequence[int], vision: Vision | None) -> list[int]:
    """Return the tokens of text that SGLang takes for an image or video if the prompt has images."""
    return [] if vision is None else [number for number in ids if number in (vision.image_token, vision.video_token)]


def _image_fields(request: Request, vision: Vision, urls: ImageURLs) -> dict[str, Any]:
    if placeholders := placeholders_in(request.prompt_ids, vision):
        raise RequestRefused(
            f"request '{request.request_id}': the token {placeholders[0]}, which stands for an image or a video, is in "
            "the text of a prompt with images, or in an earlier response; SGLang would look for another file",
            code="sglang.image-placeholder",
        )
    files = {image.key: urls.of(image) for image in request.images}
    return {
        "input_ids": with_placeholders(request.prompt_ids, vision.image_token, once=True),
        "image_data": [files[span.key] for span in image_spans(request.prompt_ids)],
    }


class ResponseContext(NamedTuple):
    """State of the engine that is needed to parse a response."""

    eos: frozenset[int]
    version: int
    experts: Experts | None = None


def parse_completion(request: Request, response: dict[str, Any], context: ResponseContext) -> Completion:
    """Convert SGLang's response to a completion.

    Raises:
        RolloutError: log-probs are not finite or not one per token, tokens, routes or support are missing, SGLang has
            another number of image tokens, or it failed.
        RequestRefused: see :func:`~megarl.rollout.sglang.support.parse_support`.
    """
    meta = response["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    tokens, log_probs = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
    support = None
    if request.params.support:
        support, log_probs = parse_support(request, meta, tokens)
    reason = meta.get("finish_reason") or {}
    _check(request, response, tokens, log_probs, reason)
    if request.images and tokens:
        _check_prompt_tokens(request, meta.get("prompt_tokens"))
    versions = _versions(meta, len(tokens), context.version)
    oldest = min(versions, default=context.version)
    return Completion(
        request.request_id,
        tokens,
        log_probs,
        _finish_reason(request.params, tokens, reason.get("type"), context.eos),
        oldest,
        versions if len(set(versions)) > 1 else (),
        parse_routes(request, meta.get("routed_experts"), len(tokens), context.experts),
        support,
    )


def parse_routes(request: Request, encoded: str | None, tokens: int, experts: Experts | None) -> np.ndarray | None:
    """Decode SGLang's routes: base64 of int32 ``[positions, all layers, experts per token]``.

    The positions are those from ``routes_from`` on, except the last token. Rows of dense layers are left out.

    Raises:
        RolloutError: the response has no routes, or not those of all tokens.
    """
    if request.routes_from is None or not tokens:
        return None
    name = f"request '{request.request_id}'"
    if encoded is None or experts is None:
        raise RolloutError(
            f"{name}: SGLang returned no routes; start it with {ROUTES_ARGUMENT}=true", code="sglang.no-routes"
        )
    values = np.frombuffer(base64.b64decode(encoded), np.int32)
    shape = (len(request.prompt_ids) + tokens - 1 - request.routes_from, len(experts.layers), experts.per_token)
    if values.size != math.prod(shape):
        raise RolloutError(
            f"{name}: SGLang returned {values.size} experts, expected {list(shape)}", code="sglang.malformed-routes"
        )
    routes = values.reshape(shape)[:, list(experts.layers)].astype(np.int16)
    if ((routes < 0) | (routes >= experts.count)).any():
        raise RolloutError(
            f"{name}: SGLang returned experts {routes.min()} to {routes.max()} of {experts.count}",
            code="sglang.malformed-routes",
        )
    return routes


def _check(
    request: Request, response: dict[str, Any], tokens: list[int], log_probs: list[float], reason: dict[str, Any]
) -> None:
    name = f"request '{request.request_id}'"
    stopped_at_nan = reason.get("matched") == NAN_STOP and NAN_STOP not in request.params.stop
    if stopped_at_nan or not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            f"{name}: the weights give log-probs that are not finite", code="rollout.logprobs-not-finite"
        )
    generated = response.get("output_ids")
    if generated is not None and list(generated) != tokens:
        raise RolloutError(
            f"{name}: SGLang returned {len(generated)} tokens and log-probs of {len(tokens)}",
            code="sglang.malformed-answer",
        )
    if reason.get("type") == "length" and len(tokens) != request.params.max_new_tokens:
        raise RolloutError(
            f"{name}: SGLang ended it after {len(tokens)} of max_new_tokens={request.params.max_new_tokens} tokens; "
            "its cache is too small for it (rollout.engine_kwargs.sglang.server_args.max_total_tokens)",
            code="sglang.cache-too-small",
        )


def _check_prompt_tokens(request: Request, count: int | None) -> None:
    if count != len(request.prompt_ids):
        images = sum(span.rows * span.columns for span in image_spans(request.prompt_ids))
        raise RolloutError(
            f"request '{request.request_id}': SGLang has {count} prompt tokens, megarl {len(request.prompt_ids)} "
            f"({images} of images): their image processors differ; SGLang must have preprocessor_config.json and "
            "data.mm_processor_kwargs of this run",
            code="engine.image-token-count",
        )


def _finish_reason(params: SamplingParams, tokens: list[int], kind: str | None, eos: Iterable[int]) -> Any:
    """Return the finish reason of a response by its last token.

    SGLang may name another one: ``length`` for a stop token at the limit, and ``abort`` after the last token.
    """
    if kind in ("length", "abort") and tokens:
        if not params.ignore_eos and tokens[-1] in {*eos, *params.stop_token_ids}:
            return "stop"
        return "length" if len(tokens) == params.max_new_tokens else kind
    if kind not in ("stop", "length", "abort"):
        raise RolloutError(
            f"SGLang gave finish_reason {kind!r}, expected stop, length or abort", code="sglang.malformed-answer"
        )
    return kind


def _versions(meta: dict[str, Any], count: int, version: int) -> tuple[int, ...]:
    """Return the weight version of each token: SGLang's spans, else its version of the response, else the engine's."""
    spans = meta.get("weight_versions")
    if spans:
        versions = [version] * count
        for span in spans:
            versions[span["start"] : span["end"]] = [_number(span["version"], version)] * (span["end"] - span["start"])
        return tuple(versions[:count])
    return (_number(meta.get("weight_version"), version),) * count


def _number(name: Any, version: int) -> int:
    return int(name) if isinstance(name, str) and name.lstrip("-").isdigit() else version


class SchedulerLiveness:
    """Asks SGLang's scheduler for a response while no request ends; sets :attr:`lost`, the reason, if it is silent."""

    def __init__(self, backend: SGLangBackend, loop: RequestLoop, timeout_s: float) -> None:
        self._backend, self._loop, self._timeout_s = backend, loop, timeout_s
        self.lost: str | None = None
        self._silent_s, self._checked = 0.0, time.monotonic()
        self._question: concurrent.futures.Future[None] | None = None

    def heard(self) -> None:
        """Record a response, or that no request runs."""
        self._silent_s, self._checked = 0.0, time.monotonic()

    def check(self) -> None:
        """Set :attr:`lost` after a long silence; call it every :data:`LONGEST_GAP_S` seconds while requests run."""
        now = time.monotonic()
        self._silent_s += min(now - self._checked, LONGEST_GAP_S)
        self._checked = now
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            with contextlib.suppress(RolloutError):  # a lost server is the backend's failure
                question.result()
                if not self._backend.stopped():
                    self.heard()
        if self._silent_s < self._timeout_s / 4:
            return
        if self._question is None:
            self._question = self._loop.start(self._backend.ask_scheduler())
        if self._silent_s >= self._timeout_s:
            stopped = self._backend.stopped()
            cause = f"; stopped: pid {', '.join(map(str, stopped))}" if stopped else ""
            self.lost = f"its scheduler has not responded for {self._silent_s:.0f} s (rollout.health.timeout_s){cause}"


class StoppedProcesses:
    """Finds processes that stay stopped during a control call, in which a busy scheduler may be silent."""

    def __init__(self, backend: SGLangBackend, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._since: dict[int, float] = {}

    def failure(self) -> str | None:
        """Return the reason why the call will not end; None if no process is stopped for too long."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in self._backend.stopped()}
        lost = [pid for pid, since in self._since.items() if now - since >= self._timeout_s]
        if not lost:
            return None
        return (
            f"processes are stopped for {self._timeout_s:g} s (rollout.health.timeout_s): "
            f"pid {', '.join(map(str, lost))}"
        )


def stopped_processes(processes: Sequence[psutil.Process]) -> list[int]:
    """Return the pids of the processes that are stopped, as by SIGSTOP."""
    stopped = []
    for process in processes:
        with contextlib.suppress(*READ_ERRORS):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process.pid)
    return stopped
