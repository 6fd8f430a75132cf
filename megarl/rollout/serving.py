"""Continuous serving: an engine in a thread of its own takes requests at any moment and returns completions at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megarl.base.errors import MegarlError
from megarl.rollout.interface import NO_VERSION, Completion, Request, RequestRefused, RolloutEngine
from megarl.tracing import TRACER, span
from megarl.tracing.tracer import count_memory

IDLE_S = 10.0
"""Seconds without a request after which the thread ends; the next request starts another one."""
POLL_S = 0.5
"""Seconds of one poll of the engine. New requests interrupt it; an engine without interruption delays them so long."""


@dataclass
class _Client:
    """Requests of one client, and what it has not fetched yet.

    Attributes:
        ended: completions that it has not fetched.
        failure: error that ended its requests, raised by its next fetch.
    """

    running: set[str] = field(default_factory=set)
    ended: list[Completion] = field(default_factory=list)
    failure: Exception | None = None


@dataclass
class _OpenRequest:
    """A request that has not ended.

    Attributes:
        sent: the request as the engine has it; None while it waits for the engine.
        is_cancelled: its client has aborted it.
        discarded: generated tokens that the engine could not continue.
    """

    client: str
    sent: Request | None = None
    is_cancelled: bool = False
    discarded: int = 0


class HeldRequests(NamedTuple):
    """Number of requests that a pause holds halfway, and of their tokens, which the next weights compute again."""

    requests: int
    tokens: int


class EngineServer:
    """Serves requests of several clients with one engine, in its own thread.

    All methods may be called from any thread. While no request is running, or between :meth:`pause` and :meth:`resume`,
    the engine belongs to the caller, who may update its weights or put it to sleep.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._inbox: list[tuple[str, Sequence[Request]]] = []
        self._aborted: list[str] = []
        self._open: dict[str, _OpenRequest] = {}
        self._paused = False
        self._clients: dict[str, _Client] = {}
        self._gone: set[str] = set()
        self._polls = 0
        self._thread: threading.Thread | None = None

    def accept(self, client: str, requests: Sequence[Request], aborted: Iterable[str] = ()) -> None:
        """Take new requests and abort others, without waiting for the engine.

        Args:
            client: name of the caller; only its :meth:`completions` return the results.
            requests: new requests, whose ids are unique among all clients. One that the engine cannot continue begins
                without its ``prior``.
            aborted: ids of requests to abort; an unknown one is ignored.
        """
        with self._changed:
            if client in self._gone:
                return
            if requests:
                self._open |= {request.request_id: _OpenRequest(client) for request in requests}
                self._clients.setdefault(client, _Client()).running.update(request.request_id for request in requests)
                self._inbox.append((client, [self._startable(request) for request in requests]))
            self._aborted += aborted
            self._wake()
        self._engine.interrupt_poll()

    def pause(self) -> HeldRequests:
        """Interrupt all requests and hold them with their tokens, and also new ones; returns when the engine is idle.

        A held request continues after :meth:`resume`, with the weights that the engine has then. If the engine cannot
        continue it (:meth:`RolloutEngine.can_continue`), it begins again.
        """
        with self._changed:
            self._paused = True
            self._wake()
        self._engine.interrupt_poll()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_serving)
            partial = [request for _, requests in self._inbox for request in requests if request.prior is not None]
        return HeldRequests(len(partial), sum(len(r.prompt_ids) + len(r.prior_ids) for r in partial))

    def resume(self) -> None:
        """Continue the held requests."""
        with self._changed:
            self._paused = False
            self._wake()

    def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Wait for completions of a client's requests, and return all that have ended.

        An empty list proves that the engine works or is paused: it is returned after the engine has finished a poll
        within the call.

        Args:
            wait_s: seconds to wait for the first completion; without running requests the call returns at once.

        Raises:
            RolloutError, WeightSyncError: the engine failed; none of the client's requests is running.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            state, polls = self._clients.get(client, _Client()), self._polls
            while state.running and not (state.ended or state.failure):
                left = deadline - time.monotonic()
                if left <= 0 and (self._paused or self._polls > polls):
                    break
                self._changed.wait(left if left > 0 else None)
            if not state.running:
                self._clients.pop(client, None)
            failure, state.failure = state.failure, None
            ended, state.ended = state.ended, []
        if failure is not None:
            raise failure
        return ended

    def forget(self, client: str) -> None:
        """Abort all requests of a client that is gone, and wait until none is running; late ones are ignored."""
        with self._changed:
            state = self._clients.get(client, _Client())
            running = list(state.running)
        if running:
            self.accept(client, (), running)
        with self._changed:
            self._gone.add(client)
            self._changed.wait_for(lambda: not state.running)
            self._clients.pop(client, None)

    def _wake(self) -> None:
        """Tell all threads of a change; start the engine's thread if there is work."""
        if self._thread is None and self._open:
            self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    @property
    def _is_serving(self) -> bool:
        return any(entry.sent for entry in self._open.values())

    @property
    def _has_work(self) -> bool:
        """Whether the engine has requests, or may get some."""
        return self._is_serving or bool(self._open and not self._paused)

    def _serve(self) -> None:
        """Body of the thread."""
        while True:
            with self._changed:
                if not self._open:
                    self._aborted = []
                if not self._changed.wait_for(lambda: self._has_work, IDLE_S):
                    self._thread = None
                    return
            TRACER.follow_thread()
            count_memory()
            with span("generate", "verb"):
                while self._goes_on():
                    self._poll_once()
            count_memory()

    def _goes_on(self) -> bool:
        with self._changed:  # clients add requests meanwhile
            return self._has_work

    def _poll_once(self) -> None:
        """Pass new requests to the engine, let it work, and hand out the completions.

        Only this thread calls the engine meanwhile, and without the lock: clients may call at any time.
        """
        with self._changed:
            inbox, aborted = self._take_calls()
        ended: list[Completion] = []
        failed: list[tuple[str, Iterable[str], Exception]] = []
        for client, requests in inbox:
            try:
                ended += self._submit(requests)
            except Exception as error:
                failed.append((client, [request.request_id for request in requests], error))
        failure: Exception | None = None
        try:
            self._engine.abort(aborted)
            ended += self._engine.poll(POLL_S)
        except Exception as error:
            failure = error
        with self._changed:
            self._polls += 1
            for batch in failed:
                self._fail(*batch)
            for completion in ended:
                self._hand_out(completion)
            if failure is not None:  # the engine has lost all requests that it had
                waiting = {request.request_id for _, requests in self._inbox for request in requests}
                for client, state in self._clients.items():
                    self._fail(client, state.running - waiting, failure)
            self._changed.notify_all()

    def _take_calls(self) -> tuple[list[tuple[str, Sequence[Request]]], list[str]]:
        """Take the new requests by client, and the ids to abort: in a pause all that the engine has."""
        if self._paused:
            return [], [name for name, entry in self._open.items() if entry.sent]
        inbox, self._inbox = self._inbox, []
        aborted, self._aborted = self._aborted, []
        for request in (request for _, requests in inbox for request in requests):
            self._open[request.request_id].sent = request
        for name in aborted:
            if name in self._open:
                self._open[name].is_cancelled = True
        return inbox, aborted

    def _submit(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit requests to the engine, which may refuse some of them; return these refusals.

        Raises:
            RolloutError, WeightSyncError: the engine takes no requests now.
        """
        try:
            self._engine.submit(requests)
        except Exception as error:
            if isinstance(error, MegarlError) and not isinstance(error, RequestRefused):
                raise
            if len(requests) > 1:
                return [refusal for request in requests for refusal in self._submit([request])]
            if not isinstance(error, RequestRefused):
                error = RequestRefused(f"{type(error).__name__}: {error}", code="rollout.request-failed")
            return [Completion(requests[0].request_id, [], [], "abort", NO_VERSION, refusal=error)]
        return []

    def _hand_out(self, completion: Completion) -> None:
        """Give a completion to its client, or hold the request if a pause has interrupted it."""
        name = completion.request_id
        entry = self._open.get(name)
        if entry is None or entry.sent is None:  # the engine was used by someone else before
            return
        request, entry.sent = entry.sent, None
        if completion.finish_reason == "abort" and not entry.is_cancelled and not completion.refusal:
            held = replace(request, prior=completion if completion.token_ids else None)
            self._inbox.append((entry.client, [self._startable(held)]))
            return
        del self._open[name]
        self._clients[entry.client].running.discard(name)
        self._clients[entry.client].ended.append(replace(completion, discarded_tokens=entry.discarded))

    def _startable(self, request: Request) -> Request:
        """Drop the prior tokens of a request that the engine cannot continue, and count them."""
        if request.prior is None or self._engine.can_continue(request):
            return request
        self._open[request.request_id].discarded += len(request.prior_ids)
        return replace(request, prior=None)

    def _fail(self, client: str, names: Iterable[str], error: Exception) -> None:
        """End requests of a client with an error."""
        if lost := list(names):
            self._clients[client].running.difference_update(lost)
            self._clients[client].failure = error
            for name in lost:
                self._open.pop(name, None)
