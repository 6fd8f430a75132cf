"""Which charts the report shows, as data: the page's script draws whatever is listed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.tracking.report.balance import balance_charts

VALIDATION_PREFIX = "val-core/"
TIMING_PREFIX = "timing_s/"
PHASE_ORDER = (
    "gen", "reward", "old_log_prob", "ref", "repr_align", "values", "adv", "update_critic", "update_actor", "update",
    "update_weights", "testing", "save_checkpoint",
)  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: what stands above it.
        note: a sentence under the title: unit and meaning.
        series: metric name to label in the legend; a metric that the run does not have is left out.
        prefix: metrics with this beginning are series too, labelled by the rest of their names.
        kind: ``line``, ``points`` (lines with markers, for what is not measured at every step) or ``stack`` (bars).
        wide: whether it takes the whole width.
    """

    title: str
    note: str
    series: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    kind: str = "line"
    wide: bool = False


LEARNING = (
    Chart("Reward", "Score of an answer, mean over the step.", {
        "critic/score/mean": "score", "critic/rewards/mean": "as learned from: shaped, less the KL",
    }),
    Chart("Held-out accuracy", "On the validation problems.", prefix=VALIDATION_PREFIX, kind="points"),
    Chart("Loss", "Cross-entropy per token, in nats.", {"train/loss": "training", "val/loss": "held out"}),
    Chart("Accuracy", "Of the supervised model.", {"train/accuracy": "training", "val/accuracy": "held out"}),
    Chart("KL", "Nats per token.", {
        "actor/reward_kl_penalty": "to the reference (in the reward)",
        "actor/kl_loss": "to the reference (in the loss)",
        "actor/ppo_kl": "to the policy before the step",
    }),
    Chart("Entropy", "Of the policy, nats per token.", {"actor/entropy": "entropy"}),
    Chart("Response length", "Tokens.", {
        "response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest",
    }),
    Chart("Cut answers", "Share of answers that reached the length limit.", {
        "response_length/clip_ratio": "answers", "prompt_length/clip_ratio": "prompts",
    }),
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
    }),
    Chart("Clipped share", "Tokens whose gradient the clip took away.", {
        "actor/pg_clipfrac": "policy", "actor/pg_clipfrac_lower": "policy, dual clip", "critic/vf_clipfrac": "critic",
    }),
    Chart("Gradient norm", "Before clipping.", {
        "actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "model",
    }),
    Chart("Learning rate", "At the end of the step.", {
        "actor/lr": "actor", "critic/lr": "critic", "train/lr": "model",
    }),
    Chart("Advantages", "Over the tokens that are learned from.", {
        "critic/advantages/mean": "mean", "critic/advantages/max": "largest", "critic/advantages/min": "smallest",
    }),
    Chart("Values and returns", "What the critic predicts, and what came.", {
        "critic/values/mean": "values", "critic/returns/mean": "returns",
    }),
    Chart("Prompts that teach nothing", "Left out by group filtering, in groups.", {
        "filter_groups/asked": "asked", "filter_groups/dropped": "dropped", "filter_groups/filled": "filled up",
    }),
)  # fmt: skip

TIME = (
    Chart("Time per phase", "Seconds of each step.", prefix=TIMING_PREFIX, kind="stack", wide=True),
    Chart("Tokens per second", "Of the two heavy halves of a step.", {
        "perf/rollout_tokens_per_s": "generated", "perf/update_tokens_per_s": "trained on",
    }),
    Chart("Throughput", "Tokens per second and device, over the whole step.", {"perf/throughput": "throughput"}),
    Chart("Model FLOPs utilization", "Share of the devices' peak.", prefix="perf/mfu/"),
    Chart("Rollout replicas", "Share of the generation's time in which a replica had work.", {
        "rollout/replica_utilization/mean": "mean", "rollout/replica_utilization/min": "least busy",
    }),
)  # fmt: skip

