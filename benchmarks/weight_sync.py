"""How fast weights go from Megatron's layout into the engines', beside a plain copy of as many bytes.

    python benchmarks/weight_sync.py [--transports auto gloo inline] [--bucket-megabytes 64] [--layers 8]

A Llama of about 1 GB in bfloat16 with random weights, its real weight map, TP2 PP2 on one side and one engine at TP1 or
TP2 on the other: a process per rank and real transports, with pipes in the place of Ray. ``plain copy`` is the limit
of shared memory: as many processes copy as many bytes, each sender from one flat tensor into memory that is mapped
already, then each receiver from there into one flat tensor. Both sides are run in turn, so that a loaded machine slows
both; figures are medians over the rounds, and what counts is the ratio.

``extra`` is the most memory that a process needed besides its weights in the first sync, as the kernel counts it: its
peak resident size, less what it had before and less the pages of others that it has mapped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

# Two processes with a thread each per core are faster than one with many; read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from machine import processor

from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, parse_model_config
from megarl.sharding import ReshardPlan, RolloutLayout, Routes, ShardingManager, SyncOptions, build_plan

TRAIN = ParallelLayout(tp=2, pp=2)
DTYPE, ELEMENT_BYTES = "bfloat16", 2
PIECE_BYTES = 1 << 20


def model(layers: int) -> ModelConfig:
    """A Llama with wide layers; eight of them are 1.0 GB."""
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
    )


def random_tensors(params: Sequence[LocalParam], rank: int) -> dict[str, Any]:
    """Parameters of random bits; vectors, which all ranks of a stage hold, are the same on each."""
    import torch

    tensors = {}
    for param in params:
        generator = torch.Generator().manual_seed(zlib.crc32(param.name.encode()) + rank * (len(param.shape) > 1))
        bits = torch.randint(-(2**15), 2**15, param.shape, dtype=torch.int16, generator=generator)
        tensors[param.name] = bits.view(torch.bfloat16)
    return tensors


class Memory:
    """What the kernel says of this process's memory, in bytes."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak starts anew
        self.before = self._read()

    def extra(self, own_shared: int) -> int:
        """Peak since the object was made, besides what there was; ``own_shared`` bytes of shared memory are its own."""
        now = self._read()
        others = now["RssShmem"] - self.before["RssShmem"] - own_shared
        return now["VmHWM"] - self.before["VmRSS"] - max(0, others)

    @staticmethod
    def _read() -> dict[str, int]:
        with open("/proc/self/status", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssShmem")}


class TrainingRank:
    """One training rank: its weights, its side of the sync, and a flat tensor for the plain copy."""

    def __init__(self, rank: int, config: ModelConfig, plan: ReshardPlan, routes: Routes, address: Any) -> None:
        import torch

        from megarl.sharding.links import Links
        from megarl.sharding.sender import BucketSender, destinations
        from megarl.sharding.transports import HostBuffer

        torch.set_num_threads(1)
        self.params = WeightMap(config).export_params(TRAIN, rank)
        self.tensors = random_tensors(WeightMap(config).megatron_params(TRAIN, rank), rank)
        sent, device = plan.sent_by(rank), torch.device("cpu")
        links = Links.of_trainer(routes, rank, destinations(sent), device, address)
        self.sender = BucketSender(plan, rank, lambda: self.tensors, links, torch.bfloat16)
        nbytes = sum(move_bytes(bucket.moves) for bucket in sent)
        self.flat = torch.ones(nbytes, dtype=torch.uint8)
        self.segment = HostBuffer(nbytes)
        self.segment.data.fill_(1)
        self.memory = Memory()

    def where(self) -> tuple[int, int, str, int]:
        """Where receivers find the memory of the plain copy."""
        return os.getpid(), self.segment.fd, self.segment.name, len(self.flat)

    def copy(self) -> None:
        """The sender's half of the plain copy."""
        self.segment.data.copy_(self.flat)

    def open(self, session: int) -> None:
        """See the sender."""
        self.sender.open(session)

    def export_bucket(self, index: int) -> Any:
        """See the sender."""
        return self.sender.export_bucket(index)

    def release_bucket(self, index: int) -> None:
        """See the sender."""
        self.sender.release_bucket(index)

    def checksums(self) -> Any:
        """What this rank holds."""
        import torch

        from megarl.sharding.verification import shares_of

        return shares_of(self.params, self.tensors, torch.bfloat16, frozenset(), convert=True)

    def close(self, completed: bool) -> int:
        """See the sender."""
        return self.sender.close(completed)

    def extra(self) -> int:
        """Peak memory besides the weights."""
        return self.memory.extra(sum(pool.held_bytes for pool in self.sender.pools.values()))


class RolloutRank:
    """One rollout rank: the embedded engine's weights, its side of the sync, and a flat tensor for the plain copy."""

    def __init__(
        self, rank: int, config: ModelConfig, tp: int, plan: ReshardPlan, routes: Routes, address: Any
    ) -> None:
        import torch

        from megarl.rollout.embedded.weights import WeightStore
        from megarl.sharding.links import Links
        from megarl.sharding.receiver import BucketReceiver, ReplicaReceiver, largest_bucket, sources

        torch.set_num_threads(1)
        self.params = WeightMap(config).rollout_params(tp, rank)
        self.store = WeightStore(self.params, torch.bfloat16, torch.device("cpu"))
        self.store.allocate()
        for tensor in self.store.tensors.values():
            tensor.fill_(1)  # the kernel gives zeros no memory
        received = plan.received_by(rank)
        size = largest_bucket(received, torch.bfloat16, frozenset())
        links = Links.of_rollout(routes, rank, sources(received), torch.device("cpu"), address, size)
        own = BucketReceiver(plan, rank, self.params, self, links, torch.bfloat16)
        self.receiver = ReplicaReceiver(self, [own])
        self.memory = Memory()

    def map(self, segments: Sequence[tuple[int, int, str, int]], shares: Sequence[tuple[int, int]]) -> None:
        """Gets ready for the plain copy: of each sender's memory the bytes from one number to another."""
        import torch

        from megarl.sharding.transports.interface import TransportOptions
        from megarl.sharding.transports.shared_memory import SharedMemoryTransport, SharedPayload

        transport = SharedMemoryTransport(TransportOptions())
        payloads = {
            rank: SharedPayload(*where, *share)
            for rank, (where, share) in enumerate(zip(segments, shares, strict=True))
        }
        self.mapped = [data for _, data in transport.receive(payloads)]
        self.flat = torch.ones(sum(len(data) for data in self.mapped), dtype=torch.uint8)

    def copy(self) -> None:
        """The receiver's half of the plain copy."""
        for part, data in zip(self.flat.split([len(data) for data in self.mapped]), self.mapped, strict=True):
            part.copy_(data)

    def begin_update(self, version: int) -> None:
        """Begins an update, of the engine's weights or by way of the receiver."""
        self.store.begin(version)

    def update_weights(self, updates: Any, rank: int) -> None:
        """Of the engine's weights."""
        self.store.write(updates)

    def end_update(self, version: int) -> None:
        """Of the engine's weights."""
        self.store.end(version)

    def begin(self, version: int) -> None:
        """See the receiver."""
        self.receiver.begin_update(version)

    def open(self, session: int) -> None:
        """See the receiver."""
        self.receiver.open(session)

    def import_bucket(self, index: int, shipments: Any) -> None:
        """See the receiver."""
        self.receiver.import_bucket(index, shipments)

    def checksums(self) -> Any:
        """What the engine holds."""
        import torch

        from megarl.sharding.verification import shares_of

        return shares_of(self.params, self.store.tensors, torch.bfloat16, frozenset(), convert=False)

    def close(self, completed: bool) -> int:
        """See the receiver."""
        return self.receiver.close(completed)

    def end(self, version: int) -> None:
        """See the receiver."""
        self.receiver.end_update(version)

    def extra(self) -> int:
        """Peak memory besides the weights."""
        return self.memory.extra(0)


def move_bytes(moves: Sequence[Any]) -> int:
    """Bytes of moves."""
    import math

    return sum(math.prod(move.shape) for move in moves) * ELEMENT_BYTES


def post(pipe: Connection, content: Any) -> None:
    """Sends an object; large arrays go from where they lie, in pieces, without a copy of the whole."""
    parts: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, 5, buffer_callback=parts.append)
    raws = [part.raw() for part in parts]
    pipe.send((head, [raw.nbytes for raw in raws]))
    for raw in raws:
        for start in range(0, raw.nbytes, PIECE_BYTES):
            pipe.send_bytes(raw[start : start + PIECE_BYTES])


