"""Speed of a weight sync from Megatron's layout to real engines, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py [--engines embedded sglang] [--transports auto gloo inline] [--layers 8]

The model is a Llama of about 1 GB in bfloat16 with random weights and its real weight map. It goes from TP2 PP2 to one
replica of the embedded engine, of SGLang TP1 and of SGLang TP2 (if SGLang is installed), with real transports; pipes
replace Ray. ``plain copy`` is the limit of shared memory: as many processes as the replica has ranks copy the same
bytes. Each sender copies from a flat tensor into mapped memory, then each receiver copies from there into a flat
tensor. Both sides run in turn, so that a loaded machine slows both. Figures are medians over the rounds; the ratio
matters. ``core-s/GB`` is the processor time of all processes of the copy, and of the sync, which other load changes
less than the seconds.

``extra`` is the maximum memory of a process in the first sync, without its weights, as the kernel counts it: peak
resident size, minus the size before, minus mapped pages of other processes. ``metric`` is ``weight_sync/peak_mb``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Two processes with a thread each per core are faster than one with many; read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from machine import benchmark_parser, parse_sizes, processor

from megarl.base.packages import is_installed
from megarl.cluster.sharding_manager import ShardingManager, SyncOptions
from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, read_model_config
from megarl.rollout import EngineOptions, create_engine
from megarl.rollout.registry import engine_vocab_multiple
from megarl.sharding.placement import RolloutLayout, Routes
from megarl.sharding.plan import ReshardPlan, build_plan

TRAIN = ParallelLayout(tp=2, pp=2)
DTYPE, ELEMENT_BYTES = "bfloat16", 2
PIECE_BYTES = 1 << 20


ENGINES = {"embedded": (1,), "sglang": (1, 2)}
"""Tensor-parallel sizes to measure, by engine."""


def write_model(folder: Path, layers: int, vocabulary: int) -> ModelConfig:
    """Write the config of a Llama with wide layers; eight layers are 1.0 GB."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_model_config(folder)


def random_tensors(params: Sequence[LocalParam], rank: int) -> dict[str, Any]:
    """Return parameters of random bits; vectors are equal on all ranks of a stage."""
    import torch

    tensors = {}
    for param in params:
        generator = torch.Generator().manual_seed(zlib.crc32(param.name.encode()) + rank * (len(param.shape) > 1))
        bits = torch.randint(-(2**15), 2**15, param.shape, dtype=torch.int16, generator=generator)
        tensors[param.name] = bits.view(torch.bfloat16)
    return tensors


