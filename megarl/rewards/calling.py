"""Calls of reward functions, in the driver or in a process of the pool; every failure becomes an outcome.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megarl.base.errors import RewardError
from megarl.rewards.outcome import BAD_SAMPLE, INFRASTRUCTURE, TIMEOUT, Outcome, failed_outcome, read_result
from megarl.rewards.registry import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    PROMPT,
    PROMPTS,
    WARM_UPS,
    FunctionTraits,
    RewardFunction,
    check_signature,
    load_reward_function,
)

Report = Callable[[int, Outcome], None]
"""Receives the outcome of a task and the task's index."""

CONNECTION_ERRORS = frozenset(
    {
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "httpx.TransportError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "openai.APIConnectionError",
        "openai.RateLimitError",
        "openai.InternalServerError",
    }
)
"""Exceptions of client libraries for a failed service that derive from neither ConnectionError nor TimeoutError."""


class InfrastructureFailure(Exception):
    """A score cannot be computed because a service failed, not because of the sample; reward functions may raise it."""


class RewardTask(NamedTuple):
    """The arguments of a reward function for one sample."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt_str: str | None = None


def serialize_task(task: RewardTask) -> bytes | Outcome:
    """Pickle a task; for a sample that cannot be pickled, return the outcome that says why.

    Each call reads a task from its bytes. The samples of a prompt share objects, which functions may change.
    """
    try:
        return pickle.dumps(task)
    except Exception as error:
        return failed_outcome(
            BAD_SAMPLE, f"the sample cannot be pickled for its reward: {type(error).__name__}: {error}"
        )


@dataclass(frozen=True)
class FunctionSpec:
    """Name and call options of a reward function, sent to the processes that load it.

    Attributes:
        timeout_s: wall seconds per call; None = no limit.
        max_concurrency: maximum number of concurrent calls of a coroutine function, per process.
    """

    spec: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    max_concurrency: int = 16

    def load(self) -> LoadedFunction:
        """Import the function and run its warm-up.

        Raises:
            RewardError: the function cannot be imported, or has the wrong signature.
        """
        loaded = LoadedFunction(load_reward_function(self.spec, self.kwargs), self)
        if self.spec in WARM_UPS:
            WARM_UPS[self.spec]()
        return loaded


class LoadedFunction:
    """A reward function with its extra arguments.

    Raises:
        RewardError: the function has the wrong signature.
    """

    def __init__(self, fn: RewardFunction, spec: FunctionSpec | None = None) -> None:
        self.fn = fn
        self.spec = spec or FunctionSpec(getattr(fn, "__name__", repr(fn)))
        self.traits: FunctionTraits = check_signature(fn, self.spec.spec, self.spec.kwargs)

    def run(self, tasks: Sequence[RewardTask], report: Report) -> None:
        """Call the function for each task and report each outcome; enforces the time limit of coroutine functions.

        Raises:
            MemoryError: the process is out of memory, so that it can serve no other task either.
        """
        if self.traits.batch:
            for index, outcome in enumerate(self._call_batch(tasks)):
                report(index, outcome)
        elif self.traits.is_async:
            asyncio.run(self._await_all(tasks, report))
        else:
            for index, task in enumerate(tasks):
                report(index, self._call(task))

    def _call(self, task: RewardTask) -> Outcome:
        try:
            return read_result(self.fn(**self._arguments(task)))
        except (Exception, SystemExit) as error:  # exit() in a function must not end the run silently
            return _survived(error)

    def _call_batch(self, tasks: Sequence[RewardTask]) -> Iterator[Outcome]:
        columns = dict(zip(BATCH_ARGUMENTS, map(list, zip(*(task[:4] for task in tasks), strict=True)), strict=True))
        if self.traits.wants_prompt:
            columns[PROMPTS] = [task.prompt_str for task in tasks]
        try:
            results = list(self.fn(**columns, **self.spec.kwargs))
            if len(results) != len(tasks):
                text = f"the function returned {len(results)} results for a batch of {len(tasks)}"
                raise RewardError(text, code="reward.result-count")
        except (Exception, SystemExit) as error:
            yield from [_survived(error)] * len(tasks)
            return
        for result in results:
            try:
                yield read_result(result)
            except Exception as error:
                yield exception_outcome(error)

    async def _await_all(self, tasks: Sequence[RewardTask], report: Report) -> None:
        slots = asyncio.Semaphore(self.spec.max_concurrency)

        async def call(index: int, task: RewardTask) -> None:
            async with slots:
                report(index, await self._await(task))

        await asyncio.gather(*(call(index, task) for index, task in enumerate(tasks)))

    async def _await(self, task: RewardTask) -> Outcome:
        limit = asyncio.timeout(self.spec.timeout_s)
        try:
            async with limit:
                return read_result(await self.fn(**self._arguments(task)))
        except (Exception, SystemExit) as error:
            outcome = _survived(error)
            return timeout_outcome(self.spec) if limit.expired() else outcome

    def _arguments(self, task: RewardTask) -> dict[str, Any]:
        arguments = dict(zip(ARGUMENTS, task[:4], strict=True))
        if self.traits.wants_prompt:
            arguments[PROMPT] = task.prompt_str
        return {**arguments, **self.spec.kwargs}


def _survived(error: BaseException) -> Outcome:
    """Return the outcome of a call that raised; a process without memory raises on."""
    if isinstance(error, MemoryError):
        raise error
    return exception_outcome(error)


def timeout_outcome(spec: FunctionSpec) -> Outcome:
    """Return the outcome of a call that took too long."""
    return failed_outcome(TIMEOUT, f"{spec.spec} took longer than its {spec.timeout_s:g} s")


def exception_outcome(error: BaseException) -> Outcome:
    """Return the outcome of a call that raised, with file and line."""
    cause = str(error)
    if not isinstance(error, RewardError | InfrastructureFailure):
        frames = traceback.extract_tb(error.__traceback__)
        position = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        cause = f"{type(error).__name__}: {error}{position}"
    return failed_outcome(INFRASTRUCTURE if _is_infrastructure(error) else BAD_SAMPLE, cause)


def _is_infrastructure(error: BaseException) -> bool:
    """Return whether an exception means a failed service or connection, as opposed to a bad sample."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 429)
    if isinstance(error, InfrastructureFailure | ConnectionError | TimeoutError | MemoryError | urllib.error.URLError):
        return True
    return any(f"{cls.__module__}.{cls.__qualname__}" in CONNECTION_ERRORS for cls in type(error).__mro__)
