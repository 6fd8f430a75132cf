"""Learning curves on the quickstart's task at equal budget: every advantage estimator, policy loss and staleness.

    python benchmarks/learning.py [--steps 40] [--seeds 1 2 3] [--jobs 2] [--only grpo gspo] [--plot FILE.svg]
    python benchmarks/learning.py --kinds decoupled bypass --jobs 1
    python benchmarks/learning.py --kinds search external --jobs 1 --steps 20
    python benchmarks/learning.py --kinds vision zoom --jobs 1

Each case is a run of `megarl train --config-name quickstart_grpo` from the warmed-up model of
`bash launch/quickstart.sh` (run it first), on one process slot, with the same prompts and samples per step. Estimators
run with PPO's clipped loss (`rft`: with `reinforce`, on the best samples of each prompt), losses with GRPO's
advantages. The kinds `decoupled` and `bypass` are asynchronous runs (`quickstart_async`, on two slots) with a bound of
the staleness: PPO clips about the recomputed policy, or about the policy that sampled. The kinds `search` (from the
warmed-up model of `bash launch/search_agent.sh`), `external` (`examples/agent.py`), `vision` and `zoom` (the tasks of
`tools/make_squares.py` and `tools/make_zoom.py`) run in each mode, on two slots; their figures also show the reward
against the time of the steps. Runs that exist in `outputs/learning` are reused; remove that folder to repeat them.
Figures need matplotlib (the extra `bench`).

Prints for each case the held-out accuracy before and after training, and the training reward along the way, as means
over the seeds, the mean staleness of the trained samples, and the mean seconds of a step. Also prints whether a run
diverged: a metric that is not finite, a skipped optimizer step, or a final reward below the initial one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from machine import benchmark_parser, parse_sizes, processor

from megarl.base.algorithm_names import ADV_ESTIMATORS, LOSS_MODES
from megarl.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STALENESS = "training/off_policy/trajectory_staleness"
REWARD = "critic/score/mean"
ACCURACIES = [f"val-core/{task}/reward/mean@1" for task in ("arithmetic", "facts", "squares", "zoom")]
ALL_ANSWERS = "best_of_n/all/mean"
"""The reward of all samples, if only the best are trained on."""
ESTIMATORS = [name for name in ADV_ESTIMATORS if not name.endswith("_vectorized")]
LOSSES = [name for name in LOSS_MODES if name not in ("vanilla", "gpg")]  # PPO's is the estimators', gpg is reinforce
BOUNDS = (0, 1, 2, 4, 8)
CORRECTION = "algorithm.rollout_correction"
ASYNCHRONOUS = {
    "decoupled": (f"{CORRECTION}.rollout_is=token",),
    "bypass": (f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=null"),
}
"""Overrides of the kinds of asynchronous runs."""
SEARCH_AGENT = ROOT / "outputs" / "search_agent"
AGENT = "actor_rollout_ref.rollout.agent.external_agent"
AGENTS = {
    "search": ("search_agent", "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null"),
    "external": (
        "quickstart_grpo", "data.max_response_length=64", f"{AGENT}={ROOT}/examples/agent.py:check_twice",
        "reward.name=agent_score",
    ),
    "vision": ("vision",),
    "zoom": ("zoom", "trainer.validation_data_dir=null"),
}  # fmt: skip
"""Configuration and overrides of the kinds that run in each mode."""
PICTURES = {"vision": "tools/make_squares.py", "zoom": "tools/make_zoom.py"}
"""Tools that write the tasks of kinds with pictures."""
STALE = ("async_training.max_staleness=1", f"{CORRECTION}.rollout_is=token")
MODES = {
    "sync": (),
    "colocated": ("async_training.mode=colocated", *STALE),
    "disaggregated": (
        "async_training.mode=disaggregated", "async_training.sync_interval=2", *STALE, "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ),
}  # fmt: skip
"""Overrides of the modes of agents: two slots for both, or one for each."""
KINDS = {
    "estimator": (ESTIMATORS, "Advantage estimators, with PPO's clipped loss"),
    "loss": (LOSSES, "Policy losses, with GRPO's advantages"),
    "decoupled": ([f"staleness {bound}" for bound in BOUNDS], "GRPO with stale samples, decoupled PPO"),
    "bypass": ([f"staleness {bound}" for bound in BOUNDS], "GRPO with stale samples, clipped about the old policy"),
    "search": (list(MODES), "Search agent"),
    "external": (list(MODES), "External agent"),
    "vision": (list(MODES), "Vision-language model that counts squares"),
    "zoom": (list(MODES), "Vision-language model that zooms in"),
}
"""Names and title of each kind of cases."""
PROMPTS, ANSWERS = 32, 8
ONE_PROCESS = (
    "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "critic.megatron.data_parallel_size=1",
)  # fmt: skip
WINDOW = 5
"""Number of steps averaged for a point of a curve."""
SETTINGS = {
    "rft": (
        *("algorithm.best_of_n.enable=true", "algorithm.best_of_n.min_score=0.5"),
        "actor_rollout_ref.actor.policy_loss.loss_mode=reinforce",
    ),
    "clip_cov": ("actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.02",),
    "kl_cov": ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.02",),
    "gspo": ("actor_rollout_ref.actor.clip_ratio_low=0.03", "actor_rollout_ref.actor.clip_ratio_high=0.04"),
    "geo_mean": ("actor_rollout_ref.actor.clip_ratio_low=0.4", "actor_rollout_ref.actor.clip_ratio_high=0.4"),
}
"""Overrides of cases: responses to imitate, importance ratios other than PPO's, shares of small batches."""