BALANCE = (
    Chart("Tokens per rank", "Of the actor's update, as dealt out to the data-parallel ranks.", {
        "global_seqlen/balanced_max": "most", "global_seqlen/mean": "mean", "global_seqlen/balanced_min": "fewest",
        "global_seqlen/max": "most, unbalanced", "global_seqlen/min": "fewest, unbalanced",
    }),
    Chart("Imbalance", "How much longer the update takes than with perfect balance; 1 is perfect.", {
        "global_seqlen/balanced_imbalance": "balanced", "global_seqlen/imbalance": "unbalanced",
    }),
)  # fmt: skip

SYNC = (
    Chart("Weight sync: time", "Seconds until the engine serves the new weights.", {
        "weight_sync/seconds": "sync", "timing_s/update_weights": "phase",
    }),
    Chart("Weight sync: bytes", "Sent to all replicas together.", {"weight_sync/bytes": "bytes"}),
    Chart("Weight sync: rate", "GB per second.", {"weight_sync/gb_per_s": "rate"}),
    Chart("Weight sync: verified", "1 where checksums of both sides were compared; a difference ends the run.", {
        "weight_sync/verified": "compared",
    }, kind="points"),
    Chart("Weight sync: verification", "Seconds that comparing took.", {
        "weight_sync/verify_seconds": "verification",
    }, kind="points"),
    Chart("Weight sync: buffers", "Peak of the buckets on a device, in MB.", {"weight_sync/peak_mb": "peak"}),
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
    Chart("Device memory", "GB on the rank that needs most.", {
        "perf/max_memory_allocated_gb": "allocated", "perf/max_memory_reserved_gb": "reserved",
    }),
    Chart("Host memory", "GB.", {"perf/cpu_memory_used_gb": "used"}),
    Chart("Offloaded", "GB that leave the device between phases.", prefix="perf/offloaded_gb/"),
    Chart("Checkpoints", "Seconds that a save took.", {
        "checkpoint/blocked_s": "training waited", "checkpoint/write_s": "written beside training",
    }),
)  # fmt: skip

GROUPS = (
    ("Learning", LEARNING),
    ("Optimisation", OPTIMISATION),
    ("Time", TIME),
    ("Balance", BALANCE),
    ("Weight sync", SYNC),
    ("Rollout against training", MISMATCH),
    ("Memory and checkpoints", MEMORY),
)

FAILURES = {
    "reward/failed": "answers whose reward failed",
    "reward/timeouts": "reward calls that ran out of time",
    "reward/infrastructure_failures": "failures of the reward's infrastructure",
    "reward/bad_samples": "answers that the reward function could not read",
    "reward/retries": "reward calls repeated",
    "reward/processes_replaced": "reward processes replaced",
    "reward/rm_truncated": "answers cut for the reward model",
    "reward_baselines/failed": "greedy baselines whose reward failed",
    "agent/failed": "conversations that failed",
    "rollout/replicas_lost": "rollout replicas lost",
    "rollout/requests_moved": "requests moved to another replica",
    "actor/skipped_steps": "actor updates skipped for a gradient that was not finite",
    "critic/skipped_steps": "critic updates skipped for a gradient that was not finite",
    "checkpoint/failed_saves": "saves that failed",
    "val-aux/failed_rewards": "validation answers whose reward failed",
    "val-aux/agent/failed": "validation conversations that failed",
    "val-aux/rollout/replicas_lost": "rollout replicas lost in validation",
}
"""Counters of what went wrong, with what they count."""


def chart_groups(names: Iterable[str], maps: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The groups of charts that runs with these metrics have, ready for JSON; those without are left out.

    Args:
        names: of the metrics.
        maps: of ranks over steps, see :func:`~megarl.tracking.report.balance.balance_maps`.
    """
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
        found = [name for name in present if name.startswith(chart.prefix) and name != "timing_s/step"]
        if chart.prefix == TIMING_PREFIX:
            found.sort(key=_phase_rank)
        series += [(name, name.removeprefix(chart.prefix).replace("/", " ")) for name in found]
    return {
        "title": chart.title,
        "note": chart.note,
        "kind": chart.kind,
        "wide": chart.wide,
        "series": [{"metric": metric, "label": label} for metric, label in series],
    }


def _phase_rank(name: str) -> tuple[int, str]:
    phase = name.removeprefix(TIMING_PREFIX)
    return (PHASE_ORDER.index(phase) if phase in PHASE_ORDER else len(PHASE_ORDER), phase)
