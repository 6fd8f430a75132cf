"""Driver's share of a training step: CPU seconds and memory of its batch, with workers in other processes.

    python benchmarks/data_plane.py --samples 2048 16384 --longest 32768 --mean 4096 --dp 64 512

The batch has PPO's columns and log-normal response lengths (sigma 1). The driver runs the verbs and phases of a step
through a real worker group and Ray's object store: passes, scores, advantages (GAE, KL penalty), updates, metrics.
One process stands for all ranks and answers without a model. The first step also pays for first access to the memory
of the object store, which later steps use again. Seconds are CPU seconds of the driver's process with its Ray threads,
without the thread that watches the memory. Memory is the largest anonymous memory of the process since the batch was
built, without the object store. ``written MB`` are the bytes that the driver has written into the store.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from megarl.base.allocator import keep_freed_memory
from megarl.cluster import RaySession, ResourcePool, WorkerGroup, stored_chunks, wait_ready
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.data import DataProto, token_counts
from megarl.data.column_store import ragged_columns
from megarl.data.remote import Chunk
from megarl.models import ParallelLayout
from megarl.rewards.manager import with_scores
from megarl.trainer.jobs.train import LARGEST_KEPT_TENSOR
from megarl.trainer.phases.advantage_phase import AdvantagePhase
from megarl.trainer.records.metrics import batch_metrics
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import WorkerPlace, read_marks, verb

PROMPT = 1024
VOCABULARY = 151_936
MARKS = read_marks(ActorWorker) | read_marks(CriticWorker)


def like(name: str) -> Callable[[Any], Any]:
    """Mark a method as the verb of this name of the real workers."""
    mark = MARKS[name]
    return verb(mark.dispatch, mini_batches=mark.mini_batches, columns=mark.columns)


class AnsweringWorker:
    """Answers the verbs of a step without a model."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place

    def _answer(self, batch: DataProto, name: str, value: float) -> DataProto:
        return batch.token_columns({name: torch.full((len(batch.packed("responses")),), value)})

    @like("compute_log_prob")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return log-probs."""
        return self._answer(batch, "old_log_probs", -0.5)

    @like("compute_ref_log_prob")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return log-probs of the reference."""
        return self._answer(batch, "ref_log_prob", -0.6)

    @like("compute_values")
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return values."""
        return self._answer(batch, "values", 0.1)

    @like("update_critic")
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """Return metrics."""
        return {}

    @like("update_actor")
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Return metrics."""
        return {}


class OneProcessGroup(WorkerGroup):
    """A group of ``dp`` data-parallel ranks that all are one process."""

    def stand_for(self, dp: int) -> None:
        """Let the process be all ranks."""
        wait_ready([self])
        self.layout, self._owners = ParallelLayout(dp=dp), list(range(dp))
        self._actors, self._infos = (dict.fromkeys(range(dp), of[0]) for of in (self._actors, self._infos))


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
        "rollout_log_probs": [-random.random(length, np.float32) for length in responses],
    }


def batch_of(rows: dict[str, list[np.ndarray]]) -> DataProto:
    """Build the batch of samples."""
    uids = np.array([f"1-{row // 8}" for row in range(len(rows["prompts"]))], dtype=object)
    sizes = {name: len(uids) // 4 for name in ("actor_mini_batch_rows", "critic_mini_batch_rows")}
    return DataProto(ragged_columns(rows, {}), {"uid": uids}, {"balance_batch": True, **sizes})


class Meter:
    """Measures stages of a step in this process."""

    def __init__(self) -> None:
        self.peak, self.total = 0, 0.0
        self.written, self.watching = 0, 0.0
        encode = stored_chunks.encoded

        def counting(chunk: Chunk) -> Any:
            stored = encode(chunk)
            self.written += sum(values.nbytes for values in stored.values())
            return stored

        stored_chunks.encoded = counting
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        """Run a stage, print its line and return its result."""
        before, written, wall = time.process_time() - self.watching, self.written, time.perf_counter()
        result = work()
        seconds, wall = time.process_time() - self.watching - before, time.perf_counter() - wall
        self.total += seconds
        print(f"  {stage:<24}{seconds:>8.2f}{wall:>8.1f}{(self.written - written) / 1e6:>12.0f}", flush=True)
        return result

    def reset(self) -> None:
        """Begin a step."""
        self.total, self.peak = 0.0, 0

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            self.watching = time.thread_time()
            time.sleep(0.02)


def anonymous_bytes() -> int:
    """Memory of this process without files and shared memory."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def run_step(batch: DataProto, group: Any, meter: Meter) -> None:
    """Run the driver's side of a step."""
    rows = group.row_map("compute_log_prob", 0)
    scores, kept = torch.linspace(0, 1, len(batch)), torch.ones(len(batch), dtype=torch.bool)
    batch = meter.run("scores", lambda: with_scores(batch, scores, kept))
    for name in ("compute_log_prob", "compute_ref_log_prob", "compute_values"):
        batch = meter.run(name, lambda name=name, batch=batch: batch.union(group.call(name, batch)))
    phase = AdvantagePhase(AlgorithmConfig(use_kl_in_reward=True))
    phase.rows = rows
    batch = meter.run("advantages", lambda: phase.compute(batch, {}))
    for name in ("update_critic", "update_actor"):
        meter.run(name, lambda name=name: group.call(name, batch))
    longest = batch.widths[1] or 0
    meter.run("metrics", lambda: batch_metrics(batch, PROMPT, longest, rows, compare_log_probs=True))


def main() -> None:
    """Print a table for each batch and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[2048])
    parser.add_argument("--longest", type=int, default=15360, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=2048, help="mean response in tokens")
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store-gb", type=int, default=6, help="size of the object store")
    args = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory(LARGEST_KEPT_TENSOR)
    meter = Meter()
    with RaySession(num_cpus=2, object_store_bytes=args.store_gb << 30) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        group = OneProcessGroup("ranks", AnsweringWorker, {}, ParallelLayout(), pool)
        for samples in args.samples:
            for dp in args.dp:
                group.stand_for(dp)
                for step in range(1, args.steps + 1):
                    batch = batch_of(samples_rows(samples, args.longest, args.mean, args.seed + step - 1))
                    tokens, longest = sum(token_counts(batch)) / 1e6, batch.widths[1]
                    print(f"\n{samples} samples, {tokens:.1f} M tokens, up to {longest} per response, {dp} ranks")
                    print(f"  {f'stage of step {step}':<24}{'CPU s':>8}{'wall s':>8}{'written MB':>12}")
                    meter.reset()
                    run_step(batch, group, meter)
                    print(f"  {'step':<24}{meter.total:>8.2f}; largest memory {meter.peak / 2**30:.1f} GiB")
                    del batch


if __name__ == "__main__":
    main()