def take(pipe: Connection) -> Any:
    """What :func:`post` sent; large arrays arrive in the memory that they stay in, as they do in Ray."""
    head, sizes = pipe.recv()
    parts = [bytearray(size) for size in sizes]
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            pipe.recv_bytes_into(part, start)
    return pickle.loads(head, buffers=parts)


def serve(pipe: Connection, build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A process: builds its rank and does what it is told."""
    rank: Any = None
    try:
        rank = build(*arguments)
        post(pipe, None)
        while True:
            verb, given = take(pipe)
            post(pipe, getattr(rank, verb)(*given))
            del given
    except EOFError:
        return
    except Exception as error:
        post(pipe, error)
        raise


class Answers:
    """What some processes will answer, each in its turn."""

    def __init__(self, ranks: Ranks, ticket: int) -> None:
        self.ranks, self.ticket = ranks, ticket

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Waits for it."""
        return self.ranks.answers(self.ticket)


class Ranks:
    """The processes of one side."""

    def __init__(self, build: Callable[..., Any], count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, build, (rank, *arguments)), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.asked, self.answered = 1, 0
        self.known: dict[int, list[Any]] = {}

    def ask(self, verb: str, *given: Any, each: Sequence[tuple[Any, ...]] = ()) -> Answers:
        """Starts a verb on all processes; ``each`` are further arguments of each."""
        for rank, pipe in enumerate(self.pipes):
            post(pipe, (verb, (*given, *(each[rank] if each else ()))))
        self.asked += 1
        return Answers(self, self.asked - 1)

    def answers(self, ticket: int) -> list[Any]:
        """What all processes answered to the call of that number."""
        while self.answered <= ticket:
            self.known[self.answered] = [take(pipe) for pipe in self.pipes]
            for answer in self.known[self.answered]:
                if isinstance(answer, Exception):
                    raise answer
            self.answered += 1
        return self.known.pop(ticket)

    def __call__(self, verb: str, *given: Any, each: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Runs a verb on all processes."""
        return self.ask(verb, *given, each=each).result()

    def stop(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()


class Source:
    """The training ranks, for the manager."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.make_room = lambda: ranks.ask("where")
        self.open_transfer = lambda session: ranks.ask("open", session)
        self.export_bucket = lambda index: ranks.ask("export_bucket", index)
        self.release_bucket = lambda index: ranks.ask("release_bucket", index)
        self.checksums = lambda: ranks.ask("checksums")
        self.close_transfer = lambda completed: ranks.ask("close", completed)


class Target:
    """The rollout ranks, for the manager."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.begin_update = lambda version: ranks.ask("begin", version)
        self.open_transfer = lambda session: ranks.ask("open", session)
        self.checksums = lambda: ranks.ask("checksums")
        self.close_transfer = lambda completed: ranks.ask("close", completed)
        self.end_update = lambda version: ranks.ask("end", version)

    def import_bucket(self, index: int, exported: Answers) -> Answers:
        """Gives each rank what is for it."""
        from megarl.sharding.receiver import route_shipments

        routed: Mapping[int, Any] = route_shipments(exported.result())
        return self.ranks.ask("import_bucket", index, each=[(routed.get(r, []),) for r in range(len(self.ranks.pipes))])


def plain_shares(plan: ReshardPlan, tp: int) -> list[list[tuple[int, int]]]:
    """For each rollout rank, which bytes of each training rank's flat tensor it copies."""
    sent = [[0] * tp for _ in range(TRAIN.world_size)]
    for source, target, nbytes in zip(*(column.tolist() for column in plan.pair_nbytes()), strict=True):
        sent[source][target] = nbytes
    return [[(sum(row[:rank]), sum(row[: rank + 1])) for row in sent] for rank in range(tp)]


def measure(config: ModelConfig, tp: int, transport: str, bucket: int, rounds: int) -> dict[str, float]:
    """One engine layout and transport: medians of both sides, and the memory of the first sync."""
    from megarl.sharding.links import Address
    from megarl.sharding.places import this_place
    from megarl.sharding.transports import host_store

    plan = build_plan(WeightMap(config), TRAIN, RolloutLayout(tp), bucket, ELEMENT_BYTES)
    routes = Routes([this_place()] * TRAIN.world_size, [this_place()] * tp, transport)
    store = host_store("127.0.0.1") if routes.need_meeting() else None
    address = Address("127.0.0.1", store.port) if store else None
    train = Ranks(TrainingRank, TRAIN.world_size, config, plan, routes, address)
    rollout = Ranks(RolloutRank, tp, config, tp, plan, routes, address)
    train.answers(0), rollout.answers(0)
    manager = ShardingManager(plan, Source(train), Target(rollout), SyncOptions(verify_freq=10**9, replica_size=tp))
    verified = manager.sync_weights()  # the first, whose checksums are compared
    extra = max(train("extra")), max(rollout("extra"))
    segments = train("where")
    rollout("map", segments, each=[(shares,) for shares in plain_shares(plan, tp)])
    seconds: dict[str, list[float]] = {"plain": [], "sync": []}
    for _ in range(rounds):
        with clock(seconds["plain"]):
            train("copy")
            rollout("copy")
        seconds["sync"].append(manager.sync_weights()["weight_sync/seconds"])
    for ranks in (train, rollout):
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
        "send": extra[0] / 2**20,
        "receive": extra[1] / 2**20,
        "peak_mb": verified["weight_sync/peak_mb"],
        "first": verified["weight_sync/seconds"],
    }


class clock:
    """Appends the seconds of a block."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["auto", "gloo", "inline"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2], help="tensor-parallel sizes of the engine")
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    bucket = options.bucket_megabytes * 2**20
    print(f"{processor()}, {os.cpu_count()} cores; {TRAIN.describe()}, buckets of {options.bucket_megabytes} MiB")
    print(
        "engine  transport        GB  buckets  plain GB/s  sync GB/s  of plain  "
        "extra MiB: sender  receiver  metric  limit  first sync with checksums"
    )
    for tp in options.tp:
        for transport in options.transports:
            row = measure(model(options.layers), tp, transport, bucket, options.rounds + 1)
            print(
                f"TP{tp:<6}{transport:<15}{row['GB']:5.2f}{row['buckets']:9.0f}{row['plain']:12.2f}{row['sync']:11.2f}"
                f"{row['ratio']:9.0%}{row['send']:20.0f}{row['receive']:10.0f}{row['peak_mb']:8.0f}"
                f"{2 * options.bucket_megabytes:7d}{row['first']:12.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
