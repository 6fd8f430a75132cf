"""Driver's cost of a training step's batch: splitting it over data-parallel ranks, sending, and joining results.

    python benchmarks/data_plane.py --samples 1024 2048 --dp 8 64

The batch has PPO's columns and log-normal response lengths (sigma 1). For each verb the driver plans the partition,
packs each rank's rows as Ray does (pickle 5 with separate buffers), and joins the ranks' results. ``real MB`` are the
values of the columns that the verb reads, without padding, at 4 bytes per token id or float and 1 per mask entry: the
least that must leave the driver. ``padded`` selects the rows as padded tensors before packing them, as a plain
``batch[rows]`` does. Seconds are CPU seconds of this process, without the work of the receivers.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from ray import cloudpickle

from megarl.cluster.split import Plan, collect, plan_rows
from megarl.data import DataProto, attention_mask_of
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import VerbMark, read_marks

PROMPT = 1024
VOCABULARY = 151_936
RESULTS = {"compute_log_prob": "old_log_probs", "compute_values": "values"}
BYTES = {torch.int64: 4, torch.float32: 4}
MASKS = ("attention_mask", "response_mask")


def ppo_batch(samples: int, longest: int, mean: int, seed: int) -> DataProto:
    """Build a batch after generation: token ids, masks and the engine's log-probs."""
    random = np.random.default_rng(seed)
    prompts = random.integers(64, PROMPT, samples)
    draws = random.lognormal(0.0, 1.0, samples)
    responses = np.clip(draws * (mean / draws.mean()), 1, longest).astype(np.int64)
    mask = attention_mask_of(prompts.tolist(), responses.tolist(), PROMPT, longest)
    ids = torch.from_numpy(random.integers(1, VOCABULARY, mask.shape)) * mask
    response_mask = mask[:, PROMPT:]
    tensors = {
        "prompts": ids[:, :PROMPT].contiguous(),
        "responses": ids[:, PROMPT:].contiguous(),
        "attention_mask": mask,
        "response_mask": response_mask.clone(),
        "rollout_log_probs": -response_mask.float() / 2,
    }
    uids = [f"1-{row // 8}" for row in range(samples)]
    return DataProto.from_dict(tensors, {"uid": uids, "index": list(range(samples))}, {"balance_batch": True})


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Run and return CPU seconds and result."""
    before = time.process_time()
    result = work()
    return time.process_time() - before, result


def packed_bytes(chunks: Sequence[DataProto]) -> int:
    """Pickle chunks as Ray does; return the bytes."""
    total = 0
    for chunk in chunks:
        buffers: list[pickle.PickleBuffer] = []
        total += len(cloudpickle.dumps(chunk, protocol=5, buffer_callback=buffers.append))
        total += sum(buffer.raw().nbytes for buffer in buffers)
    return total


def real_bytes(batch: DataProto) -> int:
    """Bytes of the values of a batch without padding."""
    mask = batch.tensors["attention_mask"]
    lengths = {"prompts": mask[:, :PROMPT].sum(), "attention_mask": 0}
    responses = int(mask[:, PROMPT:].sum())
    return sum(
        int(lengths.get(name, responses)) * (1 if name in MASKS else BYTES[tensor.dtype])
        for name, tensor in batch.tensors.items()
    )


def answers(chunks: Sequence[DataProto], column: str) -> list[DataProto]:
    """Results of the ranks as the driver receives them."""
    results = [DataProto.from_dict({column: -chunk.tensors["responses"].gt(0).float() / 2}) for chunk in chunks]
    return [pickle.loads(pickle.dumps(result, protocol=5)) for result in results]


def measure(batch: DataProto, verb: str, mark: VerbMark, dp: int, mini_batch_rows: int) -> DataProto:
    """Measure one verb and print its row; return the batch with the verb's result."""
    rows = mini_batch_rows if mark.mini_batches else None
    plan_s, plan = cpu_seconds(lambda: plan_rows(batch, dp, rows, equal=mark.equal_rows))
    read = mark.read(batch)
    pack_s, sent = cpu_seconds(lambda: packed_bytes(read.parts(plan)))
    padded_s, _ = cpu_seconds(lambda: packed_bytes([read[np.array(rows)] for rows in plan]))
    column, join_s = RESULTS.get(verb), 0.0
    if column is not None:
        batch, join_s = joined(batch, read, plan, column)
    needed = real_bytes(read)
    print(
        f"{len(batch):>8}{dp:>5}  {verb:<18}{plan_s:>8.2f}{pack_s:>8.2f}{join_s:>8.2f}{padded_s:>9.2f}"
        f"{sent / 1e6:>9.0f}{needed / 1e6:>9.0f}{sent / needed:>7.2f}"
    )
    return batch


def joined(batch: DataProto, read: DataProto, plan: Plan, column: str) -> tuple[DataProto, float]:
    """Join the results of the ranks; return the batch with them, and the CPU seconds."""
    results = answers(read.parts(plan), column)
    seconds, merged = cpu_seconds(lambda: batch.union(collect(results, plan)))
    return merged, seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--longest", type=int, default=15360, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=2048, help="mean response in tokens")
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    marks = read_marks(ActorWorker) | read_marks(CriticWorker)
    print(f"{'samples':>8}{'dp':>5}  {'verb':<18}{'plan s':>8}{'pack s':>8}{'join s':>8}{'padded s':>9}", end="")
    print(f"{'MB':>9}{'real MB':>9}{'ratio':>7}")
    for samples in args.samples:
        for dp in args.dp:
            batch = ppo_batch(samples, args.longest, args.mean, args.seed)
            for verb in ("compute_log_prob", "compute_values", "update_critic", "update_actor"):
                if verb == "update_critic":
                    ready = batch.tensors["rollout_log_probs"]
                    batch = batch.with_columns({"advantages": ready + 1, "returns": ready + 2})
                batch = measure(batch, verb, marks[verb], dp, samples // 4)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
