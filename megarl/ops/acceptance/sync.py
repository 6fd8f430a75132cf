"""Weight sync from a trainer process to an engine process on one device: bit equality and GB/s.

On a GPU the weights travel by CUDA IPC, on a CPU by shared memory. The engine process draws the same random weights and
compares every element.
"""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, parse_model_config
from megarl.ops.acceptance.bench import Bench
from megarl.ops.acceptance.models import SHAPES
from megarl.ops.acceptance.results import Result, Verdict
from megarl.rollout.embedded.weights import WeightStore
from megarl.sharding import RolloutLayout, Routes, ShardingManager, SyncOptions, build_plan
from megarl.sharding.placement import ProcessLocation, current_location
from megarl.sharding.plan import RankPlan, TransferUsage, receiver_plans
from megarl.sharding.receiver import BucketReceiver, ReceiverSpec, route_messages
from megarl.sharding.sender import BucketSender, destination_ranks
from megarl.sharding.transports.interface import PeerTransports
from megarl.sharding.verification import partial_checksums

DTYPE, ELEMENT_BYTES = torch.bfloat16, 2
SYNCS = 5
SHARE_OF_COPY = 0.3
"""Target of a sync, as a share of a plain copy on the device: a sync copies twice, into and out of a bucket."""
REPLY_S = 120.0


def run(bench: Bench) -> None:
    """Check the transport, the bits and the speed of a sync."""
    case = _Case(bench)
    bench.check("transport", case.transport)
    bench.check("bits", case.bits)
    bench.check("speed", case.speed)


class _Case:
    """Two processes and some syncs, run once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model = parse_model_config(SHAPES["tiny" if bench.is_tiny else "1.5B"])
        self.bucket_bytes = 2**20 if bench.is_tiny else 2**28

    def transport(self) -> Result:
        """Name the chosen transport."""
        name = self._figures[0]
        expected = "cuda_ipc" if self.bench.device.type == "cuda" else "shared_memory"
        return Result("", Verdict.OK if name == expected else Verdict.FAIL, target=expected, note=name)

    def bits(self) -> Result:
        """Report parameters that differ in the engine's process."""
        different = self._figures[1]
        outcome = Verdict.FAIL if different else Verdict.OK
        return Result("", outcome, len(different), "different parameters", "0", ", ".join(different[:3]))

    def speed(self) -> Result:
        """Compare GB/s with a plain copy on the device."""
        rates = self._figures[2]
        nbytes = 2**20 if self.bench.is_tiny else 2**30
        data = torch.ones(nbytes, dtype=torch.uint8, device=self.bench.device)
        target = torch.empty_like(data)
        plain = nbytes / self.bench.seconds(lambda: target.copy_(data)) / 1e9
        note = f"{self.bucket_bytes >> 20} MiB buckets, plain copy {plain:.3g} GB/s"
        return self.bench.speed(statistics.median(rates), SHARE_OF_COPY * plain, "GB/s", note)

    @cached_property
    def _figures(self) -> tuple[str, list[str], list[float]]:
        """Transport, different parameters, and GB/s of each sync after the first, which compares checksums."""
        parent_end, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_serve, args=(child_end, str(self.bench.device)), daemon=True)
        process.start()
        child_end.close()
        try:
            engine = _Remote(parent_end)
            target: ProcessLocation = engine.call("location")
            source = current_location(str(self.bench.device))
            routes = Routes([source], [target])
            layout = ParallelLayout()
            plan = build_plan(WeightMap(self.model), layout, RolloutLayout(1), self.bucket_bytes, ELEMENT_BYTES)
            (part,) = receiver_plans(plan)
            engine.call("build", self.model, part, routes)
            trainer = _Trainer(self.model, plan, routes, self.bench.device)
            manager = ShardingManager(plan, trainer, _Engine(engine), SyncOptions(verify_freq=10**9, timeout_s=REPLY_S))
            manager.sync_weights()
            rates = [plan.nbytes / manager.sync_weights()["weight_sync/seconds"] / 1e9 for _ in range(SYNCS)]
            return routes.between(0, 0), engine.call("different"), rates
        finally:
            parent_end.close()
            process.join(5)
            process.kill()


def _random(params: Sequence[LocalParam], device: torch.device) -> dict[str, Tensor]:
    """Parameters with random bits, the same in every process of the device; padding is zero."""
    tensors = {}
    for param in params:
        generator = torch.Generator(device).manual_seed(zlib.crc32(param.name.encode()))
        limit = 2**15
        bits = torch.randint(-limit, limit, param.shape, dtype=torch.int16, device=device, generator=generator)
        mask = torch.zeros(param.shape, dtype=torch.bool, device=device)
        for piece in param.pieces:
            mask[tuple(slice(a, a + n) for a, n in zip(piece.at, piece.local_shape, strict=True))] = True
        tensors[param.name] = bits.masked_fill_(~mask, 0).view(DTYPE)
    return tensors


