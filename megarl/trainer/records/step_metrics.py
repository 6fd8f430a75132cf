"""Step metrics that the driver computes from a batch, under verl's names; whether engine and actor agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from megarl.algorithms import Moments, RatioMoments
from megarl.base.reductions import Largest, Metrics, Smallest
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto, sequence_lengths, token_counts
from megarl.data.remote_columns import RowMap, map_in_process
from megarl.models import ModelConfig
from megarl.tracking.jsonl_files import DELAY_PREFIX, SECONDS_SUFFIX, TOKENS, WORK, RankLists
from megarl.tracking.phase_timer import unhidden_seconds
from megarl.trainer.records.slow_hosts import host_delays, hosts_of_ranks
from megarl.workers.row_math import (
    ALL_ROWS,
    FINISH_REASON,
    GENERATED_TOKENS,
    IMAGE_ROWS,
    MISMATCH_COLUMNS,
    STATISTIC_COLUMNS,
    generated_tokens,
    statistics_of_rows,
    summary,
    truncated_rows,
)

EXCESS = "training/rollout_mismatch_excess"
"""Metric of the first step: the mean difference, over the largest that rounding explains."""
DIFFERENCE = "training/rollout_log_probs_diff_mean"
ROUNDING = {"float32": 0.005, "bfloat16": 0.05}
"""Largest mean difference that rounding explains, in nats, by number format."""
QUANTIZED = 0.15
"""The same for an engine with weights or a KV cache of 8 bits, and for running servers, whose formats are unknown."""
ROUTED = 2.0
"""Factor for a mixture of experts: rounding sends some tokens to other experts."""
UPDATES = ("update_actor", "update_critic")
"""Phases that process the trained rows."""
OUT_OF_MEMORY = "out_of_memory"
"""Metric of a role: out-of-memory errors after which a pass was repeated."""
EMPTY_STEPS = "empty_steps"
"""Metric of a role: optimizer steps without a token to train on."""
_ZERO_VARIANCE = "critic/score/zero_variance_fraction"
_CAUSES = {
    "actor/truncated_masked_fraction": "algorithm.mask_truncated_completions leaves out {:.0%} of the samples, which a "
    "limit of tokens or turns ended",
    "rollout_corr/rollout_rs_masked_fraction": "algorithm.rollout_correction.rollout_rs rejects {:.0%} of the tokens",
    "best_of_n/masked": "algorithm.best_of_n.min_score leaves out {:.0f} samples",
    "agent/failed": "{:.0f} conversations failed",
    "reward/failed": "{:.0f} rewards failed",
    _ZERO_VARIANCE: "the samples of {:.0%} of the prompts score the same, so that their advantages are 0",
}
"""Reasons why a step may train nothing, by the metric that measures each."""


def _moments_summary(prefix: str, moments: Moments) -> Metrics:
    """Return ``{prefix}/{mean,max,min}`` of moments; empty for none."""
    if not moments.count:
        return {}
    return {
        f"{prefix}/mean": moments.mean,
        f"{prefix}/max": Largest(moments.most),
        f"{prefix}/min": Smallest(moments.least),
    }


def batch_metrics(
    batch: DataProto,
    max_prompt_length: int,
    max_response_length: int,
    rows: RowMap = map_in_process,
    *,
    compare_log_probs: bool = False,
    explained: float | None = None,
) -> Metrics:
    """Summarize scores, rewards, advantages, returns, values and lengths of a step's batch.

    ``critic/score`` and ``critic/rewards`` are sums over a response. The token-level metrics cover trained tokens.

    Args:
        max_prompt_length: limit in tokens.
        max_response_length: limit in tokens.
        rows: computes the sums of each row and the moments of tokens.
        compare_log_probs: add :func:`mismatch_metrics`, if the batch has the engine's log-probs.
        explained: compare the difference of the log-probs with this one, that rounding explains
            (:func:`explained_by_rounding`); None = do not.
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
        metrics |= _moments_summary(f"critic/{name}", Moments.merged([part.trained[name] for part in parts]))
    for kind in parts[0].mismatch:
        moments = RatioMoments.merged([part.mismatch[kind] for part in parts])
        metrics |= mismatch_metrics(moments, kind)
        if explained is not None and moments.log_distance.count:
            metrics[EXCESS + kind] = mismatch_excess(moments.log_distance, explained)
    prompt_lengths, response_lengths = sequence_lengths(batch)
    for name, lengths, limit in (
        ("prompt_length", prompt_lengths, max_prompt_length),
        ("response_length", response_lengths, max_response_length),
    ):
        metrics |= summary(name, lengths)
        metrics[f"{name}/clip_ratio"] = (lengths >= limit).double().mean().item()  # verl's: the length alone counts
    if FINISH_REASON in batch.non_tensor_batch:
        metrics["response/truncated_ratio"] = truncated_rows(batch).double().mean().item()
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


