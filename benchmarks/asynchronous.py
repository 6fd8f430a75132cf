"""Speed of synchronous and asynchronous training with long-tailed response lengths, and the bound of each mode.

    python benchmarks/asynchronous.py [--steps 12] [--median 60] [--sigma 1.0] [--modes colocated disaggregated]

Complete GRPO jobs under Ray on two CPU devices, one after the other. In ``sync`` and ``colocated`` both devices
generate, then train; otherwise one device trains and one generates. An agent loop of this file draws the length of each
response from a log-normal distribution, capped at 8 times the median; the end-of-sequence token does not end it. All
jobs have the same lengths.

The bound is the speed-up over ``sync`` without idle time. A synchronous job whose responses all have the mean length
measures generation without a tail (``equal lengths``, and no tool). Without idle time a colocated step takes the
training of ``sync`` and that generation. On separate devices a step takes the longer of both, each on half of the
devices.

Two cores are a poor model of GPUs: a decode step takes longer with more sequences, and the driver, the agent runner and
the devices share the cores. So a decode step takes at least 4 ms here, and training 150 us per token and device
(``paced_devices.py``); ``--pace 0 0`` is the speed of the cores. Everything else is the same.

Times are means over the steps between the second and the last: early ones have no work in flight and allocate memory,
and the last ones admit no prompts. Run it on an idle machine: one device is one core. ``--tiny`` checks the script, and
its numbers say nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from machine import benchmark_parser, parse_sizes, processor

from megarl.agents.loop import Transcript
from megarl.agents.single_turn import SingleTurnLoop
from megarl.agents.types import Conversation, Generate, Trajectory
from megarl.base.formatting import table_lines
from megarl.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = "BENCHMARK_LENGTHS"
"""Environment variable of the loop: median and sigma of the lengths, and mean seconds of a tool, comma-separated."""
PACE = "BENCHMARK_PACE"
"""Environment variable of ``paced_devices.py``, which must not be imported here: it changes the process."""
PROBLEMS = ("--largest", "29", "--num-test", "20", "--lessons", "1", "1", "--pairs", "1", "1")
"""Few problems: their answers have drawn lengths."""
CAP = 8
WARMUP, LAST = 2, 2
"""Steps at the beginning and at the end that do not count."""


def response_tokens(seed: int, median: float, sigma: float) -> int:
    """Draw the length of a response."""
    drawn = median * math.exp(sigma * float(np.random.default_rng(seed).standard_normal()))
    return max(1, min(round(drawn), round(CAP * median)))


class DrawnLengthLoop(SingleTurnLoop):
    """Generates responses of drawn lengths, with a tool call in the middle of each on request."""

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate one turn, or two with a call of a tool between them."""
        median, sigma, tool_s = map(float, os.environ[LENGTHS].split(","))
        tokens = response_tokens(conversation.seed, median, sigma)
        params = replace(conversation.params, ignore_eos=True, max_new_tokens=tokens)
        transcript = Transcript(conversation)
        if tool_s and tokens > 1:
            await transcript.generate(generate, replace(params, max_new_tokens=tokens // 2))
            await asyncio.sleep(tool_s * float(np.random.default_rng(conversation.seed).exponential()))
            params = replace(params, max_new_tokens=tokens - tokens // 2)
        await transcript.generate(generate, params)
        return transcript.end("length")


@dataclass(frozen=True)
class Workload:
    """Size of the jobs.

    Attributes:
        steps: training steps.
        prompts: prompts per step.
        samples: samples per prompt.
        median: median response length in tokens.
        sigma: of the logarithm of the lengths.
        hidden: width of the model.
        slots: most responses that a replica decodes at a time.
        longest: most tokens of a response.
        tool_s: mean seconds of a tool call in the middle of a response, exponentially distributed; 0 = no tool.
        engine: rollout engine.
        pace: seconds of a decode step, and device-seconds of training per token; None = those of this machine's cores.
    """

    steps: int
    prompts: int
    samples: int
    median: float
    sigma: float
    hidden: int
    slots: int
    longest: int
    tool_s: float = 0.0
    engine: str = "embedded"
    pace: tuple[float, float] | None = None

    @property
    def mean_tokens(self) -> float:
        """Mean response length."""
        return statistics.mean(response_tokens(seed, self.median, self.sigma) for seed in range(4000))


@dataclass(frozen=True)
class Measured:
    """Means per step of a job.

    Attributes:
        step: seconds of a step.
        gen: seconds of a step in which the trainer waits for samples.
        busy: share of the time in which a replica has a request, over replicas.
        staleness: weight versions of a sample's oldest token.
        partial: share of samples with several weight versions.
    """

    step: float
    gen: float
    busy: float
    staleness: float
    partial: float


SHARED = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.megatron.data_parallel_size=2")
APART = (
    "trainer.n_gpus_per_node=1",
    "async_training.mode=disaggregated",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)
STALE = ("async_training.max_staleness=1", "algorithm.rollout_correction.rollout_is=token")
FOUR_SYNCS = "async_training.sync_interval=4"


MODES: Mapping[str, Sequence[str]] = {
    "sync": SHARED,
    "colocated": (*SHARED, *STALE, "async_training.mode=colocated"),
    "colocated, staleness 2": (*SHARED, *STALE, "async_training.mode=colocated", "async_training.max_staleness=2"),
    "disaggregated, hybrid": (*APART, *STALE, FOUR_SYNCS, "async_training.hybrid_rollout=true"),
    "one step off": (*APART, *STALE, FOUR_SYNCS, "async_training.partial_rollout=false"),
    "disaggregated": (*APART, *STALE, FOUR_SYNCS),
    "disaggregated, staleness 2": (*APART, *STALE, FOUR_SYNCS, "async_training.max_staleness=2"),
}
"""Overrides of the job's configuration by mode."""


def overrides(task: Path, folder: Path, work: Workload, mode: Sequence[str]) -> list[str]:
    """Return the configuration of a job; its mini-batches are quarters of a step in every mode."""
    actor, rollout, here = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", Path(__file__).resolve()
    return [
        f"data.train_files={task}/data/train.parquet",
        "data.val_files=[]",
        f"data.train_batch_size={work.prompts}",
        "data.max_prompt_length=32",
        f"data.max_response_length={work.longest}",
        f"actor_rollout_ref.model.path={task}/model",
        f"{actor}.ppo_mini_batch_size={work.prompts // 4}",
        f"{actor}.max_token_len_per_gpu=4096",
        f"{actor}.use_kl_loss=false",
        f"{actor}.optim.lr=1e-5",
        f"{actor}.megatron.dtype=float32",
        f"{rollout}.n={work.samples}",
        f"{rollout}.name={work.engine}",
        f"{rollout}.dtype=float32",
        f"{rollout}.max_num_seqs={work.slots}",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.default_agent_loop={here}:{DrawnLengthLoop.__name__}",
        f"reward.custom_reward_function.path={here.with_name('character_reward.py')}",
        "reward.custom_reward_function.name=score",
        "trainer.device=cpu",
        f"trainer.total_training_steps={work.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.hf_export_dir=null",
        "trainer.logger=[jsonl]",
        f"hydra.run.dir={folder}",
        *([f"actor_rollout_ref.model.external_lib={here.with_name('paced_devices.py')}"] if work.pace else []),
        *mode,
    ]


def make_task(folder: Path, work: Workload) -> None:
    """Make the arithmetic task, with a model whose positions suffice for the longest response."""
    run(["tools/make_arithmetic.py", "--out", str(folder), "--hidden", str(work.hidden), *PROBLEMS], os.environ)
    path = folder / "model" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), "max_position_embeddings": 64 + work.longest}),
        encoding="utf-8",
    )


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run Python with these arguments; an error ends the benchmark with its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nfailed:\n{done.stdout}\n{done.stderr}")


