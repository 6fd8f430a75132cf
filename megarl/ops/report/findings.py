"""Findings of a run: a verdict in one sentence, and problems in its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megarl.base.units import count_noun, duration
from megarl.ops.report.charts import FAILURES, non_finite_counts
from megarl.ops.report.rules import RULES, Rows, finite_values, recent_mean
from megarl.ops.report.run_files import RunRecord
from megarl.tracking.run_summary import VALIDATION_PREFIX

BAD, WARN = "bad", "warn"
_RECOVERED = {
    "rollout/requests_moved",
    "rollout/runners_lost",
    "val-aux/rollout/runners_lost",
    "reward/retries",
    "reward/processes_replaced",
} | {name for name in FAILURES if name.endswith("/out_of_memory")}
_FAILED_ONLY = frozenset(FAILURES) - _RECOVERED


class ReportFinding(NamedTuple):
    """Problem that a user should inspect.

    Attributes:
        level: ``bad`` or ``warn``.
        text: description, with the value and a possible cause.
        metric: metric with the curve; empty if there is none.
        reason: reason of the threshold and possible remedies; may be empty.
    """

    level: str
    text: str
    metric: str = ""
    reason: str = ""


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
    for metric in sorted(broken)[:5]:
        results.append(
            ReportFinding(BAD, f"{metric} was not a finite number at {broken[metric]:,} of its steps.", metric)
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


_CHECKS: tuple[Callable[[RunRecord], Iterator[ReportFinding]], ...] = (
    _accuracy, _reward_gap, _constant_score, _slower,
)  # fmt: skip


def final_metrics(run: RunRecord) -> dict[str, float]:
    """Return the final numbers for comparisons; unmeasured ones are skipped."""
    rows, summary = run.rows, run.summary
    measured = accuracies(rows)
    failed = [total for metric, _, total, _ in failure_counts(rows) if metric in _FAILED_ONLY]
    seconds = finite_values(rows, "timing_s/step")

    def recent(metric: str) -> float | None:
        """Return the recent mean of a metric."""
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
