"""Driver's cost of a training step's batch: building, splitting over data-parallel ranks, sending, joining results.

    python benchmarks/data_plane.py --samples 2048 16384 --longest 32768 --mean 4096 --dp 64 512

The batch has PPO's columns and log-normal response lengths (sigma 1). For each verb the driver plans the partition,
selects each rank's rows, packs them as Ray does (pickle 5 with separate buffers), and joins the ranks' results. ``real
MB`` are the values of the columns that the verb reads, without padding, at 4 bytes per token id or float and 1 per mask
entry: the least that must leave the driver. The first line of a batch shows the memory of its values, and of padded
tensors for comparison. Seconds are CPU seconds of this process, without the work of the receivers. Between the two
passes and the two updates, the driver computes scores, advantages (GAE) and metrics.
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

from megarl.base.allocator import keep_freed_memory
from megarl.cluster.split import Plan, collect, plan_rows
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.data import DataProto
from megarl.data.column_store import Columns, ragged_columns
from megarl.data.ragged import RaggedColumn
from megarl.rewards.manager import score_columns
from megarl.trainer.jobs.train import LARGEST_KEPT_TENSOR
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.records.metrics import batch_metrics, rollout_mismatch_metrics
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import VerbMark, read_marks

PROMPT = 1024
VOCABULARY = 151_936
RESULTS = {"compute_log_prob": "old_log_probs", "compute_values": "values"}
MASKS = ("attention_mask", "response_mask", "generated_mask")


def samples_rows(samples: int, longest: int, mean: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Draw the rows of samples as the agent runners send them: token ids, masks and the engine's log-probs."""
    random = np.random.default_rng(seed)
    prompts = random.integers(64, PROMPT, samples)
    draws = random.lognormal(0.0, 1.0, samples)
    responses = np.clip(draws * (mean / draws.mean()), 1, longest).astype(np.int64)
    return {
        "prompts": [random.integers(1, VOCABULARY, length).astype(np.int32) for length in prompts],
        "responses": [random.integers(1, VOCABULARY, length).astype(np.int32) for length in responses],
        "response_mask": [np.ones(length, np.int8) for length in responses],
        "generated_mask": [np.ones(length, np.int8) for length in responses],
        "rollout_log_probs": [np.full(length, -0.5, np.float32) for length in responses],
    }


def batch_of(rows: dict[str, list[np.ndarray]]) -> DataProto:
    """Build the batch of samples."""
    uids = np.array([f"1-{row // 8}" for row in range(len(rows["prompts"]))], dtype=object)
    return DataProto(ragged_columns(rows, {}), {"uid": uids}, {"balance_batch": True})


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


def real_bytes(batch: DataProto, tokens: tuple[int, int]) -> int:
    """Bytes of the values of a batch without padding, from its tokens of prompts and responses."""
    counts = {"prompts": tokens[0], "attention_mask": 0}
    return sum(counts.get(name, tokens[1]) * (1 if name in MASKS else 4) for name in batch.tensors)


def results_of(chunks: Sequence[DataProto], column: str) -> list[DataProto]:
    """Results of the ranks as the driver receives them."""
    results = []
    for chunk in chunks:
        lengths = np.array([len(row) for row in chunk.unpadded("responses")])
        values = np.full(lengths.sum(), -0.5, np.float32)
        ragged = RaggedColumn(values, lengths, None, int(lengths.max()), "float32", "response", 0.0)
        results.append(pickle.loads(pickle.dumps(DataProto(Columns.of_ragged({column: ragged})), protocol=5)))
    return results


def measure(batch: DataProto, verb: str, mark: VerbMark, dp: int, tokens: tuple[int, int]) -> DataProto:
    """Measure one verb and print its row; return the batch with the verb's result."""
    rows = len(batch) // 4 if mark.mini_batches else None
    plan_s, plan = cpu_seconds(lambda: plan_rows(batch, dp, rows, equal=mark.equal_rows))
    read = mark.read(batch)
    split_s, chunks = cpu_seconds(lambda: read.parts(plan))
    pack_s, sent = cpu_seconds(lambda: packed_bytes(chunks))
    column, join_s = RESULTS.get(verb), 0.0
    if column is not None and column not in batch.tensors:
        batch, join_s = joined(batch, chunks, plan, column)
    needed = real_bytes(read, tokens)
    print(
        f"{len(batch):>8}{dp:>5}  {verb:<18}{plan_s:>8.2f}{split_s:>8.2f}{pack_s:>8.2f}{join_s:>8.2f}"
        f"{sent / 1e6:>9.0f}{needed / 1e6:>9.0f}{sent / needed:>7.2f}"
    )
    return batch


def joined(batch: DataProto, chunks: Sequence[DataProto], plan: Plan, column: str) -> tuple[DataProto, float]:
    """Join the results of the ranks; return the batch with them, and the CPU seconds."""
    results = results_of(chunks, column)
    seconds, merged = cpu_seconds(lambda: batch.union(collect(results, plan)))
    return merged, seconds


def with_advantages(batch: DataProto) -> DataProto:
    """Add scores and advantages, compute the metrics of the step, and print the cost of each."""
    scores, kept = torch.linspace(0, 1, len(batch)), torch.ones(len(batch), dtype=torch.bool)
    score_s, batch = cpu_seconds(lambda: batch.with_packed(score_columns(batch, scores, kept)))
    config = AlgorithmConfig()
    phase, shaping = AdvantagePhase(config), RewardShaping(config, 1)
    advantage_s, batch = cpu_seconds(lambda: phase.compute(shaping.shape(batch, 1, {}), {}))
    longest = batch.widths[1] or 0
    metric_s, _ = cpu_seconds(lambda: (batch_metrics(batch, PROMPT, longest), rollout_mismatch_metrics(batch)))
    print(f"scores {score_s:.2f} s, advantages {advantage_s:.2f} s, metrics {metric_s:.2f} s, ", end="")
    print(f"peak memory {peak_gib():.1f} GiB")
    return batch


def peak_gib() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[2048])
    parser.add_argument("--longest", type=int, default=15360, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=2048, help="mean response in tokens")
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory(LARGEST_KEPT_TENSOR)
    marks = read_marks(ActorWorker) | read_marks(CriticWorker)
    idle = peak_gib()
    for samples in args.samples:
        rows = samples_rows(samples, args.longest, args.mean, args.seed)
        tokens = sum(map(len, rows["prompts"])), sum(map(len, rows["responses"]))
        build_s, batch = cpu_seconds(lambda rows=rows: batch_of(rows))
        del rows
        padded = sum(tensor.nbytes for tensor in batch.tensors.shapes().values())
        print(f"\n{samples} samples, {sum(tokens) / 1e6:.1f} M tokens, up to {batch.widths[1]} per response: ", end="")
        print(f"{packed_bytes([batch]) / 1e6:.0f} MB, padded {padded / 1e6:.0f} MB; built in {build_s:.2f} s")
        print(f"{'samples':>8}{'dp':>5}  {'verb':<18}{'plan s':>8}{'split s':>8}{'pack s':>8}{'join s':>8}", end="")
        print(f"{'MB':>9}{'real MB':>9}{'ratio':>7}")
        for dp in args.dp:
            for verb in ("compute_log_prob", "compute_values"):
                batch = measure(batch, verb, marks[verb], dp, tokens)
        print(f"peak memory {peak_gib():.1f} GiB, of these {idle:.1f} before the first batch")
        batch = with_advantages(batch)
        for dp in args.dp:
            for verb in ("update_critic", "update_actor"):
                batch = measure(batch, verb, marks[verb], dp, tokens)


if __name__ == "__main__":
    main()
