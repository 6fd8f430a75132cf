"""Step metrics that the driver computes from a batch, under verl's names, and their reduction over parts of a step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

import numpy as np
import torch

from megarl.algorithms import Moments, RatioMoments
from megarl.cluster import WorkerGroup, rank_loads
from megarl.data import DataProto, sequence_lengths, token_counts
from megarl.data.row_map import RowMap, map_in_process
from megarl.tracking.jsonl_files import SECONDS_SUFFIX, TOKENS, WORK, RankLists
from megarl.tracking.phase_timer import unhidden_seconds
from megarl.workers.row_math import (
    MISMATCH_COLUMNS,
    STATISTIC_COLUMNS,
    generated_tokens,
    statistics_of_rows,
)

Metrics = dict[str, float]
GENERATED_TOKENS = "generated_tokens"
"""Key in a batch's ``meta_info``: number of tokens generated for the step, including dropped samples."""

OUT_OF_MEMORY = "out_of_memory"
"""Metric of a role: out-of-memory errors after which a pass was repeated."""
SUMMED = (
    "*/out_of_memory",
    "*/skipped_steps",
    "agent/failed",
    "best_of_n/masked",
    "distillation/rows/*",
    "distillation/retries/*",
    *(f"endpoint/{name}" for name in ("requests", "refused", "unserved", "cut_off", "tokens")),
    *(f"reward/{name}" for name in ("failed", "bad_samples", "timeouts", "infrastructure_failures", "retries")),
    *("reward/processes_replaced", "reward/rm_truncated", "reward_baselines/failed"),
    *(f"rollout/{name}" for name in ("replicas_lost", "runners_lost", "requests_moved", "discarded_tokens")),
    "rollout/idle_while_waiting_s",
    "fully_async/partial/total_partial_num",
    "state_tokens/total",
)
"""Patterns of counts and seconds, which add up over the parts."""
LARGEST = ("*/max", "*/max_partial_span", "*_max", "*_worst", "*/max_memory_allocated_gb")
SMALLEST = ("*/min", "*_min", "*_micro_batch_limit")
"""Patterns of extremes. All other metrics are means over rows."""


def summary(prefix: str, values: torch.Tensor) -> Metrics:
    """Compute ``{prefix}/{mean,max,min}`` of a tensor of any shape; empty for an empty tensor."""
    if values.numel() == 0:
        return {}
    array = values.numpy(force=True)
    return {
        f"{prefix}/mean": float(array.mean(dtype=np.float64)),
        f"{prefix}/max": float(array.max()),
        f"{prefix}/min": float(array.min()),
    }


def moments_summary(prefix: str, moments: Moments) -> Metrics:
    """Return ``{prefix}/{mean,max,min}`` of moments; empty for none."""
    if not moments.count:
        return {}
    return {f"{prefix}/mean": moments.mean, f"{prefix}/max": moments.most, f"{prefix}/min": moments.least}


def batch_metrics(
    batch: DataProto,
    max_prompt_length: int,
    max_response_length: int,
    rows: RowMap = map_in_process,
    *,
    compare_log_probs: bool = False,
) -> Metrics:
    """Summarize scores, rewards, advantages, returns, values and lengths of a step's batch.

    ``critic/score`` and ``critic/rewards`` are sums over a response. The token-level metrics cover trained tokens.

    Args:
        batch: of the step.
        max_prompt_length: limit in tokens.
        max_response_length: limit in tokens.
        rows: computes the sums of each row and the moments of tokens.
        compare_log_probs: add :func:`mismatch_metrics`, if the batch has the engine's log-probs.
    """
    columns = dict.fromkeys((*STATISTIC_COLUMNS, *(MISMATCH_COLUMNS if compare_log_probs else ())))
    sums, parts = rows(statistics_of_rows, list(columns), batch)
    counted = sums.tensors["counted"]
    scores = sums.tensors["scores_sums"][counted]
    metrics = summary("critic/score", scores)
    metrics |= summary("critic/rewards", sums.tensors["rewards_sums"][counted])
    if "uid" in batch.non_tensor_batch:
        metrics |= group_spread(scores, batch.non_tensor_batch["uid"][counted.numpy()])
    for name in parts[0].trained:
        metrics |= moments_summary(f"critic/{name}", Moments.merged([part.trained[name] for part in parts]))
    if compared := [part.mismatch for part in parts if part.mismatch is not None]:
        metrics |= mismatch_metrics(RatioMoments.merged(compared))
    prompt_lengths, response_lengths = sequence_lengths(batch)
    for name, lengths, limit in (
        ("prompt_length", prompt_lengths, max_prompt_length),
        ("response_length", response_lengths, max_response_length),
    ):
        metrics |= summary(name, lengths)
        metrics[f"{name}/clip_ratio"] = (lengths >= limit).double().mean().item()
    return metrics