class Case(NamedTuple):
    """An estimator, a loss, a bound of the staleness, or the mode of an agent."""

    kind: str
    name: str

    @property
    def overrides(self) -> list[str]:
        """Return the configuration and the overrides of the run."""
        if self.kind in ASYNCHRONOUS:
            bound = self.name.split()[1]
            return ["quickstart_async", f"async_training.max_staleness={bound}", *ASYNCHRONOUS[self.kind]]
        if self.kind in AGENTS:
            return [*AGENTS[self.kind], *MODES[self.name]]
        key = "algorithm.adv_estimator"
        if self.kind == "loss":
            key = "actor_rollout_ref.actor.policy_loss.loss_mode"
        return ["quickstart_grpo", f"{key}={self.name}", *SETTINGS.get(self.name, ()), *ONE_PROCESS]


class Curve(NamedTuple):
    """Result of one run.

    Attributes:
        rewards: by step.
        before: held-out accuracy before the training.
        after: held-out accuracy after it.
        fault: error; empty = none.
        staleness: mean of the trained samples.
        seconds: of each step, without validation.
    """

    rewards: list[float]
    before: float
    after: float
    fault: str
    staleness: float = 0.0
    seconds: Sequence[float] = ()


def cases(kinds: Sequence[str], only: Sequence[str]) -> Iterator[Case]:
    """Yield all cases of these kinds, or the selected ones."""
    for kind in kinds:
        yield from (Case(kind, name) for name in KINDS[kind][0] if not only or name in only)