def _hf_tensors(model: ModelConfig, params: Sequence[LocalParam], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble checkpoint tensors from the parameters of one rank."""
    device = next(iter(tensors.values())).device
    shapes = WeightMap(model).hf_shapes()
    whole = {name: torch.zeros(shape, dtype=DTYPE, device=device) for name, shape in shapes.items()}
    for param in params:
        for piece in param.pieces:
            source = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.local_shape, strict=True))
            target = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            whole[piece.hf_name][target] = tensors[param.name][source].reshape(piece.shape)
    return whole


class _Done:
    """A result that is there already."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Return the value of the only rank."""
        return [self._value]


class _Trainer:
    """The training side, in this process."""

    def __init__(self, model: ModelConfig, plan: Any, routes: Routes, device: torch.device) -> None:
        self._params = WeightMap(model).export_params(ParallelLayout(), 0)
        self._tensors = _random(WeightMap(model).megatron_params(ParallelLayout(), 0), device)
        peers = PeerTransports.for_sender(routes, 0, destination_ranks(plan.sent_by(0)), device, None)
        self._sender = BucketSender(plan, 0, lambda: self._tensors, peers, DTYPE, device)

    def make_room(self) -> _Done:
        """Nothing to free."""
        return _Done()

    def open_transfer(self, session: int) -> _Done:
        """See the sender."""
        self._sender.open(session)
        return _Done()

    def export_bucket(self, index: int) -> _Done:
        """See the sender."""
        return _Done(self._sender.export_bucket(index))

    def checksums(self) -> _Done:
        """Checksums of the trainer's weights."""
        return _Done(partial_checksums(self._params, self._tensors, DTYPE, frozenset(), convert=True))

    def close_transfer(self, completed: bool) -> _Done:
        """See the sender."""
        return _Done(self._sender.close(completed))


class _Remote:
    """Calls of the engine's process, answered in order."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._answers: list[Any] = []
        self._started = 0

    def start(self, verb: str, *arguments: Any) -> partial[Any]:
        """Start a call; the result waits for its answer."""
        self._pipe.send((verb, arguments))
        self._started += 1
        return partial(self._answer, self._started - 1)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Start a call and wait for its answer.

        Raises:
            RuntimeError: the call failed in its process.
        """
        return self.start(verb, *arguments)()

    def _answer(self, number: int) -> Any:
        while len(self._answers) <= number:
            if not self._pipe.poll(REPLY_S):
                raise RuntimeError(f"the engine's process did not answer within {REPLY_S:.0f} s")
            succeeded, value = self._pipe.recv()
            if not succeeded:
                raise RuntimeError(f"in the engine's process: {value}")
            self._answers.append(value)
        return self._answers[number]


class _Pending:
    """Result of a call in the engine's process."""

    def __init__(self, answer: partial[Any]) -> None:
        self._answer = answer

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the value of the only rank."""
        return [self._answer()]


class _Engine:
    """The engine's side, in the other process."""

    def __init__(self, remote: _Remote) -> None:
        self._remote = remote

    def __getattr__(self, verb: str) -> Any:
        return lambda *arguments: _Pending(self._remote.start(verb, *arguments))

    @property
    def numbers(self) -> list[int]:
        """Number of the only replica."""
        return [0]

    def of_replicas(self, replicas: range) -> _Engine:
        """Return itself, the only replica."""
        return self

    def import_bucket(self, index: int, exported: _Done) -> _Pending:
        """Pass the messages of the only pair of ranks."""
        (messages,) = route_messages(exported.result()[0].values(), [0])
        return _Pending(self._remote.start("import_bucket", index, messages))


class _EngineProcess:
    """The verbs of the engine's process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def location(self) -> ProcessLocation:
        """Location of this process."""
        return current_location(str(self._device))

    def build(self, model: ModelConfig, plan: RankPlan, routes: Routes) -> None:
        """Build the engine's weights and their receiver."""
        self._model = model
        self._params = WeightMap(model).rollout_params(1, 0)
        self._store = WeightStore(self._params, DTYPE, self._device)
        self._store.allocate()
        spec = ReceiverSpec(plan, routes, None, str(DTYPE).removeprefix("torch."))
        self._receiver = BucketReceiver.connect(spec, self._store, self._device)

    def begin_update(self, version: int) -> None:
        """See the receiver."""
        self._receiver.begin(version)

    def open_transfer(self, session: int) -> None:
        """See the receiver."""
        self._receiver.open(session)

    def import_bucket(self, index: int, messages: Any) -> None:
        """See the receiver."""
        self._receiver.import_bucket(index, messages)

    def checksums(self) -> Any:
        """Checksums of the engine's weights."""
        return partial_checksums(self._params, self._store.tensors, DTYPE, frozenset(), convert=False)

    def close_transfer(self, completed: bool) -> TransferUsage:
        """See the receiver."""
        return self._receiver.close(completed)

    def end_update(self, version: int) -> None:
        """See the receiver."""
        self._receiver.end(version)

    def different(self) -> list[str]:
        """Checkpoint tensors that differ from the trainer's in any bit."""
        trained = WeightMap(self._model).megatron_params(ParallelLayout(), 0)
        expected = _hf_tensors(self._model, trained, _random(trained, self._device))
        present = _hf_tensors(self._model, self._params, self._store.tensors)
        return [n for n, t in expected.items() if not torch.equal(t.view(torch.int16), present[n].view(torch.int16))]


def _serve(pipe: Connection, device: str) -> None:
    """Answer calls until the pipe closes."""
    engine = _EngineProcess(torch.device(device))
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, getattr(engine, verb)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
