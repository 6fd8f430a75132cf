"""Speed of synchronous and asynchronous training with long-tailed response lengths, dynamic sampling and slow tools.

    python benchmarks/asynchronous.py [--steps 12] [--median 60] [--sigma 1.0] [--workloads lengths tools]

Complete GRPO jobs under Ray on two CPU devices, one after the other. In ``sync`` and ``colocated`` both devices
generate, then train; otherwise one device trains and one generates. An agent loop of this file draws the length of each
response from a log-normal distribution, capped at 8 times the median; the end-of-sequence token does not end it. All
jobs of a workload have the same lengths.

- ``lengths``: nothing else, in all modes.
- ``sampling``: dynamic sampling; a third of the prompts has no variance. The baseline is ``rounds``: the synchronous
  job, in which ``dynamic_rounds.py`` admits a whole batch of prompts when the round before has ended, as verl does.
- ``tools``: a tool call in the middle of each response.

The speed-up is relative to the first mode of the workload, once by mean and once by median times.

The bound is the speed-up without idle time. A synchronous job whose responses all have the mean length measures
generation without a tail (``equal lengths``, and no tool). Without idle time a colocated step takes the training of
``sync`` and that generation. On separate devices a step takes the longer of both, each on half of the devices. Dynamic
sampling has no bound: the number of its responses differs between steps.

Two cores are a poor model of GPUs: a decode step takes longer with more sequences, and the driver, the agent runner and
the devices share the cores. So a decode step takes at least 4 ms here, and training 150 us per token and device
(``paced_devices.py``); ``--pace 0 0`` is the speed of the cores. Everything else is the same.

Times are of the steps between the second and the last: early ones have no work in flight and allocate memory, and the
last ones admit no prompts. Run it on an idle machine: one device is one core. ``--tiny`` checks the script, and its
numbers say nothing.
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

from megarl.agents.loop import SingleTurnLoop, Transcript
from megarl.agents.types import Conversation, Generate, Trajectory
from megarl.base.formatting import table_lines
from megarl.tracking import read_metrics

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
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
        sampling: use dynamic sampling.
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
    sampling: bool = False
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
        median: median seconds of a step.
        gen: seconds of a step in which the trainer waits for samples.
        busy: share of the time in which a replica has a request, over replicas.
        staleness: weight versions of a sample's oldest token.
        partial: share of samples with several weight versions.
    """

    step: float
    median: float
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
    "rounds": (*SHARED, f"trainer.callbacks=[{HERE.with_name('dynamic_rounds.py')}:Rounds]"),
    "sync": SHARED,
    "sync, surplus": SHARED,
    "colocated": (*SHARED, *STALE, "async_training.mode=colocated"),
    "colocated, staleness 2": (*SHARED, *STALE, "async_training.mode=colocated", "async_training.max_staleness=2"),
    "disaggregated, hybrid": (*APART, *STALE, FOUR_SYNCS, "async_training.hybrid_rollout=true"),
    "one step off": (*APART, *STALE, FOUR_SYNCS, "async_training.partial_rollout=false"),
    "disaggregated": (*APART, *STALE, FOUR_SYNCS),
    "disaggregated, staleness 2": (*APART, *STALE, FOUR_SYNCS, "async_training.max_staleness=2"),
}
"""Overrides of the job's configuration by mode."""
GEN_BATCHES = {"rounds": 2.0, "sync, surplus": 1.5}
"""``data.gen_batch_size`` of dynamic sampling, in batches; 1 elsewhere. Of ``rounds`` it is the room for two rounds."""
WORKLOADS: Mapping[str, Sequence[str]] = {
    "lengths": [name for name in MODES if name not in GEN_BATCHES],
    "sampling": ["rounds", "sync", "sync, surplus", "colocated", "disaggregated"],
    "tools": ["sync", "colocated", "disaggregated"],
}
"""Modes by workload; the first one is the baseline."""