def run(case: Case, seed: int, args: argparse.Namespace) -> Curve:
    """Return the curve of one run, new or stored."""
    steps = args.steps
    folder = args.runs.absolute() / f"{case.kind}-{case.name}-{steps}-{seed}".replace(" ", "_")
    if not (folder / "summary.json").exists():
        command = [
            sys.executable, "-m", "megarl", "train", "--config-name", *case.overrides,
            f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            f"actor_rollout_ref.rollout.n={ANSWERS}", f"trainer.total_training_steps={steps}", f"trainer.seed={seed}",
            f"trainer.test_freq={steps}", "trainer.save_freq=-1", "trainer.hf_export_dir=null",
            f"trainer.experiment_name={folder.name}", f"hydra.run.dir={folder}", "trainer.logger=[jsonl]",
            *(args.retriever if case.kind == "search" else []), *args.overrides,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            return Curve([], math.nan, math.nan, done.stderr.strip().splitlines()[-1] if done.stderr else "failed")
        print(f"  done: {folder.name}", file=sys.stderr)
    return read_curve(folder)


def read_curve(folder: Path) -> Curve:
    """Read the curve from a run's folder."""
    rows = read_metrics(folder / "metrics.jsonl")
    rewards = [row.get(ALL_ANSWERS, row[REWARD]) for row in rows if REWARD in row]
    accuracies = [row[name] for row in rows for name in ACCURACIES if name in row]
    fault = ""
    if any(not math.isfinite(value) for row in rows for value in row.values()):
        fault = "not finite"
    elif any(row.get("actor/skipped_steps") for row in rows):
        fault = "skipped steps"
    elif statistics.fmean(rewards[-WINDOW:]) < statistics.fmean(rewards[:WINDOW]):
        fault = "reward fell"
    staleness = statistics.fmean(row.get(STALENESS, 0.0) for row in rows if REWARD in row)
    seconds = [row["timing_s/step"] for row in rows if REWARD in row]
    return Curve(rewards, accuracies[0], accuracies[-1], fault, staleness, seconds)


def smooth(values: Sequence[float]) -> list[float]:
    """Return means over the last :data:`WINDOW` values."""
    return [statistics.fmean(values[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(values))]


def describe(case: Case, curves: Sequence[Curve]) -> str:
    """Return a line of the table."""
    good = [curve for curve in curves if curve.rewards]
    faults = ", ".join(sorted({curve.fault for curve in curves if curve.fault})) or "no"
    if not good:
        return f"{case.kind:<10}{case.name:<30}{faults}"
    last = len(good[0].rewards) - 1
    points = [statistics.fmean(smooth(curve.rewards)[at] for curve in good) for at in (0, last // 4, last // 2, last)]
    after = [curve.after for curve in good]
    return (
        f"{case.kind:<10}{case.name:<30}"
        + "".join(f"{value:>8.3f}" for value in points)
        + f"{statistics.fmean(curve.before for curve in good):>10.3f}{statistics.fmean(after):>8.3f}"
        + f"  {min(after):.3f} to {max(after):.3f}{statistics.fmean(curve.staleness for curve in good):>7.2f}"
        + f"{statistics.fmean(second for curve in good for second in curve.seconds):>7.2f}  {faults}"
    )


def plot(curves_by_case: dict[Case, list[Curve]], path: Path) -> None:
    """Plot reward against step for all cases, each kind on a panel of its own; for agents also against time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "megarl"
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(case.kind for case in curves_by_case))
    axes = [(kind, timed) for kind in kinds for timed in ([False, True] if kind in AGENTS else [False])]
    size = 6.5 * len(axes), 5.5
    figure, grid = pyplot.subplots(1, len(axes), figsize=size, sharey=True, squeeze=False)
    panels = grid[0]
    for panel, (kind, timed) in zip(panels, axes, strict=True):
        title = KINDS[kind][1]
        shown = [
            (case, [c for c in curves if c.rewards]) for case, curves in curves_by_case.items() if case.kind == kind
        ]
        for number, (case, curves) in enumerate((case, curves) for case, curves in shown if curves):
            rows = [smooth(curve.rewards) for curve in curves]
            steps = range(1, min(map(len, rows)) + 1)
            columns = [[row[step - 1] for row in rows] for step in steps]
            at: Sequence[float] = steps
            if timed:
                clocks = [list(itertools.accumulate(curve.seconds)) for curve in curves]
                at = [statistics.fmean(clock[step - 1] for clock in clocks) for step in steps]
            colour = pyplot.get_cmap("tab20")(number * 2 % 20 + number // 10)
            panel.plot(at, [statistics.fmean(column) for column in columns], label=case.name, color=colour)
            panel.fill_between(at, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.08)
        panel.set(title=title, xlabel="seconds" if timed else "training step", ylim=(0, 1.02))
        panel.grid(alpha=0.25)
        panel.legend(loc="lower right", fontsize=8, ncols=2)
    panels[0].set_ylabel(f"mean reward of a step (last {WINDOW} steps; band: seeds)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


@contextmanager
def retriever() -> Iterator[str]:
    """Serve the search agent's corpus; yield the override with the address."""
    sys.path.append(str(ROOT / "tools"))
    from retrieval_server import BM25Index, RetrievalServer, read_corpus

    with RetrievalServer(BM25Index(read_corpus(SEARCH_AGENT / "task" / "corpus.jsonl")), port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"actor_rollout_ref.rollout.multi_turn.search.url={server.url}"
        server.shutdown()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["estimator", "loss"])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "learning", help="folder of the runs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parse_sizes(parser, steps=1, seeds=[1], jobs=1, only=["grpo"])
    from_quickstart = not args.overrides and not set(args.kinds) <= PICTURES.keys()
    if from_quickstart and not (ROOT / "outputs" / "quickstart" / "warm").exists():
        sys.exit("there is no warmed model: run `bash launch/quickstart.sh` first")
    for kind in PICTURES.keys() & set(args.kinds):
        if not (ROOT / "outputs" / kind / "task").exists():
            sys.exit(f"there are no pictures: run `python {PICTURES[kind]}` first")
    print(f"machine: {processor()}; {args.steps} steps of {PROMPTS} prompts x {ANSWERS} answers, seeds {args.seeds}\n")
    selected = list(cases(args.kinds, args.only))
    if "search" in args.kinds and not (SEARCH_AGENT / "warm").exists():
        sys.exit("there is no warmed search agent: run `bash launch/search_agent.sh` first")
    with retriever() if "search" in args.kinds else nullcontext() as url, ThreadPoolExecutor(args.jobs) as pool:
        args.retriever = [url] if url else []
        futures = {case: [pool.submit(run, case, seed, args) for seed in args.seeds] for case in selected}
        curves_by_case = {case: [future.result() for future in running] for case, running in futures.items()}
    head = f"{'':<40}{'reward at the start, 1/4, 1/2, end':>32}{'held out':>10}{'after':>8}"
    print(f"{head}  seeds           stale  s/step  diverged")
    for case, curves in curves_by_case.items():
        print(describe(case, curves))
    if args.plot:
        plot(curves_by_case, args.plot)
    if any(curve.fault for curves in curves_by_case.values() for curve in curves):
        sys.exit("at least one run diverged")


if __name__ == "__main__":
    main()
