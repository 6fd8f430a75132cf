"""Weight updates of an SGLang engine: passes the commands of a sync on to SGLang's ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Any

import torch

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.base.ports import GLOO_INTERFACE, interface_of
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import ModelConfig
from megarl.models.verification import ParamRectangle
from megarl.rollout.sglang.backend import CallWatch, ControlResult, RequestLoop, SGLangBackend, watched_result
from megarl.rollout.sglang.options import LOADER, SGLangOptions
from megarl.sharding.placement import ProcessLocation
from megarl.sharding.plan import NO_VERSION, TransferUsage
from megarl.sharding.receiver import (
    NOT_CONNECTED,
    NOT_OPEN,
    ReceiverSpec,
    ReplicaReceiver,
    check_version,
    route_messages,
)
from megarl.sharding.sender import Message
from megarl.sharding.sglang_loader import LOST, Reply, SGLangShard, set_socket_options

UNKNOWN_ACTION = "Unsupported"
"""Message of SGLang's weight checker in early versions without checksums."""
LOADER_CALL = "update_weights_from_tensor"
"""Control call with which SGLang runs the loader in its ranks."""
LOOK_S = 0.2
"""Seconds between checks that SGLang's call has not ended, while its ranks connect."""


class WeightSession(ReplicaReceiver):
    """Leads the weight updates of one engine: passes the commands of a sync on to SGLang's ranks.

    The first command of an update lets SGLang call the loader. The ranks then take commands from this process
    until it hangs up. Until then SGLang does nothing else, so each control call hangs up first.

    Args:
        watch: returns the watch of a call that begins now, by its name for errors.
        check_idle: raises if the engine cannot begin an update now.

    Attributes:
        version: version of SGLang's weights; ``NO_VERSION`` while they are incomplete.

    Raises:
        ConfigError: SGLang runs without megarl's weight loader.
        WeightSyncError: SGLang's ranks hold other parameters than the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: SGLangOptions,
        backend: SGLangBackend,
        loop: RequestLoop,
        watch: Callable[[str], CallWatch],
        check_idle: Callable[[], None],
    ) -> None:
        self._backend, self._loop, self._watch, self._check_idle = backend, loop, watch, check_idle
        self.version = NO_VERSION
        self._tp = options.tensor_parallel_size
        limit_s, reading = options.call_timeout_s, "reading its control calls"
        self._sessions = loop.call(backend.has("begin_weight_update"), limit_s, reading)
        self._checks = loop.call(backend.has("check_weights"), limit_s, reading)
        if LOADER not in loop.call(backend.loaders(), limit_s, "reading its weight loaders"):
            raise ConfigError(
                "the SGLang server was started without megarl's weight loader: start it with --custom-weight-loader "
                f"{LOADER}, and with megarl installed there",
                code="sglang.no-weight-loader",
            )
        self._channel = CommandChannel(backend.ranks_host, options.health_timeout_s)
        self._loading: concurrent.futures.Future[ControlResult] | None = None
        # SGLang's ranks talk to each other over loopback, and to training ranks of other nodes as this process does.
        self._interface = os.environ.get(GLOO_INTERFACE) if backend.ranks_host is None else None
        self._open = False
        self._ranks: list[int] = []
        self._update: int | None = None  # version of the open one
        self._transfer: int | None = None
        self._largest_command = 0
        quantized = options.quantization is not None
        self._shards = [SGLangShard(config, self._tp, rank, quantized) for rank in range(self._tp)]
        places = self._query("attach", [(shard,) for shard in self._shards])
        self.locations = [ProcessLocation(node, device, tuple(visible)) for node, device, visible in places]

    def load_folder(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face folder, which SGLang's ranks read; ModelError if SGLang cannot."""
        self._drop_weights(version)
        if self._shards[0].quantized:
            raise ModelError(
                f"{QUANTIZATION_KEY}={FP8}: SGLang cannot quantize model folder {path}; its weights come from a sync",
                code="sglang.fp8-folder",
            )
        self._close_session()
        outcome = self.call(
            "update_weights_from_disk",
            model_path=os.path.abspath(path),
            load_format="auto",
            weight_version=str(version),
            flush_cache=True,
        )
        if not outcome.success:
            raise ModelError(f"SGLang could not load model folder {path}: {outcome.message}", code="sglang.load-failed")
        if self._shards[0].config.vision is not None:
            self._query("tower_loaded", [()] * self._tp)
        self.version = version

    def connect(self, specs: Sequence[ReceiverSpec]) -> None:
        self._query("connect", [(spec,) for spec in specs])
        self._transfer = None
        self._ranks = [spec.plan.rank for spec in specs]

    def begin(self, version: int) -> None:
        self._drop_weights(version)
        if not self._ranks:
            raise WeightSyncError(NOT_CONNECTED, code="sync.no-receivers")
        self._largest_command = 0
        self._open_session()
        self._update = version
        with self._abandoning_on_error():
            self._command("begin", [(version,)] * self._tp)

    def open(self, session: int) -> None:
        if session != self._transfer:
            self._query("open", [(session, self._interface)] * self._tp)
            self._transfer = session

    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        if self._update is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        with self._abandoning_on_error():  # a rank may have written its part
            self._command("bucket", [(index, part) for part in route_messages(messages, self._ranks)])

    def close(self, completed: bool) -> list[TransferUsage]:
        """End receiving; the last entry is the memory of this process's largest command."""
        if not completed:
            self._transfer = None
        usage = self._query("close", [(completed,)] * self._tp)
        return [*(TransferUsage(*values) for values in usage), TransferUsage(self._largest_command)]

    def end(self, version: int) -> None:
        if self._update is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        with self._abandoning_on_error():
            self._command("end", [(version,)] * self._tp)
            outcome = self._hang_up()
            if outcome is not None:
                _check_success(outcome, f"take over weight version {version}")
        self._update = None
        self._close_session()
        self.version = version

    def _drop_weights(self, version: int) -> None:
        check_version(version)
        self._check_idle()
        self.abandon()

    def abandon(self) -> None:
        """Drop an open update and the weights, without waiting for SGLang."""
        self.version, self._update = NO_VERSION, None
        self._channel.hang_up()

    @contextlib.contextmanager
    def _abandoning_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def shutdown(self) -> None:
        """Close the connections of updates."""
        self.abandon()
        self._channel.close()

    def call(self, method: str, **fields: Any) -> ControlResult:
        """Make a control call and wait for it; the ranks take no commands meanwhile."""
        self._hang_up()
        return watched_result(self._loop.start(self._backend.call(method, **fields)), self._watch(method))

    def checksum(self, rank: int) -> dict[str, str]:
        """Return the digests of a rank's parameters."""
        digests: dict[str, str] = self._query("checksum", [()] * self._tp)[rank]
        return digests

    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        """Return checksums of parameter parts, computed in all ranks at once."""
        return self._query("sums", [(parts,) for parts in rectangles])

    def fingerprint(self) -> tuple[str, ...]:
        """Return the checksum of each rank's weights by SGLang's checker; empty in versions without checksums."""
        if not self._checks:
            return ()
        outcome = self.call("check_weights", action="checksum")
        if UNKNOWN_ACTION not in outcome.message:
            _check_success(outcome, "check its weights")
        return tuple(str(rank["per_gpu_checksum"]) for rank in outcome.ranks)

    def _query(self, action: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send a command that may come outside an update; SGLang accepts it only within an update session."""
        was_open = self._open
        self._open_session()
        try:
            return self._command(action, arguments)
        finally:
            if self._update is None:
                self._hang_up()
            if not was_open:
                self._close_session()

    def _command(self, action: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send a command to every rank and return the values of the replies.

        Args:
            arguments: its arguments by rank.

        Raises:
            WeightSyncError: SGLang or a rank refuses.
            EngineLost: a rank is gone.
        """
        if not self._channel.is_open:
            self._call_loader()
        commands = [pickle.dumps((action, values)) for values in arguments]
        self._largest_command = max(self._largest_command, sum(map(len, commands)))
        try:
            replies = self._channel.exchange(commands, self._watch(action))
        except (EOFError, OSError):
            outcome = self._hang_up()  # does not end if the rank has died, and the watch finds its process
            reason = "SGLang is not in megarl's loader" if outcome is None else outcome.message
            raise WeightSyncError(
                f"a rank of SGLang lost its connection to the engine: {reason}", code="sglang.rank-disconnected"
            ) from None
        except BaseException:
            self._channel.hang_up()
            raise
        for rank, reply in enumerate(replies):
            if reply.error:
                raise WeightSyncError(f"SGLang's rank {rank}: {reply.error}", code=reply.code)
        return [reply.values for reply in replies]

    def _call_loader(self) -> None:
        """Let SGLang call the loader, and wait until all ranks listen.

        At the end of a call within an update, SGLang names the weights by their version and empties its caches.
        """
        self._hang_up()
        work = self._backend.call(
            LOADER_CALL,
            serialized_named_tensors=self._channel.invite(self._tp),
            load_format=LOADER,
            flush_cache=self._update is not None,
            weight_version=None if self._update is None else str(self._update),
        )
        self._loading, watch = self._loop.start(work), self._watch(LOADER_CALL)
        self._channel.accept(self._tp, partial(_check_runs, self._loading, watch))

    def _hang_up(self) -> ControlResult | None:
        """Let the ranks return to SGLang, and wait for the end of its call; None without a call."""
        self._channel.hang_up()
        call, self._loading = self._loading, None
        return None if call is None else watched_result(call, self._watch(LOADER_CALL))

    def _open_session(self) -> None:
        if self._sessions and not self._open:
            _check_success(self.call("begin_weight_update"), "begin a weight update")
            self._open = True

    def _close_session(self) -> None:
        if self._open:
            _check_success(self.call("end_weight_update"), "end the weight update")
            self._open = False


def _check_success(outcome: ControlResult, action: str) -> None:
    if not outcome.success:
        raise WeightSyncError(f"SGLang did not {action}: {outcome.message}", code="sglang.call-refused")


def _check_runs(call: concurrent.futures.Future[ControlResult], watch: CallWatch) -> None:
    """Check that a call of the loader has not ended, and that SGLang will run it."""
    if call.done():
        raise WeightSyncError(
            f"SGLang's ranks did not connect to megarl's loader: {call.result().message}",
            code="sglang.ranks-not-connected",
        )
    watch.check()


class CommandChannel:
    """The engine's connections to its ranks, which last as long as a call of the loader.

    Args:
        ranks_host: another host that runs some of the ranks; None = all ranks run on this host.
        send_timeout_s: seconds after which a rank counts as lost that reads nothing of its command.
    """

    def __init__(self, ranks_host: str | None = None, send_timeout_s: float = 180.0) -> None:
        self._key, self._send_timeout_s = secrets.token_bytes(32), send_timeout_s
        address, listens_at = ("127.0.0.1",) * 2 if ranks_host is None else channel_addresses(ranks_host)
        self._listener = Listener((listens_at, 0), backlog=64)  # each connection proves the key in its own thread
        self.to = {"address": [address, self._listener.address[1]], "key": self._key.hex()}
        self._changed = threading.Condition()  # guards the next three
        self._call_id = 0
        self._connected: dict[int, Connection] = {}
        self._ranks: list[Connection] = []
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="sglang-ranks").start()

    @property
    def is_open(self) -> bool:
        """Whether the ranks listen to commands."""
        return bool(self._ranks)

    def invite(self, ranks: int) -> list[bytes]:
        """Return the arguments of a loader call, by rank; with them the ranks connect."""
        self.hang_up()
        calls = [{**self.to, "call_id": self._call_id, "rank": rank} for rank in range(ranks)]
        return [pickle.dumps([(json.dumps(call), torch.empty(0, dtype=torch.uint8))]) for call in calls]

    def accept(self, ranks: int, check: Callable[[], None]) -> None:
        """Wait until all ranks of the last :meth:`invite` have connected.

        Args:
            check: called again and again; raises if no rank will connect any more.
        """
        with self._changed:
            while len(self._connected) < ranks:
                check()
                self._changed.wait(LOOK_S)
            self._ranks = [self._connected[rank] for rank in range(ranks)]

    def exchange(self, commands: Sequence[bytes], watch: CallWatch) -> list[Reply]:
        """Send every rank its command and return the replies, by rank.

        Args:
            commands: pickled action and arguments, by rank.
            watch: ends the wait for a rank that will not reply.

        Raises:
            EOFError: a rank is gone.
            OSError: the same, or it did not read its command for ``send_timeout_s``.
            EngineLost: see :meth:`CallWatch.check`.
        """
        for connection, command in zip(self._ranks, commands, strict=True):
            connection.send_bytes(command)
        replies: dict[int, Reply] = {}
        while len(replies) < len(self._ranks):
            silent = [connection for rank, connection in enumerate(self._ranks) if rank not in replies]
            ready = wait(silent, watch.pause_s)
            for rank, connection in enumerate(self._ranks):
                if connection in ready:
                    replies[rank] = Reply(*json.loads(connection.recv_bytes()))
            if not ready:
                watch.check()
        return [replies[rank] for rank in range(len(self._ranks))]

    def hang_up(self) -> None:
        """Close the connections; the ranks return to SGLang."""
        with self._changed:
            connected, self._connected, self._ranks = self._connected, {}, []
            self._call_id += 1  # ranks that connect later are sent away
        for connection in connected.values():
            connection.close()

    def close(self) -> None:
        """Hang up and stop listening."""
        self.hang_up()
        if not self._closed:
            self._closed = True
            # A last connection wakes the thread. It sends nothing: a thread that has ended meanwhile answers nothing.
            with contextlib.suppress(OSError), socket.create_connection(self._listener.address[:2]):
                pass
            self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(*LOST):
                connection = self._listener.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True, name="sglang-rank").start()

    def _admit(self, connection: Connection) -> None:
        """Take a client that proves the key; one that stands still blocks no other."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._take(connection)
        except (*LOST, ValueError, KeyError, TypeError):  # an unknown client or an ended rank
            connection.close()  # the engine's wait for it ends with SGLang's call

    def _take(self, connection: Connection) -> None:
        """Keep the connection of an invited rank, close any other one."""
        set_socket_options(connection, self._send_timeout_s)
        head = json.loads(connection.recv_bytes())
        with self._changed:
            if head["call_id"] == self._call_id:
                self._connected[head["rank"]] = connection
                self._changed.notify_all()
                return
        connection.close()


def channel_addresses(host: str) -> tuple[str, str]:
    """Return the address at which ``host`` reaches this one, and the address to listen at.

    Both are the address of the interface towards that host, or ``MEGARL_HOST_ADDRESS``, an environment variable. If
    that is no address of this machine, such as behind address translation, the listener stays at the interface.
    """
    named = os.environ.get("MEGARL_HOST_ADDRESS")
    if named and interface_of(named):
        return named, named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; any port will do
        local = str(probe.getsockname()[0])
    return named or local, local
