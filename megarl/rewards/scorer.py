"""The scorer: weighted sum of several reward functions, selected by data source. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rewards.calling import LoadedFunction, RewardTask
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool.runner import InDriverRunner, RewardJob, RunCounts, Runner
from megarl.rewards.registry import RewardFunction


@dataclass(frozen=True)
class ScoreTerm:
    """One term of the weighted sum.

    Attributes:
        label: name of the term in metrics and columns.
        weight: factor of its score.
        function: returns the number of the runner's function for a data source.
    """

    label: str
    weight: float
    function: Callable[[str], int]


class Scorer:
    """Scores samples with the weighted sum of the terms.

    With several terms, ``<label>_score`` is recorded for each. An extra field is recorded under its name by the first
    term that has it, and as ``<label>_<name>`` by later terms. A sample that fails in one term has no score.

    Args:
        terms: at least one term.
        runner: runs their functions.
    """

    def __init__(self, terms: Sequence[ScoreTerm], runner: Runner) -> None:
        self.terms = list(terms)
        self.runner = runner

    @property
    def wants_prompt(self) -> bool:
        """Whether a function reads the prompt."""
        return any(traits.wants_prompt for traits in self.runner.traits)

    def score(self, tasks: Sequence[RewardTask]) -> tuple[list[Outcome], RunCounts]:
        """Score each task.

        Raises:
            RewardError: a data source has no function, or no process for functions can be started.
        """
        jobs = [RewardJob(term.function(task.data_source), task) for term in self.terms for task in tasks]
        outcomes, counts = self.runner.run(jobs)
        columns = [outcomes[at * len(tasks) : (at + 1) * len(tasks)] for at in range(len(self.terms))]
        return [self._sum(row) for row in zip(*columns, strict=True)], counts

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        if len(outcomes) == 1 and outcomes[0].failure is None:
            return outcomes[0]._replace(score=self.terms[0].weight * outcomes[0].score)
        for term, outcome in zip(self.terms, outcomes, strict=True):
            if outcome.failure is not None:
                label = f"{term.label}: " if len(self.terms) > 1 else ""
                return outcome._replace(failure=f"{label}{outcome.failure}")
        extras: dict[str, Any] = {}
        for term, outcome in zip(self.terms, outcomes, strict=True):
            extras |= _with_label(term.label, {"score": outcome.score}, {"score"})
            extras |= _with_label(term.label, outcome.extras, extras)
        score = sum(term.weight * outcome.score for term, outcome in zip(self.terms, outcomes, strict=True))
        return Outcome(score, extras)

    def start(self) -> None:
        """Start processes without waiting for them."""
        self.runner.start()

    def close(self) -> None:
        """End all processes."""
        self.runner.close()


def _with_label(label: str, fields: Mapping[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """Add the label to field names that are already taken."""
    taken = set(taken)
    return {f"{label}_{name}" if name in taken else name: value for name, value in fields.items()}


def in_driver(fn: RewardFunction, max_retries: int = 0) -> Scorer:
    """Return a scorer that calls one function in this process.

    Raises:
        RewardError: the function has the wrong signature.
    """
    loaded = LoadedFunction(fn)
    return Scorer([ScoreTerm(loaded.spec.spec, 1.0, lambda data_source: 0)], InDriverRunner([loaded], max_retries))
