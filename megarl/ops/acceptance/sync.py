"""Weight sync from a trainer process to an engine process on one device: bit equality and GB/s.

On a GPU the weights travel by CUDA IPC, on a CPU by shared memory. The engine process draws the same random weights and
compares every element.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from multiprocessing.pool import Pool
from typing import Any

import torch
from torch import Tensor

from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, parse_model_config
from megarl.ops.acceptance.bench import Bench
from megarl.ops.acceptance.models import SHAPES, checkpoint_tensors
from megarl.ops.acceptance.results import Result, Verdict
from megarl.rollout.embedded.engine import WeightStore
from megarl.sharding.placement import ProcessLocation, RolloutLayout, Routes, current_location
from megarl.sharding.plan import RankPlan, ReshardPlan, build_plan, receiver_plans
from megarl.sharding.receiver import BucketReceiver, ReceiverSpec, route_messages
from megarl.sharding.sender import BucketSender, destination_ranks
from megarl.sharding.transports.interface import PeerTransports

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
        """Transport, different parameters, and GB/s of each sync after the first, which allocates memory."""
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, _start_engine, (str(self.bench.device),)) as pool:
            engine = _Remote(pool)
            target: ProcessLocation = engine.call("location")
            source = current_location(str(self.bench.device))
            routes = Routes([source], [target])
            layout = ParallelLayout()
            plan = build_plan(WeightMap(self.model), layout, RolloutLayout(1), self.bucket_bytes, ELEMENT_BYTES)
            (part,) = receiver_plans(plan)
            engine.call("build", self.model, part, routes)
            sender = _sender(self.model, plan, routes, self.bench.device)
            rates = [plan.nbytes / _sync(sender, engine, plan, version) / 1e9 for version in range(SYNCS + 1)]
            return routes.between(0, 0), engine.call("different"), rates[1:]


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


def _sender(model: ModelConfig, plan: ReshardPlan, routes: Routes, device: torch.device) -> BucketSender:
    tensors = _random(WeightMap(model).megatron_params(ParallelLayout(), 0), device)
    peers = PeerTransports.for_sender(routes, 0, destination_ranks(plan.sent_by(0)), device, None)
    return BucketSender(plan, 0, lambda: tensors, peers, DTYPE, device)


def _sync(sender: BucketSender, engine: _Remote, plan: ReshardPlan, version: int) -> float:
    """Run a sync as the sharding manager does, with two buckets in flight; return its seconds."""
    started, imports = time.perf_counter(), []
    engine.call("receive", "begin", version)
    sender.peers.open(0)
    engine.call("receive", "open", 0)
    for index in range(len(plan.buckets)):
        (messages,) = route_messages(sender.export_bucket(index).values(), [0])
        imports.append(engine.start("receive", "import_bucket", index, messages))
        if index:
            imports[index - 1]()  # the next bucket takes its memory
    imports[-1]()
    engine.call("receive", "close", True)
    sender.close(True)
    engine.call("receive", "end", version)
    return time.perf_counter() - started


class _Remote:
    """Calls of the engine's process, answered in order."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def start(self, verb: str, *arguments: Any) -> Callable[[], Any]:
        """Start a call; the result waits for its answer, or raises the call's error."""
        answer = self._pool.apply_async(_serve, (verb, *arguments))

        def wait() -> Any:
            try:
                return answer.get(REPLY_S)
            except multiprocessing.TimeoutError:
                raise RuntimeError(f"the engine's process did not answer within {REPLY_S:.0f} s") from None

        return wait

    def call(self, verb: str, *arguments: Any) -> Any:
        return self.start(verb, *arguments)()


class _EngineProcess:
    """The verbs of the engine's process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def location(self) -> ProcessLocation:
        return current_location(str(self._device))

    def build(self, model: ModelConfig, plan: RankPlan, routes: Routes) -> None:
        self._model = model
        self._params = WeightMap(model).rollout_params(1, 0)
        self._store = WeightStore(self._params, DTYPE, self._device)
        self._store.allocate()
        spec = ReceiverSpec(plan, routes, None, str(DTYPE).removeprefix("torch."))
        self._receiver = BucketReceiver.connect(spec, self._store, self._device)

    def receive(self, command: str, *arguments: Any) -> Any:
        target = self._receiver.peers if command == "open" else self._receiver
        return getattr(target, command)(*arguments)

    def different(self) -> list[str]:
        """Checkpoint tensors that differ from the trainer's in any bit."""
        trained = WeightMap(self._model).megatron_params(ParallelLayout(), 0)
        expected = checkpoint_tensors(self._model, trained, _random(trained, self._device))
        present = checkpoint_tensors(self._model, self._params, self._store.tensors)
        return [n for n, t in expected.items() if not torch.equal(t.view(torch.int16), present[n].view(torch.int16))]


_ENGINE: list[_EngineProcess] = []  # of the engine's process


def _start_engine(device: str) -> None:
    _ENGINE.append(_EngineProcess(torch.device(device)))


def _serve(verb: str, *arguments: Any) -> Any:
    return getattr(_ENGINE[0], verb)(*arguments)