def mismatch_metrics(moments: RatioMoments, kind: str) -> Metrics:
    """Return the mismatch of the engine's and the actor's log-probs.

    They are ``training/rollout_*``, with the end ``kind``, and over all rows ``rollout_corr/*``.
    """
    of_policy = moments.off_policy_statistics() if kind == ALL_ROWS else {}
    differences = {f"training/{name}{kind}": value for name, value in moments.differences().items()}
    return differences | {f"rollout_corr/{name}": value for name, value in of_policy.items()}


def throughput_metrics(
    batch: DataProto,
    trained: DataProto,
    seconds: Mapping[str, float],
    num_devices: int,
    hidden: Mapping[str, float] = MappingProxyType({}),
) -> Metrics:
    """Compute samples and tokens per second of the step, the rollout and the updates.

    ``perf/throughput`` counts prompt and response tokens per second and device. ``perf/rollout_tokens_per_s`` counts
    generated tokens, ``perf/update_tokens_per_s`` all tokens of the updates, ``perf/samples_per_s`` the step's rows;
    these three are totals over all devices.

    Args:
        trained: rows of the updates.
        seconds: wall seconds per phase, including ``step``.
        hidden: part of these seconds during a longer phase, per phase.
    """
    tokens = phase_tokens(batch, seconds, trained)
    total = tokens["step"]
    metrics = {"perf/total_num_tokens": float(total), "perf/time_per_step": seconds["step"]}
    metrics["perf/throughput"] = total / (seconds["step"] * num_devices)
    metrics["perf/samples_per_s"] = len(batch) / seconds["step"]
    metrics["perf/rollout_tokens_per_s"] = tokens["gen"] / seconds["gen"]
    update = unhidden_seconds(UPDATES, seconds, hidden)
    if update:
        metrics["perf/update_tokens_per_s"] = _num_tokens(trained) / update
    return metrics


def phase_tokens(batch: DataProto, phases: Iterable[str], trained: DataProto | None = None) -> dict[str, int]:
    """Count the tokens that each phase processed: generated tokens for ``gen``, else prompts and responses.

    Generated tokens include samples that dynamic sampling dropped. Updates process ``trained``, by default the batch.
    """
    tokens = dict.fromkeys(phases, _num_tokens(batch))
    if trained is not None:
        tokens |= dict.fromkeys(tokens.keys() & UPDATES, _num_tokens(trained))
    if "gen" in tokens:
        tokens["gen"] = batch.meta_info.get(GENERATED_TOKENS) or int(generated_tokens(batch).sum())
    return tokens


def _num_tokens(batch: DataProto) -> int:
    return sum(int(lengths.sum()) for lengths in sequence_lengths(batch))


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


