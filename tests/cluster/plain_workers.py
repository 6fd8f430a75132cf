"""Worker classes for the cluster tests: plain, without Ray or Megatron."""

import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import megarl
from megarl.base.image_tokens import image_key
from megarl.cluster import fork_server
from megarl.data import DataProto, sequence_lengths
from megarl.data.column_store import ragged_columns
from megarl.tracing import TRACER
from megarl.workers.dispatch import Dispatch, verb


def samples(lengths, seed=0):
    """Rows with three prompt tokens, and response tokens as many as ``lengths`` says."""
    random = np.random.default_rng(seed)
    rows = {
        "prompts": [random.integers(1, 100, 3) for _ in lengths],
        "responses": [random.integers(1, 100_000, length) for length in lengths],
    }
    return DataProto(ragged_columns(rows, {}), {"uid": np.array([*map(str, range(len(lengths)))], dtype=object)})


def squares_of_rows(batch, factor):
    """A row function: squares of the tokens, their sums by row, and the process and its number of rows."""
    squares = batch.packed("responses", torch.float32) ** 2 * factor
    sums = torch.stack([row.sum() for row in squares.split(sequence_lengths(batch)[1].tolist())])
    columns = batch.token_columns({"returns": squares}).with_columns({"sums": sums})
    return columns, (os.getpid(), len(batch))


def sums_of_groups(batch):
    """A row function over whole groups: sums of the tokens of each row's group, and the groups."""
    groups, totals = batch.non_tensor_batch["uid"].tolist(), {}
    for group, row in zip(groups, batch.unpadded("responses"), strict=True):
        totals[group] = totals.get(group, 0) + int(row.sum())
    return DataProto.from_dict({"totals": torch.tensor([totals[group] for group in groups])}), set(groups)


def failing_rows(batch):
    """A row function that fails."""
    raise ValueError(f"{len(batch)} rows, columns {sorted(batch.tensors)}")


def megarl_frames():
    """Names of megarl's frames on the stack, outermost first, without those that every forked process has."""
    package = f"{Path(megarl.__file__).parent}/"
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(package)]
    names = [frame.name for frame in frames if frame.filename != fork_server.__file__]
    return [name for name in names if name != "<listcomp>"]  # no frame of its own from Python 3.12 on


class Echo:
    """Returns its arguments; needs no process group."""

    def __init__(self, place, greeting="hello"):
        self.rank, self.world_size, self.greeting = place.rank, place.world_size, greeting
        self.address = (place.master_addr, place.master_port)
        self.chunk_rows = []

    @verb(Dispatch.ALL)
    def about(self):
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
        )
        env = {name: os.environ.get(name) for name in names}
        return {"rank": self.rank, "address": self.address, "greeting": self.greeting, "pid": os.getpid(), "env": env}

    @verb(Dispatch.ALL)
    def received(self, *values, **named):
        return self.rank, values, named

    @verb(Dispatch.ONE)
    def who_answers(self):
        return self.rank

    @verb(Dispatch.SPLIT)
    def double(self, batch, factor=2):
        tokens = batch.batch["tokens"] * factor
        rows = batch.non_tensor_batch["uid"]
        return DataProto.from_dict({"doubled": tokens}, {"seen": rows}, {"by": self.rank})

    @verb(Dispatch.SPLIT, columns=("prompts", "responses", "attention_mask", "values"))
    def add_up(self, batch):
        """Sums of the tokens up to each response token, plus earlier values of the tokens."""
        rows = batch.unpadded("responses", torch.float32)
        sums = torch.cat([row.cumsum(0) for row in rows])
        earlier = batch.packed("values") if "values" in batch.tensors else torch.zeros_like(sums)
        return batch.token_columns({"values": sums + earlier})

    @verb(Dispatch.SPLIT, columns=("prompts", "responses", "attention_mask", "images"))
    def view(self, batch):
        """Digests of the files of each row's images, which every rank reads."""
        rows = batch.non_tensor_batch["images"]
        return DataProto.from_dict({}, {"digests": [[image_key(image.data) for image in row] for row in rows]})

    @verb(Dispatch.SPLIT)
    def twice(self, batch):
        return DataProto.from_dict({"copy": batch.batch["tokens"].repeat_interleave(2, 0)})

    @verb(Dispatch.SPLIT, mini_batches="mini_batch_rows")
    def learn(self, batch):
        self.chunk_rows = batch.non_tensor_batch["uid"].tolist()
        return {"rows": len(batch), "mini_batch_rows": batch.meta_info.get("mini_batch_rows")}

    @verb(Dispatch.ALL)
    def last_chunk(self):
        return self.chunk_rows

    @verb(Dispatch.ALL)
    def frames_of_all(self):
        return megarl_frames()

    @verb(Dispatch.SPLIT)
    def frames_of_split(self, batch):
        return {"frames": megarl_frames()}

    def unmarked(self):
        return None


class Summer:
    """One process group per role; fails on request."""

    def __init__(self, place):
        self.rank = rank = place.rank
        world_size = place.world_size
        store = dist.TCPStore(*place[2:], world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))

    @verb(Dispatch.ALL)
    def total(self, value):
        tensor = torch.tensor([float(value + self.rank)])
        dist.all_reduce(tensor)
        return tensor.item()

    @verb(Dispatch.SPLIT)
    def share(self, batch):
        """Seconds in this verb, and seconds of them in a collective."""
        started, waited = time.monotonic_ns(), TRACER.waited_ns
        dist.all_reduce(torch.ones(1))
        time.sleep(0.2 * self.rank)
        dist.all_reduce(torch.ones(1))
        seconds = [time.monotonic_ns() - started, TRACER.waited_ns - waited]
        return DataProto.from_dict({"seconds": torch.tensor([seconds] * len(batch), dtype=torch.float64) / 1e9})

    @verb(Dispatch.ALL, phase="update_actor")
    def fail_while_peers_wait(self, rank):
        if self.rank == rank:
            raise ValueError(f"loss is NaN on rank {rank}")
        return self.total(0)
