"""Driver's share of a training step: CPU seconds and memory of its batch, with workers in other processes.

    python benchmarks/data_plane.py --samples 2048 16384 --longest 32768 --mean 4096 --ranks 64 512 --tp 1 8
    python benchmarks/data_plane.py --samples 2048 --image-kb 200

The batch has PPO's columns and log-normal response lengths (sigma 1). The driver receives the samples of an agent
runner with their scores, and runs the verbs and phases of a step through a real worker group and Ray's object store:
passes, scores, advantages (GAE, KL penalty), updates, metrics. One process stands for all ranks and answers without a
model. The driver calls the ranks of small groups itself, and those of large ones by node; here another process stands
for the callers of all nodes. ``--call rank`` has the driver call the ranks of large groups too. ``calls`` are the
driver's calls. The first step also pays for first access to the memory of the object store, which later steps use
again. With ``--image-kb``, each prompt has an image of this size, whose file is written once. Seconds are CPU seconds
of the driver's process with its Ray threads, without the thread that watches the memory. Memory is the largest
anonymous memory of the process since the batch was built, without the object store. ``written MB`` are the bytes that
the driver has written into the store.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

import numpy as np
import ray
import torch
from machine import benchmark_parser, parse_sizes

from megarl.agents.trajectories import PackedSamples, trajectories_to_batch
from megarl.agents.types import SampleId, Trajectory
from megarl.base.allocators import keep_freed_memory
from megarl.base.image_tokens import Image
from megarl.cluster import stored_chunks
from megarl.cluster.call_targets import CallTarget
from megarl.cluster.calls import WorkerCall
from megarl.cluster.fork_server import fork_server
from megarl.cluster.node_caller import FEWEST_RANKS, CallTargets, NodeCaller
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.stored_images import store_images
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.data import DataProto, token_counts
from megarl.data.column_store import ragged_columns
from megarl.data.columns import column_widths
from megarl.data.images import IMAGES
from megarl.data.ragged import Chunk
from megarl.models import ParallelLayout
from megarl.rewards import RewardManager, in_driver
from megarl.rewards.outcome import Outcome
from megarl.trainer.jobs.train import LARGEST_KEPT_TENSOR
from megarl.trainer.phases.advantage_phase import AdvantagePhase
from megarl.trainer.records.step_metrics import batch_metrics
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import UPDATE_ROWS, Dispatch, WorkerPlace, read_marks, verb

PROMPT = 1024
NODE = 8
"""Ranks per node."""
SAMPLES_PER_REPORT = 64
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


class SampleSource:
    """Sends drawn samples as an agent runner does."""

    def __init__(self, place: WorkerPlace) -> None:
        self._reports: list[PackedSamples] = []

    @verb(Dispatch.ALL)
    def draw(self, samples: int, longest: int, mean: int, seed: int) -> None:
        """Draw the samples of a step, and pack them into reports."""
        rows, finished = samples_rows(samples, longest, mean, seed), list[tuple[SampleId, Trajectory]]()
        for row, (prompt, response) in enumerate(zip(rows["prompts"], rows["responses"], strict=True)):
            mask, log_probs = rows["response_mask"][row], rows["rollout_log_probs"][row]
            outcome = Outcome(row / samples, {})
            trajectory = Trajectory(prompt, response, mask, log_probs, "stop", 2, weight_version=1, outcome=outcome)
            finished.append((SampleId(row // 8, row % 8), trajectory))
        parts = range(0, samples, SAMPLES_PER_REPORT)
        self._reports = [PackedSamples(dict(finished[begin : begin + SAMPLES_PER_REPORT])) for begin in parts]

    @verb(Dispatch.ALL)
    def take(self) -> PackedSamples:
        """Return the next report."""
        return self._reports.pop(0)


class OneProcessGroup(WorkerGroup):
    """A group whose ranks all are one process, and another one calls it for every node."""

    def stand_for(self, ranks: int, tp: int, by_node: bool) -> None:
        """Let the processes be all ranks and nodes; may be called again."""
        wait_ready([self])
        self._targets.end_callers()
        self.layout = layout = ParallelLayout(tp=tp, dp=ranks // tp)
        self._owners = [layout.rank(dp=dp) for dp in range(layout.dp)]
        self._actors, self._infos = (dict.fromkeys(range(ranks), of[0]) for of in (self._actors, self._infos))
        self._targets = CallTargets(self.role, [layout.coordinate(rank).dp for rank in range(ranks)], self._owners)
        if by_node:
            nodes = [range(first, first + NODE) for first in range(0, ranks, NODE)]
            caller = ray.remote(NodeCaller).options(num_cpus=0).remote(self._targets.of_node(nodes[0], self._actors))
            ray.get(caller.connect.remote(self._infos))
            for node in nodes:
                self._targets.add_node(caller, node)


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


def receive(source: WorkerGroup, samples: int) -> DataProto:
    """Receive the samples of a step, and build their batch."""
    trajectories: list[Trajectory] = []
    while len(trajectories) < samples:
        (packed,) = source.call("take")
        trajectories += packed.unpack().values()
    batch = trajectories_to_batch(trajectories, 0)
    sources = {"data_source": ["x"] * samples, "reward_model": [{"ground_truth": "x"}] * samples}
    return with_step_info(batch.with_columns({}, sources))


def with_step_info(batch: DataProto) -> DataProto:
    """Add the names of the prompts, and the sizes of mini-batches."""
    uids = np.array([f"1-{row // 8}" for row in range(len(batch))], dtype=object)
    sizes = {name: len(batch) // 4 for name in ("actor_mini_batch_rows", "critic_mini_batch_rows")}
    batch = batch.with_columns({}, {"uid": uids})
    batch.meta_info |= {"balance_batch": True, **sizes, UPDATE_ROWS: len(batch) // 4}
    return batch


def batch_of(rows: dict[str, list[np.ndarray]]) -> DataProto:
    """Build the batch of samples."""
    return with_step_info(DataProto(ragged_columns(rows, {})))


def with_images(batch: DataProto, size: int) -> DataProto:
    """Store an image of ``size`` bytes for each prompt."""
    uids = batch.non_tensor_batch["uid"].tolist()
    stored = {uid: store_images([Image.of(os.urandom(size), 16, 16)]) for uid in dict.fromkeys(uids)}
    return batch.with_columns({}, {IMAGES: [stored[uid] for uid in uids]})


class Meter:
    """Measures stages of a step in this process."""

    def __init__(self) -> None:
        self.peak, self.total = 0, 0.0
        self.written, self.watching, self.calls = 0, 0.0, 0
        encode = stored_chunks.encoded

        def counting(chunk: Chunk) -> Any:
            stored = encode(chunk)
            self.written += sum(values.nbytes for values in stored.values())
            return stored

        stored_chunks.encoded = counting
        called = CallTarget.called

        def counted(target: CallTarget, *arguments: Any) -> WorkerCall:
            self.calls += 1
            return called(target, *arguments)

        CallTarget.called = counted
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        """Run a stage, print its line and return its result."""
        before, written, wall = time.process_time() - self.watching, self.written, time.perf_counter()
        calls = self.calls
        result = work()
        seconds, wall = time.process_time() - self.watching - before, time.perf_counter() - wall
        self.total += seconds
        megabytes = (self.written - written) / 1e6
        print(f"  {stage:<24}{seconds:>8.2f}{wall:>8.1f}{megabytes:>12.0f}{self.calls - calls:>8}", flush=True)
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
    with Path("/proc/self/status").open(encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def run_step(batch: DataProto, manager: RewardManager, group: Any, meter: Meter) -> None:
    """Run the driver's side of a step."""
    rows = group.row_map("compute_log_prob")
    batch = meter.run("scores", lambda: manager.score(batch).batch)
    batch = meter.run("store tokens", lambda: group.store("compute_log_prob", batch))
    for name in ("compute_log_prob", "compute_ref_log_prob", "compute_values"):
        batch = meter.run(name, lambda name=name, batch=batch: batch.union(group.call(name, batch)))
    phase = AdvantagePhase(AlgorithmConfig(use_kl_in_reward=True))
    phase.rows = rows
    batch = meter.run("advantages", lambda: phase.compute(batch, {}))
    for name in ("update_critic", "update_actor"):
        meter.run(name, lambda name=name: group.call(name, batch))
    longest = column_widths(batch.tensors.shapes)[1] or 0
    meter.run("metrics", lambda: batch_metrics(batch, PROMPT, longest, rows, compare_log_probs=True))