def run_job(task: Path, work: Workload, mode: Sequence[str]) -> Measured:
    """Run a job, and return the means of its steps after the warm-up."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", LENGTHS: f"{work.median},{work.sigma},{work.tool_s}"}
    environment[PACE] = ",".join(map(str, work.pace or ()))
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    with tempfile.TemporaryDirectory() as folder:
        run(
            ["-m", "megarl", "train", "--config-name", "grpo", *overrides(task, Path(folder), work, mode)],
            environment,
        )
        rows = [row for row in read_metrics(Path(folder) / "metrics.jsonl") if "timing_s/step" in row]
    assert len(rows) == work.steps, f"{len(rows)} steps instead of {work.steps}"

    def mean(metric: str) -> float:
        return statistics.mean(row.get(metric, 0.0) for row in rows[WARMUP:-LAST])

    return Measured(
        step=mean("timing_s/step"),
        gen=mean("timing_s/gen"),
        busy=mean("rollout/replica_utilization/mean"),
        staleness=mean("training/off_policy/trajectory_staleness"),
        partial=mean("fully_async/partial/partial_ratio"),
    )


def bounds(sync: Measured, equal: Measured) -> tuple[float, float]:
    """Return the speed-ups over ``sync`` without idle time, on shared and on separate devices."""
    training = sync.step - sync.gen
    return sync.step / (training + equal.gen), sync.step / max(2 * training, 2 * equal.gen)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt")
    parser.add_argument("--median", type=float, default=60)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--hidden", type=int, default=32, help="width of the model")
    parser.add_argument("--slots", type=int, default=32, help="most responses that a replica decodes at a time")
    parser.add_argument("--tool-s", type=float, default=0.0, help="mean seconds of a tool call in each response")
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument(
        "--pace",
        type=float,
        nargs=2,
        default=(4.0, 150.0),
        metavar=("MS", "US"),
        help="least ms of a decode step and device-us of training per token; 0 0 = the speed of this machine's cores",
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="modes besides sync")
    args = parse_sizes(parser, modes=list(MODES)[1:2])
    longest = round(CAP * args.median)
    work = Workload(args.steps, 32, args.samples, args.median, args.sigma, args.hidden, args.slots, longest)
    if args.tiny:
        work = Workload(5, 8, 2, 8, args.sigma, 32, 4, 8 * CAP)
    pace = (args.pace[0] / 1e3, args.pace[1] / 1e6) if any(args.pace) else None
    work = replace(work, tool_s=args.tool_s, engine=args.engine, pace=pace)
    samples = work.prompts * work.samples
    print(f"machine: {processor()}, load {os.getloadavg()[0]:.1f} at start")
    print(
        f"{samples} responses per step, median {work.median:g}, mean {work.mean_tokens:.0f}, at most "
        f"{work.longest} tokens\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        make_task(task, work)
        measured = {name: run_job(task, work, mode) for name, mode in MODES.items() if name in {"sync", *args.modes}}
        sync = equal = measured["sync"]
        if not args.tiny:
            equal = run_job(task, replace(work, median=work.mean_tokens, sigma=0.0, tool_s=0.0), MODES["sync"])
    shared, apart = bounds(sync, equal)
    head = ["mode", "s/step", "samples/s", "speed-up", "bound", "trainer waits", "replica busy", "staleness", "partial"]
    rows = [_row("sync, equal lengths", equal, samples, sync, None)]
    for name, result in measured.items():
        bound = {"sync": None, "colocated": shared}.get(name.split(",")[0], apart)
        rows.append(_row(name, result, samples, sync, bound))
    print("\n".join(table_lines([head, *rows], "<" + ">" * 8)))


def _row(name: str, result: Measured, samples: int, sync: Measured, bound: float | None) -> list[str]:
    return [
        name,
        f"{result.step:.2f}",
        f"{samples / result.step:.1f}",
        f"{sync.step / result.step:.2f}x",
        "" if bound is None else f"{bound:.2f}x",
        f"{result.gen / result.step:.0%}",
        f"{result.busy:.0%}",
        f"{result.staleness:.2f}",
        f"{result.partial:.0%}",
    ]


if __name__ == "__main__":
    main()
