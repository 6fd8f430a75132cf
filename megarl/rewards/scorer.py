"""The scorer: weighted sum of several reward functions, selected by data source, and their arguments from samples.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import RewardError
from megarl.base.logs import ProcessLogs
from megarl.rewards.calling import FunctionSpec, LoadedFunction, RewardTask
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool import InDriverRunner, RewardJob, RewardPool, RunCounts, Runner
from megarl.rewards.registry import FunctionTraits, RewardFunction
from megarl.rewards.rules.agent_score import AGENT_RESULT

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


TokenIds: TypeAlias = "Sequence[int] | np.ndarray"


class TaskBuilder:
    """Builds the arguments of the reward functions from samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, wants_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.wants_prompt = wants_prompt

    def build(self, row: Hashable, columns: Mapping[str, Any], prompt: TokenIds, response: TokenIds) -> RewardTask:
        """Build the task of a sample from its columns and unpadded token ids.

        Raises:
            RewardError: it has no ground truth; ``row`` names it.
        """
        model = columns["reward_model"]
        if not hasattr(model, "get") or model.get("ground_truth") is None:
            text = f"column 'reward_model', row {row} is {model!r:.200}; it must have a 'ground_truth'"
            raise RewardError(text, code="reward.no-ground-truth")
        result = columns.get(AGENT_RESULT)
        return RewardTask(
            data_source=columns["data_source"],
            solution_str=self.text(response),
            ground_truth=model["ground_truth"],
            extra_info={**(columns.get("extra_info") or {}), **({} if result is None else {AGENT_RESULT: result})},
            prompt_str=self.text(prompt) if self.wants_prompt else None,
        )

    def text(self, ids: TokenIds) -> str:
        """Decode token ids."""
        return decode_text(self.tokenizer, ids)


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
    """Decode token ids; ``<image>`` stands for the tokens of an image."""
    from megarl.base.image_tokens import PLACEHOLDER, image_spans  # numpy, which printing a configuration does not need

    numbers, parts, done = list(ids) if isinstance(ids, Sequence) else ids.tolist(), list[str](), 0
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    for span in image_spans(numbers):
        parts += [str(decode(numbers[done : span.start])), PLACEHOLDER]
        done = span.stop
    return "".join([*parts, str(decode(numbers[done:]))])


@dataclass(frozen=True)
class ScoreTerm:
    """One term of the weighted sum.

    Attributes:
        label: name of the term in metrics and columns.
        function: returns the number of the runner's function for a data source.
    """

    label: str
    weight: float
    function: Callable[[str], int]


class Scorer:
    """Scores samples with the weighted sum of the terms.

    With several terms, ``<label>_score`` is recorded for each. An extra field is recorded under its name by the first
    term that has it, and as ``<label>_<name>`` by later terms. A sample that fails in one term has no score.
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
        outcomes, counts = self.runner.run([job for task in tasks for job in self.jobs(task)])
        size = len(self.terms)
        return [self.outcome_of(outcomes[at : at + size]) for at in range(0, len(outcomes), size)], counts

    def jobs(self, task: RewardTask) -> list[RewardJob]:
        """Return the jobs of a task, one per term.

        Raises:
            RewardError: its data source has no function.
        """
        return [RewardJob(term.function(task.data_source), task) for term in self.terms]

    def outcome_of(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return a task's outcome: the weighted sum over its jobs."""
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


@dataclass(frozen=True)
class ScorerSpec:
    """Reward functions, and the number of processes that call them; sent to the processes that own a pool.

    Attributes:
        preload: numbers of the functions that processes load at the start.
        logs: log folder of the run; None = output of the owner.
    """

    terms: Sequence[ScoreTerm]
    functions: Sequence[FunctionSpec]
    traits: Sequence[FunctionTraits]
    processes: int
    max_retries: int = 3
    preload: Sequence[int] = ()
    logs: ProcessLogs | None = None

    @property
    def takes_samples(self) -> bool:
        """Whether all functions are called once per sample, not once per batch."""
        return not any(traits.batch for traits in self.traits)

    def pool(self, owner: int = 0, environment: ChildEnvironment | None = None) -> RewardPool:
        """Return a pool, whose processes do not run yet.

        Args:
            owner: number of the process that owns the pool, among those with a pool of this spec.
        """
        first = owner * self.processes
        options = (self.processes, self.max_retries, self.preload, self.logs, first, environment)
        return RewardPool(self.functions, self.traits, *options)


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
