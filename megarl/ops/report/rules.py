"""Rules of the report's findings as data: a metric, a statistic, a threshold and its reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.base.algorithm_names import estimator_needs
from megarl.ops.report.run_files import RunRecord

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class MetricRule:
    """Threshold on a metric's recent mean, on its share of the start, or on a median.

    Attributes:
        name: name of the rule, as in ``docs/report.md``.
        metric: name of the metric.
        text: text of the finding, with the placeholders ``value`` (of the statistic) and ``share`` (of the start).
        reason: reason of the threshold.
        above: the rule applies above this value.
        below: the rule applies below this value.
        of_start: compare the share of the start in place of the value.
        over_half: take the median over the second half of the run, for metrics that vary from step to step.
        fewest: steps with the metric before the rule applies.
        after_critic_warmup: ignore the steps that update only the critic.
        groups_only: apply only to advantage estimators that compare the samples of a group.
    """

    name: str
    metric: str
    text: str
    reason: str
    above: float = math.inf
    below: float = -math.inf
    of_start: bool = False
    over_half: bool = False
    fewest: int = 1
    after_critic_warmup: bool = False
    groups_only: bool = False

    def finding(self, run: RunRecord) -> str | None:
        """Return the text of the finding if the rule applies to the run."""
        if self.groups_only and not estimator_needs(str(run.setting("algorithm.adv_estimator")), "group_ids"):
            return None
        warmup = run.setting("trainer.critic_warmup") if self.after_critic_warmup else None
        rows = [row for row in run.rows if row["step"] > warmup] if isinstance(warmup, int) else run.rows
        values = finite_values(rows, self.metric)
        if len(values) < max(1, self.fewest):
            return None
        value = statistics.median(values[len(values) // 2 :]) if self.over_half else recent_mean(values)
        assert value is not None
        begin = start_mean(values)
        share = value / begin if begin > 0 else math.nan
        compared = share if self.of_start else value
        return self.text.format(value=value, share=share) if compared > self.above or compared < self.below else None


RULES = (
    MetricRule(
        "entropy collapse", "actor/entropy",
        "Entropy fell to {value:.3g}, {share:.0%} of its start: the policy hardly explores.",
        "With little entropy the samples of a prompt become alike, and nothing new is found; raise clip_ratio_high, "
        "entropy_coeff or the temperature.",
        below=0.25, of_start=True, fewest=6,
    ),
    MetricRule(
        "critic explains nothing", "critic/vf_explained_var",
        "The critic explains almost no variance of the returns: {value:.2f} over the second half of the run (median).",
        "At 0 a constant predicts as well, and the critic adds only noise to the advantages; check critic.optim.lr "
        "and trainer.critic_warmup. If nearly all answers score the same, there is no variance to explain.",
        below=0.1, over_half=True, fewest=20, after_critic_warmup=True,
    ),
    MetricRule(
        "clipped gradient", "actor/pg_clipfrac",
        "The gradient of {value:.0%} of the tokens is clipped: steps are too large for the clip range.",
        "A healthy run clips a few percent; a clipped token is not learned.",
        above=0.3,
    ),
    MetricRule(
        "large policy step", "actor/ppo_kl",
        "The updates of a step move the policy by {value:.3g} nats per token.",
        "Implementations of PPO end a step early at 0.01 to 0.05; beyond, the clipped surrogate is a poor "
        "approximation. Lower the learning rate or ppo_epochs.",
        above=0.05,
    ),
    MetricRule(
        "far from the reference", "actor/reward_kl_penalty",
        "The policy is {value:.3g} nats per token away from the reference (KL in the reward).",
        "At 1 nat the sampled tokens are e times as likely as under the reference: it has little influence. "
        "Raise algorithm.kl_ctrl.kl_coef unless this is intended.",
        above=1.0,
    ),
    MetricRule(
        "far from the reference", "actor/kl_loss",
        "The policy is {value:.3g} nats per token away from the reference (KL in the loss).",
        "At 1 nat the sampled tokens are e times as likely as under the reference: it has little influence. "
        "Raise actor_rollout_ref.actor.kl_loss_coef unless this is intended.",
        above=1.0,
    ),
    MetricRule(
        "zero-variance groups", "critic/score/zero_variance_fraction",
        "All answers score the same in {value:.0%} of the groups.",
        "Such a group has no advantage: its generation and update are wasted. Use algorithm.filter_groups, prompts of "
        "another difficulty, or more answers per prompt.",
        above=0.5, groups_only=True,
    ),
    MetricRule(
        "wasted generation", "filter_groups/efficiency",
        "Dynamic sampling keeps only {value:.0%} of the generated groups.",
        "Generation costs at least five times as much as without dropped groups; remove prompts that are too easy or "
        "too hard.",
        below=0.2,
    ),
    MetricRule(
        "truncated answers", "response_length/clip_ratio",
        "{value:.0%} of the latest answers reach the length limit and are cut (data.max_response_length).",
        "A cut answer is usually scored as wrong whatever it contains; raise the limit, or set "
        "algorithm.mask_truncated_completions.",
        above=0.1,
    ),
    MetricRule(
        "rollout mismatch", "training/rollout_probs_diff_mean",
        "Engine and actor give sampled tokens probabilities that differ by {value:.3g} on average; "
        "megarl doctor logprobs finds the cause.",
        "Rounding in bfloat16 explains less than 0.01; more means different weights, masks or sampling.",
        above=0.02,
    ),
    MetricRule(
        "imbalanced ranks", "global_seqlen/balanced_imbalance",
        "Ranks wait for the busiest: the update takes {value:.2f} times as long as with perfect balance.",
        "The rest of the update is idle time; use larger mini-batches or fewer data-parallel ranks.",
        above=1.15,
    ),
    MetricRule(
        "idle engines", "fully_async/rollouter/idle_ratio",
        "The engines are idle {value:.0%} of the time (median): the trainer limits the run.",
        "Assign fewer devices to the engines (rollout.nnodes, rollout.n_gpus_per_node), or raise "
        "async_training.max_staleness; megarl plan compares the splits.",
        above=0.2, over_half=True, fewest=4,
    ),
    MetricRule(
        "idle trainer", "fully_async/trainer/idle_ratio",
        "The trainer waits for samples {value:.0%} of the time (median): the engines limit the run.",
        "Assign more devices to the engines (rollout.nnodes, rollout.n_gpus_per_node), or raise "
        "async_training.max_staleness; megarl plan compares the splits.",
        above=0.2, over_half=True, fewest=4,
    ),
)  # fmt: skip
"""Thresholds on single metrics; :mod:`megarl.ops.report.findings` has the checks that need several."""


def finite_values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric, in the order of steps."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def recent_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the last tenth of the values, at least five; None without values."""
    last = values[-max(5, len(values) // 10) :]
    return sum(last) / len(last) if last else None


def start_mean(values: Sequence[float]) -> float:
    """Return the mean of the first tenth of the values: at least one, at most five."""
    first = values[: min(5, max(1, len(values) // 10))]
    return sum(first) / len(first)
