"""Charts of the report, as data for the page's script: downsampled curves of metrics, and load maps of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.tracking.jsonl_files import SECONDS_SUFFIX, TOKENS, VALIDATION_PREFIX, WORK, BalanceRows

MOST_STEPS, MOST_RANKS = 200, 128
_BUSY = "Seconds in the verb, without collectives, of the busiest process of a rank."
_NOTES = {
    TOKENS: ("tokens", "Assigned tokens of the update."),
    WORK: ("predicted work", "Of the update, by the model's FLOPs."),
}
MOST_POINTS = 600
TIMED = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
"""Metrics that add up to the training time: steps, validation, checkpoints."""
TIMING_PREFIX = "timing_s/"
PHASE_ORDER = (
    "gen", "reward", "old_log_prob", "ref", "teacher", "repr_align", "values", "adv", "update_critic", "update_actor",
    "update", "update_weights", "testing", "save_checkpoint",
)  # fmt: skip
_UPDATES = {"actor": "actor updates", "critic": "critic updates", "train": "updates"}
_PASSES = (
    ("actor", "passes of the actor"), ("critic", "passes of the critic"), ("ref", "passes of the reference"),
    ("reward_model", "passes of the reward model"), ("train", "passes"),
)  # fmt: skip


def balance_maps(rows: BalanceRows) -> dict[str, dict[str, Any]]:
    """Return the load map of each list in the balance file; lists of a single rank are skipped.

    Returns:
        By list: ``steps`` ``[s]``; ``ranks`` ``[r]``, first rank of each row; ``each``, ranks per row; ``mean`` ``[s]``
        over the ranks; ``load`` ``[r][s]``, relative to the mean. With more than :data:`MOST_STEPS` steps, each
        interval keeps the step whose busiest rank had the highest load. With more than :data:`MOST_RANKS` ranks, a row
        keeps the busiest of neighbouring ranks.
    """

    def order(name: str) -> tuple[str, int, str]:
        """Sort by role, then assigned quantities before measured ones."""
        role, _, quantity = name.partition("/")
        return role, {TOKENS: 0, WORK: 1}.get(quantity, 2), quantity

    names = sorted({name for lists in rows.values() for name in lists}, key=order)
    maps = {}
    for name in names:
        # After a resume with another layout, ranks differ: only steps of the last layout are shown.
        width = next(len(lists[name]) for lists in reversed(list(rows.values())) if name in lists)
        steps = [step for step, lists in rows.items() if len(lists.get(name, ())) == width]
        if width > 1:
            maps[name] = _map(steps, np.array([rows[step][name] for step in steps], dtype=np.float64))
    return maps


def balance_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a chart for each map, in the format of :func:`~megarl.ops.report.charts.chart_groups`."""
    charts = []
    for name in names:
        role, _, quantity = name.partition("/")
        label, note = _NOTES.get(quantity, (f"busy in {quantity.removesuffix(SECONDS_SUFFIX)}", _BUSY))
        note += " Colour: relative to the mean of the step's ranks."
        series = [{"metric": name, "label": label}]
        title = f"Ranks of {role}: {label}"
        charts.append({"title": title, "note": note, "kind": "ranks", "wide": False, "series": series})
    return charts


