"""Findings of a run: a verdict in one sentence, and problems in its metrics.

The rules are data: a metric, a statistic, a threshold and its reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.base.algorithm_names import estimator_needs
from megarl.base.formatting import count_noun, duration
from megarl.ops.report.charts import FAILURES, non_finite_counts
from megarl.ops.report.run_files import RunRecord
from megarl.tracking.jsonl_files import DELAY_PREFIX, VALIDATION_PREFIX

BAD, WARN = "bad", "warn"
_RECOVERED = {
    "rollout/requests_moved",
    "rollout/runners_lost",
    "val-aux/rollout/runners_lost",
    "reward/retries",
    "reward/processes_replaced",
} | {name for name in FAILURES if name.endswith("/out_of_memory")}
_FAILED_ONLY = frozenset(FAILURES) - _RECOVERED
Rows = Sequence[Mapping[str, float]]


class ReportFinding(NamedTuple):
    """Problem that a user should inspect."""

    level: str  # bad or warn
    text: str  # description, with the value and a possible cause
    metric: str = ""  # metric with the curve; empty if there is none
    reason: str = ""  # reason of the threshold and possible remedies; may be empty


def accuracies(rows: Rows) -> list[tuple[int, float]]:
    """Return step and mean over data sources of the ``mean@`` metrics of every validation."""
    points = []
    for row in rows:
        scores = [v for name, v in row.items() if name.startswith(VALIDATION_PREFIX) and "/mean@" in name]
        if scores:
            points.append((int(row["step"]), sum(scores) / len(scores)))
    return points


def failure_counts(rows: Rows) -> list[tuple[str, str, float, int]]:
    """Return non-zero failure counters: metric, description, total, number of steps with failures."""
    counted = []
    for metric, words in FAILURES.items():
        values = [value for value in finite_values(rows, metric) if value > 0]
        if values:
            counted.append((metric, words, sum(values), len(values)))
    return counted


def run_verdict(run: RunRecord) -> str:
    """Summarize a run in one or two sentences."""
    rows = run.rows
    if not rows:
        return "The run has logged nothing yet."
    steps = int(rows[-1]["step"])
    planned = run.setting("trainer.total_training_steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > steps else ""
    states = {
        "finished": f"Finished after step {steps}.",
        "running": f"Still running, at step {steps}{of}.",
        "ended early": f"Ended early: the last step on record is {steps}{of}.",
    }
    return " ".join([states[run.status], *_learned(rows)])


def _learned(rows: Rows) -> Iterator[str]:
    measured = accuracies(rows)
    if len(measured) > 1:
        (first, before), (last, after), (at, best) = measured[0], measured[-1], max(measured, key=lambda item: item[1])
        word = "rose" if after > before else "fell" if after < before else "stayed"
        text = f"Held-out accuracy {word} from {before:.3f} (step {first}) to {after:.3f} (step {last})"
        yield text + (f"; its best was {best:.3f} at step {at}." if best > after else ".")
        return
    rewards = finite_values(rows, "critic/score/mean")
    if len(rewards) > 1:
        yield f"The reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}; it was not measured on held-out problems."
        return
    losses = finite_values(rows, "train/loss")
    if len(losses) > 1:
        yield f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}."


def run_findings(run: RunRecord) -> list[ReportFinding]:
    """Return all findings of a run, the worst first."""
    results = [ReportFinding(BAD, f"A file of the run is damaged: {problem}") for problem in run.problems]
    for metric, words, total, steps in failure_counts(run.rows):
        level = BAD if metric in _FAILED_ONLY else WARN
        results.append(ReportFinding(level, f"{total:,.0f} {words}, in {count_noun(steps, 'step')}.", metric))
    broken = non_finite_counts(run.rows)
    results.extend(
        ReportFinding(BAD, f"{metric} was not a finite number at {broken[metric]:,} of its steps.", metric)
        for metric in sorted(broken)[:5]
    )
    if len(broken) > 5:
        results.append(ReportFinding(BAD, f"{len(broken) - 5:,} more metrics were not finite at some step."))
    for check in _CHECKS:
        results += check(run)
    for rule in RULES:
        if text := rule.finding(run):
            results.append(ReportFinding(WARN, text, rule.metric, rule.reason))
    return sorted(results, key=lambda finding: finding.level != BAD)


def _accuracy(run: RunRecord) -> Iterator[ReportFinding]:
    measured = accuracies(run.rows)
    if len(measured) < 2:
        return
    after, (at, best) = measured[-1][1], max(measured, key=lambda item: item[1])
    metric = next(name for row in run.rows for name in row if name.startswith(VALIDATION_PREFIX) and "/mean@" in name)
    if best - after > 0.05:
        text = f"Held-out accuracy is {best - after:.3f} below its best, {best:.3f} at step {at}"
        yield ReportFinding(WARN, f"{text}: that checkpoint may serve better.", metric)


def _reward_gap(run: RunRecord) -> Iterator[ReportFinding]:
    measured, rewards = accuracies(run.rows), finite_values(run.rows, "critic/score/mean")
    if len(measured) < 2 or len(rewards) < 2:
        return
    gained, learned = measured[-1][1] - measured[0][1], (recent_mean(rewards) or 0.0) - rewards[0]
    if learned > 0.1 and gained < 0:
        text = f"The reward rose by {learned:.3f} while held-out accuracy fell by {-gained:.3f}"
        yield ReportFinding(BAD, f"{text}: overfitting, or reward hacking.", "critic/score/mean")


def _constant_score(run: RunRecord) -> Iterator[ReportFinding]:
    recent = [row for row in run.rows if "critic/score/max" in row and "critic/score/min" in row][-5:]
    scores = {row[name] for row in recent for name in ("critic/score/min", "critic/score/max")}
    if len(recent) == 5 and len(scores) == 1:
        text = f"All answers of the last {len(recent)} steps have the score {scores.pop():g}"
        reason = (
            "Equal scores carry no signal: look at the answers and the reward function, and at the prompts' difficulty."
        )
        yield ReportFinding(WARN, f"{text}.", "critic/score/mean", reason)


def _slower(run: RunRecord) -> Iterator[ReportFinding]:
    values = finite_values(run.rows, "timing_s/step")
    if len(values) < 40:
        return
    early, late = (sorted(part)[len(part) // 2] for part in (values[5:15], values[-10:]))
    if late > 1.5 * early:
        text = f"Steps have become slower: {duration(late)} against {duration(early)} at the beginning."
        yield ReportFinding(WARN, text, "timing_s/step")


def _slow_hosts(run: RunRecord) -> Iterator[ReportFinding]:
    seconds = {row["step"]: row["timing_s/step"] for row in run.rows if "timing_s/step" in row}
    steps = [step for step in run.balance if step in seconds]
    total = sum(seconds[step] for step in steps)
    for name in sorted({name for step in steps for name in run.balance[step] if name.startswith(DELAY_PREFIX)}):
        delays = [run.balance[step][name][0] for step in steps if name in run.balance[step]]
        if len(delays) > 2 and sum(delays) > 0.05 * total:
            text = (
                f"{name.removeprefix(DELAY_PREFIX)} is slow: the other ranks waited at least "
                f"{duration(sum(delays))} for it in {len(delays)} of {count_noun(len(steps), 'step')}, "
                f"{sum(delays) / total:.0%} of their time."
            )
            reason = (
                "Its ranks take longer than those of the other hosts for the same work: look for other processes, and "
                "for devices that are hot or limited in power."
            )
            yield ReportFinding(WARN, text, "timing_s/step", reason)


_CHECKS: tuple[Callable[[RunRecord], Iterator[ReportFinding]], ...] = (
    _accuracy, _reward_gap, _constant_score, _slower, _slow_hosts,
)  # fmt: skip


def final_metrics(run: RunRecord) -> dict[str, float]:
    """Return the final numbers for comparisons; unmeasured ones are skipped."""
    rows, summary = run.rows, run.summary
    measured = accuracies(rows)
    failed = [total for metric, _, total, _ in failure_counts(rows) if metric in _FAILED_ONLY]
    seconds = finite_values(rows, "timing_s/step")

    def recent(metric: str) -> float | None:
        return recent_mean(finite_values(rows, metric))

    numbers: dict[str, Any] = {
        "steps": rows[-1]["step"] if rows else None,
        "accuracy_before": measured[0][1] if measured else None,
        "accuracy_after": measured[-1][1] if measured else None,
        "accuracy_best": max(value for _, value in measured) if measured else None,
        "reward": recent("critic/score/mean"),
        "loss": recent("train/loss"),
        "kl": recent_mean(finite_values(rows, "actor/reward_kl_penalty") or finite_values(rows, "actor/kl_loss")),
        "entropy": recent("actor/entropy"),
        "length": recent("response_length/mean"),
        "step_seconds": sum(seconds) / len(seconds) if seconds else None,
        "train_seconds": sum(seconds) if seconds else summary.get("train_seconds"),
        "rollout_tokens_per_s": summary.get("rollout_tokens_per_s") or recent("perf/rollout_tokens_per_s"),
        "update_tokens_per_s": summary.get("update_tokens_per_s") or recent("perf/update_tokens_per_s"),
        "memory_gb": max(finite_values(rows, "perf/max_memory_allocated_gb"), default=None),
        "failures": sum(failed) if rows else None,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


@dataclass(frozen=True)
class MetricRule:
    """Threshold on a metric's recent mean, on its share of the start, or on a median."""

    name: str  # name of the rule, as in docs/how_to/report.md
    metric: str
    text: str  # text of the finding, with the placeholders value (of the statistic) and share (of the start)
    reason: str  # reason of the threshold
    above: float = math.inf  # the rule applies above this value
    below: float = -math.inf  # the rule applies below this value
    of_start: bool = False  # compare the share of the start (mean of the first tenth, at most five values)
    over_half: bool = False  # take the median over the second half of the run, for metrics that vary from step to step
    fewest: int = 1  # steps with the metric before the rule applies
    after_critic_warmup: bool = False  # ignore the steps that update only the critic
    groups_only: bool = False  # apply only to advantage estimators that compare the samples of a group

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
        first = values[: min(5, max(1, len(values) // 10))]
        begin = sum(first) / len(first)
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
        "truncated answers", "response/truncated_ratio",
        "A limit of tokens or turns cuts {value:.0%} of the latest answers (data.max_response_length).",
        "A cut answer is usually scored as wrong whatever it contains; raise the limit, or set "
        "algorithm.mask_truncated_completions.",
        above=0.1,
    ),
    MetricRule(
        "different models", "training/rollout_mismatch_excess",
        "In the first step the log-probs of engine and actor differ by {value:.1f} times what rounding explains.",
        "They compute different models, or sample otherwise: the policy trains on samples of another one. "
        "megarl doctor logprobs finds the cause.",
        above=1.0,
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
        "async_training.max_staleness.",
        above=0.2, over_half=True, fewest=4,
    ),
    MetricRule(
        "idle trainer", "fully_async/trainer/idle_ratio",
        "The trainer waits for samples {value:.0%} of the time (median): the engines limit the run.",
        "Assign more devices to the engines (rollout.nnodes, rollout.n_gpus_per_node), or raise "
        "async_training.max_staleness.",
        above=0.2, over_half=True, fewest=4,
    ),
)  # fmt: skip
"""Thresholds on single metrics."""


def finite_values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric, in the order of steps."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def recent_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the last tenth of the values, at least five; None without values."""
    last = values[-max(5, len(values) // 10) :]
    return sum(last) / len(last) if last else None