def empty_step_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Describe updates that trained nothing, and their causes, one sentence per role.

    They had no token to train on, or all gradients of the step are 0. Momentum and weight decay still change weights.
    """
    causes = {name: text.format(metrics[name]) for name, text in _CAUSES.items() if metrics.get(name, 0.0) > 0}
    masks = {name: text for name, text in causes.items() if name != _ZERO_VARIANCE}
    sentences = []
    for name, value in metrics.items():
        role, _, quantity = name.partition("/")
        if quantity == EMPTY_STEPS and value > 0:
            found, reasons = f"the {role} had no token to train on in optimizer steps: {value:.0f}", masks
        elif quantity == "grad_norm" and value == 0 and not metrics.get(f"{role}/{EMPTY_STEPS}"):
            found, reasons = f"the gradient of the {role} is 0, so that the step trains nothing", causes
        else:
            continue
        sentences.append(f"{found}. {'; '.join(reasons.values()) or 'No metric names the cause'}")
    return sentences


def rank_balance(batch: DataProto, learners: Iterable[WorkerGroup], verbs: Container[str]) -> RankLists:
    """List tokens, work and busy seconds of each data-parallel rank, and delays by slow hosts, for the balance file.

    Args:
        batch: rows of the updates.
        learners: worker groups that train; resets their busy seconds, see :meth:`WorkerGroup.take_busy`.
        verbs: verbs of the step. A role without an update in the step, such as the actor during critic warm-up, has no
            load.
    """
    lengths = token_counts(batch)
    lists: RankLists = {}
    delays: Counter[str] = Counter()
    for group in learners:
        role, update = group.role, f"update_{group.role}"
        work = [1.0] * group.layout.dp
        if update in verbs:
            costs = group.budgets[update].cost.of(lengths)
            tokens, work = group.partition(update, batch).loads(lengths, costs)
            lists |= {f"{role}/{TOKENS}": tokens, f"{role}/{WORK}": work}
        hosts = hosts_of_ranks(group)
        for verb, seconds in group.take_busy().items():
            lists[f"{role}/{verb}{SECONDS_SUFFIX}"] = seconds
            delays.update(host_delays(seconds, work, hosts))
    return lists | {f"{DELAY_PREFIX}{host}": [seconds] for host, seconds in delays.items()}


def explained_by_rounding(config: TrainConfig, model: ModelConfig) -> float:
    """Return the largest mean difference of the log-probs that rounding explains, in nats.

    A layer, a scale or a weight that only one of them gets wrong shows nowhere else: generation is fluent, the loss
    falls. Kernels that add in another order explain a difference per token, too, so the bound depends on the number
    formats.

    The statistic is the mean over tokens of ``abs(log p_engine - log p_actor)``, in nats. Another model moves most
    tokens, while rounding moves few of them far: the largest difference says little, since near ties of a router or of
    two tokens reach several nats in a healthy run. Both sides have the sampling temperature, and the whole vocabulary
    or the sampled support. Three standard errors are subtracted, so that few tokens do not decide.

    Measured means are 0.01 for a dense model in bfloat16, and 0.04 to 0.07 with FP8 in the engine or the actor
    (https://github.com/vllm-project/vime/issues/64, https://github.com/radixark/miles/issues/2722); NeMo RL accepts
    0.05.

    A low temperature multiplies all differences of the logits. A repetition penalty enters the engine's log-probs only,
    so nothing can be said: infinity.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.megatron
    if rollout.repetition_penalty != 1:
        return math.inf
    chosen = rollout.engine_kwargs.sglang.server_args.values()
    narrow = (
        rollout.quantization or rollout.server_urls or any("fp" in value for value in chosen if isinstance(value, str))
    )
    bound = QUANTIZED if narrow else max(ROUNDING[actor.dtype], ROUNDING[rollout.dtype])
    return bound * (1 if model.experts is None else ROUTED) * max(1.0, 1 / rollout.temperature)


def mismatch_excess(differences: Moments, explained: float) -> float:
    """Return the mean difference, less three standard errors, over the explained one.

    Args:
        differences: of ``abs(log p_engine - log p_actor)`` over tokens that the current weights sampled.
        explained: see :func:`explained_by_rounding`.
    """
    error = math.sqrt(differences.sample_variance / max(1, differences.count))
    return max(0.0, differences.mean - 3 * error) / explained if math.isfinite(differences.mean) else math.inf


def mismatch_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Describe a mismatch beyond rounding, of all rows and of rows with images; empty without one."""
    return [
        f"the log-probs of engine and actor differ by {metrics[DIFFERENCE + kind]:.3g} nats per token on average"
        f"{where}, {metrics[EXCESS + kind]:.1f} times what rounding explains: they compute different models, or sample "
        "otherwise. The policy would be trained on samples of another one. `megarl doctor logprobs` finds the cause "
        "from a run with actor_rollout_ref.rollout.calculate_log_probs=true and trainer.rollout_data_dir"
        for kind, where in ((ALL_ROWS, ""), (IMAGE_ROWS, " in rows with images"))
        if metrics.get(EXCESS + kind, 0.0) > 1
    ]
