"""What a run's numbers say: a verdict in a sentence, and what somebody should look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.tracking.report.charts import FAILURES, VALIDATION_PREFIX
from megarl.tracking.report.curves import not_finite
from megarl.tracking.report.run_files import RunRecord
from megarl.tracking.run_summary import duration

Rows = Sequence[Mapping[str, float]]
BAD, WARN = "bad", "warn"
_FAILED_ONLY = frozenset(FAILURES) - {"rollout/requests_moved", "reward/retries", "reward/processes_replaced"}


class Finding(NamedTuple):
    """Something to look at.

    Attributes:
        level: ``bad`` or ``warn``.
        text: what it is, with the number, and what it may mean.
        metric: whose curve shows it; empty where none does.
    """

    level: str
    text: str
    metric: str = ""


def column(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric, in the order of steps."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def recent(values: Sequence[float]) -> float | None:
    """Mean of the last tenth of the values, of five at least; None where there is none."""
    last = values[-max(5, len(values) // 10) :]
    return sum(last) / len(last) if last else None


def accuracies(rows: Rows) -> list[tuple[int, float]]:
    """Step and mean over the data sources of ``mean@`` of every validation."""
    found = []
    for row in rows:
        scores = [v for name, v in row.items() if name.startswith(VALIDATION_PREFIX) and "/mean@" in name]
        if scores:
            found.append((int(row["step"]), sum(scores) / len(scores)))
    return found


def failures(rows: Rows) -> list[tuple[str, str, float, int]]:
    """Counters of what went wrong: metric, words, total, and steps with any; those that stayed zero are left out."""
    counted = []
    for metric, words in FAILURES.items():
        values = [value for value in column(rows, metric) if value > 0]
        if values:
            counted.append((metric, words, sum(values), len(values)))
    return counted


def verdict(run: RunRecord) -> str:
    """The run in a sentence or two."""
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
        told = f"Held-out accuracy {word} from {before:.3f} (step {first}) to {after:.3f} (step {last})"
        yield told + (f"; its best was {best:.3f} at step {at}." if best > after else ".")
        return
    rewards = column(rows, "critic/score/mean")
    if len(rewards) > 1:
        yield f"The reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}; it was not measured on held-out problems."
        return
    losses = column(rows, "train/loss")
    if len(losses) > 1:
        yield f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}."


def findings(run: RunRecord) -> list[Finding]:
    """Everything to look at, the worst first."""
    found = [Finding(BAD, f"A file of the run is damaged: {problem}") for problem in run.problems]
    for metric, words, total, steps in failures(run.rows):
        level = BAD if metric in _FAILED_ONLY else WARN
        found.append(Finding(level, f"{total:,.0f} {words}, in {steps:,} step{'s' if steps > 1 else ''}.", metric))
    broken = not_finite(run.rows)
    for metric in sorted(broken)[:5]:
        found.append(Finding(BAD, f"{metric} was not a finite number at {broken[metric]:,} of its steps.", metric))
    if len(broken) > 5:
        found.append(Finding(BAD, f"{len(broken) - 5:,} more metrics were not finite at some step."))
    for check in _CHECKS:
        found += check(run)
    return sorted(found, key=lambda finding: finding.level != BAD)


def _accuracy(run: RunRecord) -> Iterator[Finding]:
    measured = accuracies(run.rows)
    if len(measured) < 2:
        return
    after, (at, best) = measured[-1][1], max(measured, key=lambda item: item[1])
    metric = next(name for row in run.rows for name in row if name.startswith(VALIDATION_PREFIX) and "/mean@" in name)
    if best - after > 0.05:
        text = f"Held-out accuracy is {best - after:.3f} below its best, {best:.3f} at step {at}"
        yield Finding(WARN, f"{text}: that checkpoint may serve better.", metric)


def _reward_gap(run: RunRecord) -> Iterator[Finding]:
    measured, rewards = accuracies(run.rows), column(run.rows, "critic/score/mean")
    if len(measured) < 2 or len(rewards) < 2:
        return
    gained, learned = measured[-1][1] - measured[0][1], (recent(rewards) or 0.0) - rewards[0]
    if learned > 0.1 and gained < 0:
        text = f"The reward rose by {learned:.3f} while held-out accuracy fell by {-gained:.3f}"
        yield Finding(BAD, f"{text}: overfitting, or a reward that is gamed.", "critic/score/mean")


def _entropy(run: RunRecord) -> Iterator[Finding]:
    values = column(run.rows, "actor/entropy")
    last = recent(values)
    if last is not None and values[0] > 0 and len(values) > 5 and last < 0.1 * values[0]:
        text = f"Entropy fell to {last:.3g}, {last / values[0]:.0%} of its start: the policy hardly explores any more."
        yield Finding(WARN, text, "actor/entropy")


def _critic(run: RunRecord) -> Iterator[Finding]:
    values = column(run.rows, "critic/vf_explained_var")
    last = recent(values)
    if last is not None and len(values) >= 20 and last < 0:
        text = f"The critic explains less than a constant would (explained variance {last:.2f})."
        yield Finding(WARN, text, "critic/vf_explained_var")


def _slower(run: RunRecord) -> Iterator[Finding]:
    values = column(run.rows, "timing_s/step")
    if len(values) < 40:
        return
    early, late = (sorted(part)[len(part) // 2] for part in (values[5:15], values[-10:]))
    if late > 1.5 * early:
        text = f"Steps have become slower: {duration(late)} against {duration(early)} at the beginning."
        yield Finding(WARN, text, "timing_s/step")


def _above(metric: str, limit: float, words: str) -> Callable[[RunRecord], Iterator[Finding]]:
    """A check that the latest values of a metric stay at or below a limit.

    Args:
        metric: its name.
        limit: above it there is something to look at.
        words: what to tell, with a place for the latest mean.
    """

    def check(run: RunRecord) -> Iterator[Finding]:
        """Compare."""
        last = recent(column(run.rows, metric))
        if last is not None and last > limit:
            yield Finding(WARN, words.format(last), metric)

    return check


_cut_answers = _above(
    "response_length/clip_ratio",
    0.1,
    "{:.0%} of the latest answers reach the length limit and are cut (data.max_response_length).",
)
_mismatch = _above(
    "training/rollout_probs_diff_mean",
    0.02,
    "Engine and actor give sampled tokens probabilities that differ by {:.3g} on average; "
    "megarl doctor logprobs tells why.",
)
_imbalance = _above(
    "global_seqlen/balanced_imbalance",
    1.15,
    "Ranks wait for the busiest: the update takes {:.2f} times as long as with perfect balance.",
)
_ratio = _above(
    "actor/pg_clipfrac",
    0.3,
    "The clip takes the gradient of {:.0%} of the tokens away: steps are too large for the clip range.",
)


_CHECKS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    _accuracy, _reward_gap, _entropy, _cut_answers, _mismatch, _imbalance, _critic, _ratio, _slower,
)  # fmt: skip


def final_metrics(run: RunRecord) -> dict[str, float]:
    """A run in numbers that runs are compared by; what it has not measured is left out."""
    rows, told = run.rows, run.summary
    measured = accuracies(rows)
    seconds = column(rows, "timing_s/step")
    numbers: dict[str, Any] = {
        "steps": rows[-1]["step"] if rows else None,
        "accuracy_before": measured[0][1] if measured else None,
        "accuracy_after": measured[-1][1] if measured else None,
        "accuracy_best": max(value for _, value in measured) if measured else None,
        "reward": recent(column(rows, "critic/score/mean")),
        "loss": recent(column(rows, "train/loss")),
        "kl": recent(column(rows, "actor/reward_kl_penalty") or column(rows, "actor/kl_loss")),
        "entropy": recent(column(rows, "actor/entropy")),
        "length": recent(column(rows, "response_length/mean")),
        "step_seconds": sum(seconds) / len(seconds) if seconds else None,
        "train_seconds": sum(seconds) if seconds else told.get("train_seconds"),
        "rollout_tokens_per_s": told.get("rollout_tokens_per_s") or recent(column(rows, "perf/rollout_tokens_per_s")),
        "update_tokens_per_s": told.get("update_tokens_per_s") or recent(column(rows, "perf/update_tokens_per_s")),
        "memory_gb": max(column(rows, "perf/max_memory_allocated_gb"), default=None),
        "failures": sum(total for metric, _, total, _ in failures(rows) if metric in _FAILED_ONLY) if rows else None,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}