def overrides(task: Path, folder: Path, work: Workload, mode: str) -> list[str]:
    """Return the configuration of a job; its mini-batches are quarters of a step in every mode."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
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
        f"{rollout}.agent.default_agent_loop={HERE}:{DrawnLengthLoop.__name__}",
        f"reward.custom_reward_function.path={HERE.with_name('character_reward.py')}",
        f"reward.custom_reward_function.name={'score_or_constant' if work.sampling else 'score'}",
        "trainer.device=cpu",
        f"trainer.total_training_steps={work.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.hf_export_dir=null",
        "trainer.logger=[jsonl]",
        f"hydra.run.dir={folder}",
        *([f"actor_rollout_ref.model.external_lib={HERE.with_name('paced_devices.py')}"] if work.pace else []),
        *(sampling_overrides(work, mode) if work.sampling else []),
        *MODES[mode],
    ]


def sampling_overrides(work: Workload, mode: str) -> list[str]:
    """Return the configuration of dynamic sampling, without a limit of the prompts."""
    return [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=0",
        f"data.gen_batch_size={round(GEN_BATCHES.get(mode, 1) * work.prompts)}",
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


def run_job(task: Path, work: Workload, mode: str) -> Measured:
    """Run a job, and measure its steps after the warm-up."""
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

    def of_steps(metric: str) -> list[float]:
        return [row.get(metric, 0.0) for row in rows[WARMUP:-LAST]]

    def mean(metric: str) -> float:
        return statistics.mean(of_steps(metric))

    return Measured(
        step=mean("timing_s/step"),
        median=statistics.median(of_steps("timing_s/step")),
        gen=mean("timing_s/gen"),
        busy=mean("rollout/replica_utilization/mean"),
        staleness=mean("training/off_policy/trajectory_staleness"),
        partial=mean("fully_async/partial/partial_ratio"),
    )


def bounds(sync: Measured, equal: Measured) -> tuple[float, float]:
    """Return the speed-ups over ``sync`` without idle time, on shared and on separate devices."""
    training = sync.step - sync.gen
    return sync.step / (training + equal.gen), sync.step / max(2 * training, 2 * equal.gen)


def measure(task: Path, work: Workload, modes: Sequence[str], equal: Measured | None) -> list[list[str]]:
    """Run the jobs of a workload; return the rows of its table.

    Args:
        task: folder of :func:`make_task`.
        work: the workload.
        modes: the first one is the baseline.
        equal: synchronous training with equal lengths; None = no bound.
    """
    measured = {name: run_job(task, work, name) for name in modes}
    first = measured[modes[0]]
    bound: dict[str, float] = {}
    if equal is not None:
        shared, apart = bounds(first, equal)
        bound = {name: shared if name.startswith("colocated") else apart for name in modes[1:]}
        measured["sync, equal lengths"] = equal
    samples = work.prompts * work.samples
    return [_row(name, result, samples, first, bound.get(name)) for name, result in measured.items()]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt")
    parser.add_argument("--median", type=float, default=60)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--hidden", type=int, default=32, help="width of the model")
    parser.add_argument("--slots", type=int, default=32, help="most responses that a replica decodes at a time")
    parser.add_argument("--tool-s", type=float, default=1.0, help="mean seconds of a tool call in the workload tools")
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument(
        "--pace",
        type=float,
        nargs=2,
        default=(4.0, 150.0),
        metavar=("MS", "US"),
        help="least ms of a decode step and device-us of training per token; 0 0 = the speed of this machine's cores",
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="modes besides the first")
    args = parse_sizes(parser, workloads=["sampling"], modes=["colocated"])
    longest = round(CAP * args.median)
    work = Workload(args.steps, 32, args.samples, args.median, args.sigma, args.hidden, args.slots, longest)
    if args.tiny:
        work = Workload(5, 8, 2, 8, args.sigma, 32, 4, 8 * CAP)
    pace = (args.pace[0] / 1e3, args.pace[1] / 1e6) if any(args.pace) else None
    work = replace(work, engine=args.engine, pace=pace)
    print(f"machine: {processor()}, load {os.getloadavg()[0]:.1f} at start")
    print(
        f"{work.prompts} x {work.samples} responses per step, median {work.median:g}, mean {work.mean_tokens:.0f}, at "
        f"most {work.longest} tokens",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        task, equal = Path(folder), None
        make_task(task, work)
        for name in args.workloads:
            if name != "sampling" and equal is None:
                equal = run_job(task, replace(work, median=work.mean_tokens, sigma=0.0), "sync")
            changes = {"sampling": name == "sampling", "tool_s": args.tool_s if name == "tools" else 0.0}
            first, *others = WORKLOADS[name]
            modes = [first, *(mode for mode in others if mode in args.modes)]
            rows = measure(task, replace(work, **changes), modes, None if name == "sampling" else equal)
            print(f"\n{name}\n" + "\n".join(table_lines([HEAD, *rows], "<" + ">" * 10)), flush=True)


HEAD = ["mode", "s/step", "samples/s", "speed-up", "bound", "median s", "speed-up", "trainer waits", "replica busy"]
HEAD += ["staleness", "partial"]


def _row(name: str, result: Measured, samples: int, first: Measured, bound: float | None) -> list[str]:
    return [
        name,
        f"{result.step:.2f}",
        f"{samples / result.step:.1f}",
        f"{first.step / result.step:.2f}x",
        "" if bound is None else f"{bound:.2f}x",
        f"{result.median:.2f}",
        f"{first.median / result.median:.2f}x",
        f"{result.gen / result.step:.0%}",
        f"{result.busy:.0%}",
        f"{result.staleness:.2f}",
        f"{result.partial:.0%}",
    ]


if __name__ == "__main__":
    main()