def main() -> None:
    """Print a table for each batch and number of ranks."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[2048])
    parser.add_argument("--longest", type=int, default=15360, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=2048, help="mean response in tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="ranks of a node that share rows")
    parser.add_argument("--call", choices=["auto", "rank"], default="auto")
    parser.add_argument("--image-kb", type=int, default=0, help="size of each prompt's image; 0 = no images")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store-gb", type=int, default=6, help="size of the object store")
    args = parse_sizes(parser, samples=[8], longest=32, mean=16, ranks=[2], steps=1, store_gb=1)

    torch.set_num_threads(1)
    keep_freed_memory(LARGEST_KEPT_TENSOR)
    meter = Meter()
    with fork_server(), RaySession(num_cpus=2, object_store_bytes=args.store_gb << 30) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        group = OneProcessGroup("ranks", AnsweringWorker, {}, ParallelLayout(), pool)
        source = WorkerGroup("agents", SampleSource, {}, ParallelLayout(), pool, on_device=False)
        manager = RewardManager(in_driver(lambda data_source, solution_str, ground_truth, extra_info: 0.0), None)
        for samples, ranks, tp in itertools.product(args.samples, args.ranks, args.tp):
            by_node = args.call == "auto" and ranks >= FEWEST_RANKS
            group.stand_for(ranks, tp, by_node)
            for step in range(1, args.steps + 1):
                source.call("draw", samples, args.longest, args.mean, args.seed + step - 1)
                called = "node" if by_node else "rank"
                print(f"\n{samples} samples, up to {args.longest} tokens, {ranks} ranks, TP{tp}, called by {called}")
                print(f"  {f'stage of step {step}':<24}{'CPU s':>8}{'wall s':>8}{'written MB':>12}{'calls':>8}")
                meter.reset()
                batch = meter.run("collect samples", lambda samples=samples: receive(source, samples))
                if args.image_kb:
                    batch = meter.run("store images", lambda batch=batch: with_images(batch, args.image_kb * 1000))
                run_step(batch, manager, group, meter)
                print(f"  {sum(token_counts(batch)) / 1e6:.1f} M tokens")
                print(f"  {'step':<24}{meter.total:>8.2f}; largest memory {meter.peak / 2**30:.1f} GiB")
                del batch


if __name__ == "__main__":
    main()