def group_spread(scores: torch.Tensor, uids: np.ndarray) -> Metrics:
    """Compute the mean standard deviation of scores within groups, and the share of zero-variance groups.

    Groups of one row are left out; without others there are no metrics.

    Args:
        scores: ``[b]``.
        uids: group of each row, ``[b]``.
    """
    numbers = np.unique(uids.astype(str), return_inverse=True)[1].reshape(-1)
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    groups = [group for group in scores.double()[order].split(np.bincount(numbers).tolist()) if len(group) > 1]
    if not groups:
        return {}
    return {
        "critic/score/group_std": sum(group.std().item() for group in groups) / len(groups),
        "critic/score/zero_variance_fraction": sum(bool((group == group[0]).all()) for group in groups) / len(groups),
    }


def mismatch_metrics(moments: RatioMoments) -> Metrics:
    """Return the mismatch of the engine's and the actor's log-probs: ``training/rollout_*``, ``rollout_corr/*``."""
    return {f"training/{name}": value for name, value in moments.differences().items()} | {
        f"rollout_corr/{name}": value for name, value in moments.off_policy_statistics().items()
    }


def throughput_metrics(
    batch: DataProto, seconds: Mapping[str, float], num_devices: int, hidden: Mapping[str, float] = MappingProxyType({})
) -> Metrics:
    """Compute samples and tokens per second of the step, the rollout and the updates.

    ``perf/throughput`` counts prompt and response tokens per second and device. ``perf/rollout_tokens_per_s`` counts
    generated tokens, ``perf/update_tokens_per_s`` all tokens of the updates, ``perf/samples_per_s`` the step's rows;
    these three are totals over all devices.

    Args:
        batch: of the step.
        seconds: wall seconds per phase, including ``step``.
        num_devices: devices of all roles.
        hidden: part of these seconds during a longer phase, per phase.
    """
    tokens = phase_tokens(batch, seconds)
    total = tokens["step"]
    metrics = {"perf/total_num_tokens": float(total), "perf/time_per_step": seconds["step"]}
    metrics["perf/throughput"] = total / (seconds["step"] * num_devices)
    metrics["perf/samples_per_s"] = len(batch) / seconds["step"]
    metrics["perf/rollout_tokens_per_s"] = tokens["gen"] / seconds["gen"]
    update = unhidden_seconds(("update_actor", "update_critic"), seconds, hidden)
    if update:
        metrics["perf/update_tokens_per_s"] = total / update
    return metrics


def phase_tokens(batch: DataProto, phases: Iterable[str]) -> dict[str, int]:
    """Count the tokens that each phase processed: generated tokens for ``gen``, else prompts and responses.

    Generated tokens include samples that dynamic sampling dropped.
    """
    prompt_lengths, response_lengths = sequence_lengths(batch)
    total = int(response_lengths.sum()) + int(prompt_lengths.sum())
    tokens = dict.fromkeys(phases, total)
    if "gen" in tokens:
        tokens["gen"] = batch.meta_info.get(GENERATED_TOKENS) or int(generated_tokens(batch).sum())
    return tokens


def memory_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Describe passes that were repeated after out-of-memory errors in a step, one sentence per role."""
    sentences = []
    for name, count in metrics.items():
        role, _, quantity = name.partition("/")
        if quantity == OUT_OF_MEMORY and count:
            limits = [
                f"{kind} {metrics[key]:,.0f}"
                for kind in ("update", "forward")
                if (key := f"{role}/{kind}_micro_batch_limit") in metrics
            ]
            sentences.append(
                f"{role} ran out of device memory {count:.0f} times; the passes were repeated with smaller "
                f"micro-batches and the same result. Limits per micro-batch from now on: {', '.join(limits)}. "
                "A smaller budget in the configuration saves the repeated work."
            )
    return sentences


def rank_balance(batch: DataProto, learners: Iterable[WorkerGroup], verbs: Container[str]) -> RankLists:
    """List the tokens, work and busy seconds of each data-parallel rank, for the balance file.

    Args:
        batch: of the step.
        learners: worker groups that train; resets their busy seconds, see :meth:`WorkerGroup.take_busy`.
        verbs: verbs of the step. A role without an update in the step, such as the actor during critic warm-up, has no
            load.
    """
    lengths = token_counts(batch)
    lists: RankLists = {}
    for group in learners:
        role, update = group.role, f"update_{group.role}"
        if update in verbs:
            costs = group.budgets[update].cost.of(lengths)
            tokens, work = rank_loads(lengths, costs, group.plan(update, batch))
            lists |= {f"{role}/{TOKENS}": tokens, f"{role}/{WORK}": work}
        lists |= {f"{role}/{verb}{SECONDS_SUFFIX}": seconds for verb, seconds in group.take_busy().items()}
    return lists


def combine_metrics(parts: Sequence[tuple[Metrics, int]]) -> Metrics:
    """Combine the metrics of the parts of a step: sums, extremes, else means weighted by rows.

    Args:
        parts: metrics and number of rows of each part; a part without a metric does not count in it.
    """
    if len(parts) == 1:
        return dict(parts[0][0])
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    return {name: _reduced(name, [(part[name], rows) for part, rows in parts if name in part]) for name in names}


def _reduced(name: str, weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    for reduce, patterns in ((sum, SUMMED), (max, LARGEST), (min, SMALLEST)):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reduce(values)
    return sum(value * rows for value, rows in weighted) / max(sum(rows for _, rows in weighted), 1)