class Memory:
    """The kernel's memory counters of a process, in bytes."""

    def __init__(self, pid: int) -> None:
        self.folder = f"/proc/{pid}"
        with Path(f"{self.folder}/clear_refs").open("w", encoding="ascii") as file:
            file.write("5")  # resets the peak
        self.before = self._read()

    def extra(self, own_shared: int) -> int:
        """Return the peak since creation, without earlier memory; ``own_shared`` bytes of shared memory count."""
        now = self._read()
        others = now["RssShmem"] - self.before["RssShmem"] - own_shared
        return now["VmHWM"] - self.before["VmRSS"] - max(0, others)

    def _read(self) -> dict[str, int]:
        with Path(f"{self.folder}/status").open(encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssShmem")}


def core_seconds(pids: Collection[int]) -> float:
    """Return the processor time of all threads of some processes, as the kernel counts it."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


class TrainingRank:
    """A training rank: its weights, its side of the sync, and a flat tensor for the plain copy."""

    def __init__(self, rank: int, config: ModelConfig, plan: ReshardPlan, routes: Routes, address: Any) -> None:
        import torch

        from megarl.sharding.sender import BucketSender, destination_ranks
        from megarl.sharding.transports.interface import PeerTransports, SharedHostBuffer

        torch.set_num_threads(1)
        self.params = WeightMap(config).export_params(TRAIN, rank)
        self.tensors = random_tensors(WeightMap(config).megatron_params(TRAIN, rank), rank)
        sent, device = plan.sent_by(rank), torch.device("cpu")
        peers = PeerTransports.for_sender(routes, rank, destination_ranks(sent), device, address)
        self.sender = BucketSender(plan, rank, lambda: self.tensors, peers, torch.bfloat16, device)
        nbytes = sum(op_bytes(bucket.ops) for bucket in sent)
        self.flat = torch.ones(nbytes, dtype=torch.uint8)
        self.segment = SharedHostBuffer(nbytes)
        self.segment.data.fill_(1)
        self.memory = Memory(os.getpid())

    def where(self) -> tuple[int, int, str, int]:
        """Return the address of the plain copy's memory, for receivers."""
        return os.getpid(), self.segment.fd, self.segment.name, len(self.flat)

    def copy(self) -> None:
        """Run the sender's half of the plain copy."""
        self.segment.data.copy_(self.flat)

    def make_room(self) -> None:
        """Free nothing: each side has its own memory."""

    def open_transfer(self, session: int) -> None:
        """See the sender."""
        self.sender.peers.open(session)

    def export_bucket(self, index: int) -> Any:
        """See the sender."""
        return self.sender.export_bucket(index)

    def weight_shares(self) -> Any:
        """Return the checksums of this rank's weights."""
        import torch

        from megarl.sharding.verification import partial_checksums

        return partial_checksums(self.params, self.tensors, torch.bfloat16, frozenset(), convert=True)

    def close_transfer(self, completed: bool) -> Any:
        """See the sender."""
        return self.sender.close(completed)

    def extra(self) -> int:
        """Return the peak memory without the weights."""
        return self.memory.extra(sum(pool.held_bytes for pool in self.sender.pools.values()))


class Copier:
    """Copies its share of the senders' memory into a flat tensor, as the receiver of the plain copy."""

    def __init__(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)

    def map(self, segments: Sequence[tuple[int, int, str, int]], shares: Sequence[tuple[int, int]]) -> None:
        """Prepare the plain copy of a byte range of each sender's memory."""
        import torch

        from megarl.sharding.transports.interface import TransportOptions
        from megarl.sharding.transports.memory import SharedMemoryHandle, SharedMemoryTransport

        transport = SharedMemoryTransport(TransportOptions(torch.device("cpu")))
        handles = {
            rank: SharedMemoryHandle(*where, *share)
            for rank, (where, share) in enumerate(zip(segments, shares, strict=True))
        }
        self.mapped = [data for _, data in transport.receive(handles)]
        self.flat = torch.ones(sum(len(data) for data in self.mapped), dtype=torch.uint8)

    def copy(self) -> None:
        """Run the receiver's half of the plain copy."""
        for part, data in zip(self.flat.split([len(data) for data in self.mapped]), self.mapped, strict=True):
            part.copy_(data)


class Replica:
    """A rollout replica: the control process of a real engine."""

    def __init__(self, rank: int, name: str, folder: str, tp: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.engine = create_engine(name, folder, EngineOptions(DTYPE, tensor_parallel_size=tp, max_model_len=1024))
        self.params = [
            WeightMap(read_model_config(folder)).rollout_params(tp, rank, vocab_multiple=engine_vocab_multiple(name))
            for rank in range(tp)
        ]
        backend = getattr(self.engine, "_backend", None)
        self.pids = [os.getpid()] if backend is None else [process.pid for process in backend._processes[:tp]]

        receiver = self.receiver = self.engine.receiver
        self.locations, self.connect = lambda: list(receiver.locations), receiver.connect
        self.begin_update, self.open_transfer = receiver.begin, receiver.open
        self.import_bucket, self.close_transfer, self.end_update = receiver.import_bucket, receiver.close, receiver.end
        self.shutdown = self.engine.shutdown

    def weight_shares(self) -> list[Any]:
        """Return the checksums of each rank's weights."""
        from megarl.sharding.verification import checksums_by_name, weight_rectangles

        sums = self.engine.rectangle_checksums([weight_rectangles(params, DTYPE, ()) for params in self.params])
        return [checksums_by_name(params, own) for params, own in zip(self.params, sums, strict=True)]

    def watch(self) -> list[int]:
        """Start counting the ranks' memory; return their processes."""
        self.memory = [Memory(pid) for pid in self.pids]
        return self.pids

    def extra(self) -> int:
        """Return the peak memory of a rank without the weights."""
        return max(memory.extra(0) for memory in self.memory)


def op_bytes(ops: Sequence[Any]) -> int:
    """Return the bytes of transfers."""
    import math

    return sum(math.prod(op.shape) for op in ops) * ELEMENT_BYTES


def post(pipe: Connection, content: Any) -> None:
    """Send an object; large arrays are sent in pieces, without a copy of the whole."""
    parts: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, 5, buffer_callback=parts.append)
    raws = [part.raw() for part in parts]
    pipe.send((head, [raw.nbytes for raw in raws]))
    for raw in raws:
        for start in range(0, raw.nbytes, PIECE_BYTES):
            pipe.send_bytes(raw[start : start + PIECE_BYTES])


def take(pipe: Connection) -> Any:
    """Receive an object of :func:`post`; large arrays arrive in their final memory, as in Ray."""
    head, sizes = pipe.recv()
    parts = [bytearray(size) for size in sizes]
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            pipe.recv_bytes_into(part, start)
    return pickle.loads(head, buffers=parts)


def serve(pipe: Connection, build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Build the rank of a process and execute its calls."""
    rank: Any = None
    try:
        rank = build(*arguments)
        post(pipe, None)
        while (call := take(pipe)) is not None:
            verb, values = call
            post(pipe, getattr(rank, verb)(*values))
            del call, values
    except EOFError:
        return
    except Exception as error:
        post(pipe, error)
        raise
    finally:
        if isinstance(rank, Replica):
            rank.shutdown()


class Answers:
    """Results that some processes will return, in order."""

    def __init__(self, ranks: Ranks, ticket: int) -> None:
        self.ranks, self.ticket = ranks, ticket

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the results."""
        return self.ranks.answers(self.ticket)


class Ranks:
    """The processes of one side."""

    def __init__(self, build: Callable[..., Any], count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            parent_pipe, child_pipe = context.Pipe()
            process = context.Process(target=serve, args=(child_pipe, build, (rank, *arguments)))
            process.start()
            child_pipe.close()
            self.pipes.append(parent_pipe)
            self.processes.append(process)
        self.sent, self.answered = 1, 0
        self.results: dict[int, list[Any]] = {}

    def start(self, verb: str, *arguments: Any, each: Sequence[tuple[Any, ...]] = ()) -> Answers:
        """Start a verb on all processes; ``each`` has additional arguments by process."""
        for rank, pipe in enumerate(self.pipes):
            post(pipe, (verb, (*arguments, *(each[rank] if each else ()))))
        self.sent += 1
        return Answers(self, self.sent - 1)

    def answers(self, ticket: int) -> list[Any]:
        """Return the results of all processes for a call, by its number."""
        while self.answered <= ticket:
            self.results[self.answered] = [take(pipe) for pipe in self.pipes]
            for answer in self.results[self.answered]:
                if isinstance(answer, Exception):
                    raise answer
            self.answered += 1
        return self.results.pop(ticket)

    def __call__(self, verb: str, *arguments: Any, each: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Run a verb on all processes."""
        return self.start(verb, *arguments, each=each).result()

    # What the sharding manager calls of a worker group. Both sides have one group of processes.

    @property
    def ranks(self) -> list[int]:
        """Numbers of the processes."""
        return list(range(len(self.pipes)))

    def submit_on(self, ranks: Sequence[int], verb: str, *arguments: Any, after_failure: bool = False) -> Answers:
        """Start a verb on all processes."""
        assert list(ranks) == self.ranks
        return self.start(verb, *arguments)

    def submit_scatter(self, verb: str, receivers: Mapping[int, Sequence[int]], width: int, *arguments: Any) -> Answers:
        """Start a verb that returns messages by destination."""
        return self.start(verb, *arguments)

    def submit_gather(self, verb: str, exported: Answers, index: int, **places: Any) -> Answers:
        """Pass the only replica its messages."""
        messages = [message for export in exported.result() for message in export.values()]
        return self.start(verb, index, messages)

    @property
    def pids(self) -> list[int]:
        """Process numbers."""
        return [process.pid for process in self.processes if process.pid is not None]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            post(pipe, None)
        for process in self.processes:
            process.join()


def plain_shares(plan: ReshardPlan, tp: int) -> list[list[tuple[int, int]]]:
    """Return, for each rollout rank, the byte range of each training rank's flat tensor that it copies."""
    sent = [[0] * tp for _ in range(TRAIN.world_size)]
    for source, target, nbytes in zip(*(column.tolist() for column in plan.pair_nbytes()), strict=True):
        sent[source][target] = nbytes
    return [[(sum(row[:rank]), sum(row[: rank + 1])) for row in sent] for rank in range(tp)]


def measure(
    config: ModelConfig, folder: Path, engine: str, tp: int, transport: str, bucket: int, rounds: int
) -> dict[str, float]:
    """Measure one engine and transport: medians of both sides, and the memory of the first sync."""
    from megarl.base.rendezvous import host_store
    from megarl.sharding.placement import current_location
    from megarl.sharding.plan import receiver_plans
    from megarl.sharding.receiver import ReceiverSpec
    from megarl.sharding.transports.interface import StoreAddress

    replica = Ranks(Replica, 1, engine, str(folder), tp)
    replica.answers(0)
    layout = RolloutLayout(tp, vocab_multiple=engine_vocab_multiple(engine))
    plan = build_plan(WeightMap(config), TRAIN, layout, bucket, ELEMENT_BYTES)
    routes = Routes([current_location()] * TRAIN.world_size, replica("locations")[0], transport)
    store = host_store("127.0.0.1") if routes.needs_rendezvous() else None
    address = StoreAddress("127.0.0.1", store.port) if store else None
    train = Ranks(TrainingRank, TRAIN.world_size, config, plan, routes, address)
    copiers = Ranks(Copier, tp)
    train.answers(0), copiers.answers(0)
    replica("connect", [ReceiverSpec(part, routes, address, DTYPE) for part in receiver_plans(plan)])
    (engine_pids,) = replica("watch")
    manager = ShardingManager(plan, train, replica, SyncOptions(verify_freq=10**9))
    verified = manager.sync_weights()  # the first sync compares checksums
    extra = max(train("extra")), max(replica("extra"))
    segments = train("where")
    copiers("map", segments, each=[(shares,) for shares in plain_shares(plan, tp)])
    seconds: dict[str, list[float]] = {"plain": [], "sync": []}
    cores: dict[str, list[float]] = {"plain": [], "sync": []}
    copying = {os.getpid(), *train.pids, *copiers.pids}
    syncing = {os.getpid(), *train.pids, *replica.pids, *engine_pids}
    for _ in range(rounds):
        with clock(seconds["plain"]), clock(cores["plain"], lambda: core_seconds(copying)):
            train("copy")
            copiers("copy")
        with clock(seconds["sync"]), clock(cores["sync"], lambda: core_seconds(syncing)):
            manager.sync_weights()
    for ranks in (train, copiers, replica):
        ranks.stop()
    gigabytes = plan.nbytes / 1e9
    plain, sync = (gigabytes / statistics.median(times[1:]) for times in seconds.values())
    ratio = statistics.median(p / s for p, s in zip(seconds["plain"][1:], seconds["sync"][1:], strict=True))
    return {
        "GB": gigabytes,
        "buckets": len(plan.buckets),
        "plain": plain,
        "sync": sync,
        "ratio": ratio,
        **{f"{side} core-s": statistics.median(used[1:]) / gigabytes for side, used in cores.items()},
        "send": extra[0] / 2**20,
        "receive": extra[1] / 2**20,
        "peak_mb": verified["weight_sync/peak_mb"],
        "first": verified["weight_sync/seconds"],
    }


@contextlib.contextmanager
def clock(durations: list[float], now: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Append the duration of a block, by a clock."""
    started = now()
    yield
    durations.append(now() - started)


def main() -> None:
    parser = benchmark_parser(__doc__)
    installed = [name for name in ENGINES if name != "sglang" or is_installed("sglang")]
    parser.add_argument("--engines", nargs="+", default=installed, choices=ENGINES)
    parser.add_argument("--transports", nargs="+", default=["auto", "gloo", "inline"])
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=6)
    small = {"bucket_megabytes": 64, "layers": 2, "vocabulary": 512, "rounds": 1}
    options = parse_sizes(parser, engines=["embedded"], transports=["auto"], **small)
    bucket = options.bucket_megabytes * 2**20
    print(f"{processor()}, {os.cpu_count()} cores; {TRAIN.describe()}, buckets of {options.bucket_megabytes} MiB")
    print(
        "engine         transport        GB  buckets  plain GB/s  sync GB/s  of plain  core-s/GB: plain  sync  "
        "extra MiB: sender  receiver  metric  limit  first sync with checksums"
    )
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        config = write_model(folder, options.layers, options.vocabulary)
        for engine in options.engines:
            for tp, transport in ((tp, transport) for tp in ENGINES[engine] for transport in options.transports):
                row = measure(config, folder, engine, tp, transport, bucket, options.rounds + 1)
                print(
                    f"{engine:<9}TP{tp:<4}{transport:<15}{row['GB']:5.2f}{row['buckets']:9.0f}{row['plain']:12.2f}"
                    f"{row['sync']:11.2f}{row['ratio']:9.0%}{row['plain core-s']:18.3f}{row['sync core-s']:6.3f}"
                    f"{row['send']:20.0f}{row['receive']:10.0f}"
                    f"{row['peak_mb']:8.0f}{2 * options.bucket_megabytes:7d}{row['first']:12.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
