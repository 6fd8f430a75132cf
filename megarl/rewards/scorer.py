"""The scorer: weighted sum of several reward functions, selected by data source. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rewards.calling import LoadedFunction, RewardTask
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool.jobs import RewardJob, RewardStream, RunCounts
from megarl.rewards.pool.runner import InDriverRunner, Runner
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
        outcomes, counts = self.runner.run([job for task in tasks for job in self._jobs(task)])
        return self._sums(outcomes), counts

    def stream(self) -> ScoreStream | None:
        """Start to score tasks as they arrive; None if the runner cannot."""
        stream = self.runner.stream()
        return None if stream is None else ScoreStream(stream, self._jobs, self._sums)

    def _jobs(self, task: RewardTask) -> list[RewardJob]:
        return [RewardJob(term.function(task.data_source), task) for term in self.terms]

    def _sums(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Sum the outcomes of the terms of each task."""
        count = len(self.terms)
        return [self._sum(outcomes[at : at + count]) for at in range(0, len(outcomes), count)]

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


class ScoreStream:
    """Scores tasks as they arrive.

    Args:
        stream: runs the jobs.
        jobs_of: the jobs of a task.
        sums: sums the outcomes of the jobs of each task.
    """

    def __init__(
        self,
        stream: RewardStream,
        jobs_of: Callable[[RewardTask], list[RewardJob]],
        sums: Callable[[Sequence[Outcome]], list[Outcome]],
    ) -> None:
        self._stream, self._jobs_of, self._sums = stream, jobs_of, sums

    def submit(self, task: RewardTask) -> range:
        """Score a task; return its ticket for :meth:`outcomes`.

        Raises:
            RewardError: its data source has no function.
        """
        return self._stream.submit(self._jobs_of(task))

    def outcomes(self, tickets: Sequence[range]) -> list[Outcome]:
        """Wait for tasks, also of an ended stream; return their outcomes and forget them.

        Raises:
            RewardError: no process for functions can be started.
        """
        return self._sums(self._stream.results([number for ticket in tickets for number in ticket]))

    def take_counts(self) -> RunCounts:
        """Return the retries and replacements since the last call."""
        return self._stream.take_counts()

    def finish(self) -> None:
        """Wait for all tasks, and end the stream.

        Raises:
            RewardError: no process for functions can be started.
        """
        self._stream.finish()

    def cancel(self) -> None:
        """End the stream without waiting for its tasks."""
        self._stream.cancel()


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