def _map(steps: list[int], values: np.ndarray[Any, Any]) -> dict[str, Any]:
    mean = values.mean(axis=1)
    load = np.divide(values, mean[:, None], out=np.ones_like(values), where=mean[:, None] > 0)
    intervals = np.array_split(np.arange(len(steps)), min(len(steps), MOST_STEPS))
    kept = np.array([interval[load[interval].max(axis=1).argmax()] for interval in intervals])
    each = -(-values.shape[1] // MOST_RANKS)
    first = np.arange(0, values.shape[1], each)
    busiest = np.maximum.reduceat(load[kept], first, axis=1)
    return {
        "steps": [steps[at] for at in kept],
        "ranks": first.tolist(),
        "each": each,
        "mean": [float(f"{value:.4g}") for value in mean[kept].tolist()],
        "load": [[round(value, 4) for value in row] for row in busiest.T.tolist()],
    }


Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Chart:
    """Definition of one chart."""

    title: str
    note: str  # sentence below the title: unit and meaning
    series: Mapping[str, str] = field(default_factory=dict)  # legend label by metric; absent metrics are skipped
    prefix: str | None = None  # metrics with this prefix are series too, labelled by the rest of their names
    kind: str = "line"  # line, points (lines with markers, for metrics not measured at every step) or stack (bars)
    wide: bool = False  # takes the whole width
    share: bool = False  # values are shares: their axis ends at 1, or at the largest value if that is small


LEARNING = (
    Chart("Reward", "Score of an answer, mean over the step.", {
        "critic/score/mean": "score", "critic/rewards/mean": "training reward: shaped, minus the KL",
    }),
    Chart("Spread within groups", "Standard deviation of the scores of a prompt's answers, mean over prompts.", {
        "critic/score/group_std": "standard deviation",
    }),
    Chart("Zero-variance groups", "Share of the groups whose answers all score the same.", {
        "critic/score/zero_variance_fraction": "groups",
    }, share=True),
    Chart("Held-out accuracy", "On the validation problems.", prefix=VALIDATION_PREFIX, kind="points", share=True),
    Chart("Loss", "Cross-entropy per token, in nats.", {"train/loss": "training", "val/loss": "held out"}),
    Chart("Accuracy", "Of the supervised model.", {
        "train/accuracy": "training", "val/accuracy": "held out",
    }, share=True),
    Chart("KL", "Nats per token.", {
        "actor/reward_kl_penalty": "to the reference (in the reward)",
        "actor/kl_loss": "to the reference (in the loss)",
        "actor/ppo_kl": "to the policy before the step",
    }),
    Chart("Entropy", "Of the policy, nats per token.", {"actor/entropy": "entropy"}),
    Chart("Response length", "Tokens.", {
        "response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest",
    }),
    Chart("Cut answers", "Share of answers that a limit ended, and of prompts of the maximum length.", {
        "response/truncated_ratio": "answers", "prompt_length/clip_ratio": "prompts",
    }, share=True),
    Chart("Tools", "Per conversation.", {
        "tool_call_counts/mean": "tool calls",
        "env/number_of_valid_search": "valid searches",
    }),
)  # fmt: skip

OPTIMISATION = (
    Chart("Policy loss", "Clipped surrogate, or the loss that is configured.", {"actor/pg_loss": "policy loss"}),
    Chart("Value loss", "Of the critic.", {"critic/vf_loss": "value loss"}),
    Chart("Explained variance", "Share of the returns' variance that the critic explains; 1 is perfect.", {
        "critic/vf_explained_var": "explained variance",
    }, share=True),
    Chart("Clipped share", "Share of tokens with a clipped gradient.", {
        "actor/pg_clipfrac": "policy", "actor/pg_clipfrac_lower": "policy, dual clip", "critic/vf_clipfrac": "critic",
    }, share=True),
    Chart("Gradient norm", "Before clipping.", {
        "actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model",
    }),
    Chart("Learning rate", "At the end of the step.", {
        "actor/lr": "actor", "critic/lr": "critic", "train/lr": "model",
    }),
    Chart("Advantages", "Over the tokens of the loss.", {
        "critic/advantages/mean": "mean", "critic/advantages/max": "largest", "critic/advantages/min": "smallest",
    }),
    Chart("Values and returns", "Predictions of the critic, and observed returns.", {
        "critic/values/mean": "values", "critic/returns/mean": "returns",
    }),
    Chart("Dynamic sampling", "In groups; dropped ones have zero variance.", {
        "filter_groups/asked": "requested", "filter_groups/dropped": "dropped", "filter_groups/filled": "filled up",
    }),
)  # fmt: skip

TIME = (
    Chart("Time per phase", "Seconds; separate devices overlap.", prefix=TIMING_PREFIX, kind="stack", wide=True),
    Chart("Tokens per second", "Generation and training separately.", {
        "perf/rollout_tokens_per_s": "generated", "perf/update_tokens_per_s": "trained on",
    }),
    Chart("Samples per second", "Over the whole step.", {"perf/samples_per_s": "samples"}),
    Chart("Throughput", "Tokens per second and device, over the whole step.", {"perf/throughput": "throughput"}),
    Chart("Model FLOPs utilization", "Share of the devices' peak.", prefix="perf/mfu/", share=True),
    Chart("Rollout replicas", "Share of the generation time in which a replica had work.", {
        "rollout/replica_utilization/mean": "mean", "rollout/replica_utilization/min": "least busy",
    }, share=True),
    Chart("Idle time in asynchronous training", "Share of the time between two weight syncs.", {
        "fully_async/trainer/idle_ratio": "trainer", "fully_async/rollouter/idle_ratio": "engines",
    }, share=True),
    Chart("Staleness", "Weight syncs between sampling and training.", {
        "training/off_policy/token_staleness/mean": "tokens, mean",
        "training/off_policy/trajectory_staleness": "oldest token of a sample, mean",
        "training/off_policy/trajectory_staleness_worst": "oldest token of a sample, largest",
    }),
)  # fmt: skip

BALANCE = (
    Chart("Tokens per rank", "Of the actor's update, by data-parallel rank.", {
        "global_seqlen/balanced_max": "most", "global_seqlen/mean": "mean", "global_seqlen/balanced_min": "fewest",
        "global_seqlen/max": "most, unbalanced", "global_seqlen/min": "fewest, unbalanced",
    }),
    Chart("Imbalance", "Update time relative to perfect balance; 1 is perfect.", {
        "global_seqlen/balanced_imbalance": "balanced", "global_seqlen/imbalance": "unbalanced",
    }),
)  # fmt: skip

EXPERTS = (
    Chart("Busiest expert", "Tokens of the busiest expert over the mean, in the worst layer; 1 is even.", {
        "actor/expert_load/max_over_mean": "actor", "critic/expert_load/max_over_mean": "critic",
        "train/expert_load/max_over_mean": "model",
    }),
    Chart("Dead experts", "Experts without a token in an optimizer step, over all layers.", {
        "actor/expert_load/dead": "actor", "critic/expert_load/dead": "critic", "train/expert_load/dead": "model",
    }),
    Chart("Busiest expert of each layer", "Of the actor: tokens over the mean.",
          prefix="actor/expert_load/max_over_mean/", wide=True),
    Chart("Losses of the routers", "Without their weights, mean over layers.", {
        "actor/seq_load_balancing_loss": "balance", "actor/z_loss": "z-loss",
    }),
)  # fmt: skip

SYNC = (
    Chart("Weight sync: time", "Seconds until the engine has the new weights.", {
        "weight_sync/seconds": "sync", "timing_s/update_weights": "phase",
    }),
    Chart("Weight sync: bytes", "Sent to all replicas together.", {"weight_sync/bytes": "bytes"}),
    Chart("Weight sync: rate", "GB per second.", {"weight_sync/gb_per_s": "rate"}),
    Chart("Weight sync: verified", "1 if the checksums of both sides were compared; a difference ends the run.", {
        "weight_sync/verified": "compared",
    }, kind="points"),
    Chart("Weight sync: verification", "Seconds of the comparison.", {
        "weight_sync/verify_seconds": "verification",
    }, kind="points"),
    Chart("Weight sync: buffers", "Extra memory per process at the peak, in MB.", {
        "weight_sync/peak_mb": "peak",
    }),
)  # fmt: skip

MISMATCH = (
    Chart("Probabilities, engine against actor", "Absolute difference at the sampled tokens.", {
        "training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest",
        "training/rollout_probs_diff_std": "standard deviation",
    }),
    Chart("Log-probs, engine against actor", "Absolute difference at the sampled tokens, in nats.", {
        "training/rollout_log_probs_diff_mean": "mean", "training/rollout_log_probs_diff_max": "largest",
    }),
    Chart("Divergence, engine against actor", "Nats per token.", {
        "rollout_corr/kl": "KL", "rollout_corr/k3_kl": "KL, k3 estimate",
    }),
    Chart("Perplexity", "Of the sampled answers.", {
        "rollout_corr/training_ppl": "under the actor", "rollout_corr/rollout_ppl": "under the engine",
    }),
)  # fmt: skip

MEMORY = (
    Chart("Device memory", "GB on the rank with the highest use.", {
        "perf/max_memory_allocated_gb": "allocated", "perf/max_memory_reserved_gb": "reserved",
    }),
    Chart("Host memory", "GB.", {"perf/cpu_memory_used_gb": "used"}),
    Chart("Offloaded", "GB offloaded from the device between phases.", prefix="perf/offloaded_gb/"),
    Chart("Checkpoints", "Seconds of a save.", {
        "checkpoint/blocked_s": "training blocked", "checkpoint/write_s": "written in the background",
    }),
)  # fmt: skip

GROUPS = (
    ("Learning", LEARNING),
    ("Optimisation", OPTIMISATION),
    ("Time", TIME),
    ("Balance", BALANCE),
    ("Experts", EXPERTS),
    ("Weight sync", SYNC),
    ("Rollout against training", MISMATCH),
    ("Memory and checkpoints", MEMORY),
)

FAILURES = {
    "reward/failed": "answers whose reward failed",
    "reward/timeouts": "reward calls that timed out",
    "reward/infrastructure_failures": "failures of the reward's infrastructure",
    "reward/bad_samples": "answers that the reward function could not read",
    "reward/retries": "reward calls repeated",
    "reward/processes_replaced": "reward processes replaced",
    "reward/rm_truncated": "answers truncated for the reward model",
    "reward_baselines/failed": "greedy baselines whose reward failed",
    "agent/failed": "conversations that failed",
    "rollout/replicas_lost": "rollout replicas lost",
    "rollout/requests_moved": "requests moved to another replica",
    "rollout/discarded_tokens": "tokens of interrupted responses thrown away",
    "rollout/runners_lost": "agent runners lost",
    **{f"{role}/skipped_steps": f"{updates} skipped for a non-finite gradient" for role, updates in _UPDATES.items()},
    **{f"{role}/empty_steps": f"{updates} without a token to train on" for role, updates in _UPDATES.items()},
    **{f"{role}/out_of_memory": f"{passes} repeated after running out of device memory" for role, passes in _PASSES},
    "checkpoint/failed_saves": "saves that failed",
    "val-aux/failed_rewards": "validation answers whose reward failed",
    "val-aux/agent/failed": "validation conversations that failed",
    "val-aux/rollout/replicas_lost": "rollout replicas lost in validation",
    "val-aux/rollout/runners_lost": "agent runners lost in validation",
}
"""Failure counters, with descriptions."""


def chart_groups(names: Iterable[str], maps: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the groups of charts for runs with these metrics and maps of ranks; empty charts are dropped."""
    present = sorted(set(names))
    failures = Chart("Failures", "Counted per step.", FAILURES)
    groups = []
    for title, charts in (*GROUPS, ("Failures", (failures,))):
        described = [_described(chart, present) for chart in charts]
        kept = [chart for chart in described if chart["series"]]
        kept += balance_charts(maps) if charts is BALANCE else []
        if kept:
            groups.append({"title": title, "charts": kept})
    return groups


def _described(chart: Chart, present: Sequence[str]) -> dict[str, Any]:
    series = [(metric, label) for metric, label in chart.series.items() if metric in set(present)]
    if chart.prefix is not None:
        names = [name for name in present if name.startswith(chart.prefix) and name != "timing_s/step"]
        if chart.prefix == TIMING_PREFIX:
            order = {f"{TIMING_PREFIX}{phase}": at for at, phase in enumerate(PHASE_ORDER)}
            names.sort(key=lambda name: order.get(name, len(order)))  # stable: the others stay in the order of names
        series += [(name, name.removeprefix(chart.prefix).replace("/", " ")) for name in names]
    described = {name: getattr(chart, name) for name in ("title", "note", "kind", "wide", "share")}
    return described | {"series": [{"metric": metric, "label": label} for metric, label in series]}


def downsample(steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any], most: int = MOST_POINTS) -> dict[str, Any]:
    """Downsample a curve to at most ``most`` points.

    A longer curve is split into ``most`` intervals. Mean, minimum and maximum of each are kept: the line shows the
    means, and the band every outlier.

    Args:
        steps: ``[n]``, ascending.
        values: ``[n]``, finite.

    Returns:
        ``x``, ``y`` and ``n`` (number of values before), and for a longer curve ``low`` and ``high``. ``x`` is the last
        step of an interval.
    """
    if len(values) <= most:
        return {"x": steps.tolist(), "y": _rounded(values), "n": len(values)}
    begins = np.arange(most) * len(values) // most
    ends = np.append(begins[1:], len(values))
    return {
        "x": steps[ends - 1].tolist(),
        "y": _rounded(np.add.reduceat(values, begins) / (ends - begins)),
        "n": len(values),
        "low": _rounded(np.minimum.reduceat(values, begins)),
        "high": _rounded(np.maximum.reduceat(values, begins)),
    }


def metric_curves(rows: Rows, most: int = MOST_POINTS) -> tuple[list[list[float]], dict[str, dict[str, Any]]]:
    """Return all metrics of a run as curves, without non-finite values.

    Returns:
        Step axes, and the curve of each metric (:func:`downsample`) with ``x`` the index of its axis; most share one.
    """
    names = sorted({name for row in rows for name in row} - {"step"})
    columns = {name: np.full(len(rows), np.nan) for name in names}
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name != "step":
                columns[name][number] = value
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    axes: list[list[float]] = []
    numbers: dict[tuple[float, ...], int] = {}
    curves: dict[str, dict[str, Any]] = {}
    for name, values in columns.items():
        finite = np.isfinite(values)
        curve = downsample(steps[finite], values[finite], most)
        axis = tuple(curve["x"])
        if axis not in numbers:
            numbers[axis] = len(axes)
            axes.append(list(axis))
        curves[name] = {**curve, "x": numbers[axis]}
    return axes, curves


def training_seconds(rows: Rows) -> tuple[list[float], list[float]]:
    """Return steps and cumulative training seconds (steps, validation, saves), downsampled."""
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    spent = np.array([sum(row[name] for name in TIMED if math.isfinite(row.get(name, math.nan))) for row in rows])
    if not len(steps):
        return [], []
    seconds = np.cumsum(spent)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 2 * MOST_POINTS)).round().astype(np.int64))
    return steps[kept].tolist(), _rounded(seconds[kept])


def non_finite_counts(rows: Rows) -> dict[str, int]:
    """Count the steps with a non-finite value of each metric; metrics without any are skipped."""
    return dict(Counter(name for row in rows for name, value in row.items() if not math.isfinite(value)))


def _rounded(values: np.ndarray[Any, Any]) -> list[float]:
    """Round to six significant digits: more than a screen shows, and half the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]
