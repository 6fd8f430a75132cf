"""Reward functions by name, file, dotted path, or data source; imports no torch.

A sample function is called as ``fn(data_source=..., solution_str=..., ground_truth=..., extra_info=...)``. It returns a
number, or a mapping with the number under ``score`` and extra fields to record; it may be a coroutine function. A batch
function is called as ``fn(data_sources=..., solution_strs=..., ground_truths=..., extra_infos=...)`` with lists and
returns one result per sample. A function with a parameter ``prompt_str`` (``prompt_strs``) also gets the prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError, RewardFunctionError
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_function

RewardFunction = Callable[..., Any]

REWARDS: Registry[RewardFunction] = Registry(
    "reward_function",
    loader=lambda spec, key: load_user_function(spec, "reward function"),
    error=RewardFunctionError,
    hint="or write path.py:function or package.module.function",
)
ISOLATED: set[str] = set()
"""Registered names of functions that interpret generated text and must not run in the driver."""
WARM_UPS: dict[str, Callable[[], None]] = {}
"""Calls that a process makes once before it scores, such as slow imports, by registered name."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
PROMPT, PROMPTS = "prompt_str", "prompt_strs"

_SEARCH_R1_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

DATA_SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "math",
    "hiyouga/geometry3k": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "search_em",
    **dict.fromkeys(_SEARCH_R1_SOURCES, "search_em"),
    "arithmetic": "arithmetic",
    "facts": "search_em",
}
"""Reward function by data source (a name or a pattern), for the datasets of verl and Search-R1."""


class FunctionTraits(NamedTuple):
    """Calling convention of a reward function.

    Attributes:
        batch: called with lists, once for many samples.
    """

    batch: bool = False
    is_async: bool = False
    wants_prompt: bool = False


def register_reward(
    name: str, *, isolated: bool = False, warm_up: Callable[[], None] | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a reward function under a name.

    Args:
        isolated: the function interprets generated text and must not run in the driver.
        warm_up: called once in each process before the function.

    Raises:
        RewardFunctionError: another function has the name.
    """

    def register(fn: RewardFunction) -> RewardFunction:
        REWARDS.register(name)(fn)
        if isolated:
            ISOLATED.add(name)
        if warm_up is not None:
            WARM_UPS[name] = warm_up
        return fn

    return register


def custom_reward_spec(path: str, name: str) -> str:
    """Return the spec of ``reward.custom_reward_function`` for :func:`load_reward_function`."""
    return f"{path}:{name}"


def load_reward_function(spec: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Import the reward function of a spec and check its signature.

    Raises:
        RewardFunctionError: the name, file, module or function is missing, importing it fails, or the signature does
            not fit.
    """
    try:
        fn = REWARDS.find(spec)
    except RewardFunctionError:
        raise
    except ConfigError as error:
        raise RewardFunctionError(error.text, code=error.code) from error
    check_signature(fn, spec, kwargs)
    return fn


def check_signature(fn: Any, spec: str, kwargs: Mapping[str, Any] | None = None) -> FunctionTraits:
    """Check that a reward function takes the arguments of a call, and return its calling convention.

    Raises:
        RewardFunctionError: it is not callable, or does not take the keyword arguments.
    """
    if not callable(fn):
        text = f"reward function {spec!r} is a {type(fn).__name__}; it must be a function"
        raise RewardFunctionError(text, code="config.user-code-not-callable")
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-ins have none
        return FunctionTraits(is_async=is_async)
    batch = BATCH_ARGUMENTS[0] in signature.parameters
    names, prompt = (BATCH_ARGUMENTS, PROMPTS) if batch else (ARGUMENTS, PROMPT)
    wants_prompt = prompt in signature.parameters
    arguments = dict.fromkeys([*names, *([prompt] if wants_prompt else []), *(kwargs or {})])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RewardFunctionError(
            f"reward function {spec!r} has the signature {signature} ({error}); it is called with the keyword "
            f"arguments {', '.join((*names, *(kwargs or {})))} (or, if it takes batches, {', '.join(BATCH_ARGUMENTS)})",
            code="reward.wrong-signature",
        ) from error
    if batch and is_async:
        text = f"reward function {spec!r} takes a batch and is a coroutine function; it can be one of both"
        raise RewardFunctionError(text, code="reward.async-batch")
    return FunctionTraits(batch, is_async, wants_prompt)


class SourceMap:
    """Maps data sources to reward functions.

    Args:
        custom: functions by data source or pattern; they take precedence over :data:`DATA_SOURCES`.
    """

    def __init__(self, custom: Mapping[str, str]) -> None:
        self.patterns = [*custom.items(), *DATA_SOURCES.items()]
        self._cache: dict[str, str] = {}

    def find(self, data_source: str) -> str:
        """Return a data source's reward function, as a spec.

        Raises:
            RewardFunctionError: no function is known for it; the message lists the known data sources.
        """
        if data_source not in self._cache:
            matching = [spec for pattern, spec in self.patterns if fnmatchcase(data_source, pattern)]
            if not matching:
                sources = ", ".join(sorted(dict(self.patterns)))
                raise RewardFunctionError(
                    f"no reward function is known for data_source={data_source!r}; known are {sources}. Name one under "
                    "reward.data_sources, for all data in reward.name, or in reward.custom_reward_function.path",
                    code="reward.unknown-data-source",
                )
            self._cache[data_source] = matching[0]
        return self._cache[data_source]

    def specs(self) -> list[str]:
        """Return the specs of all functions in the map."""
        return list(dict.fromkeys(spec for _, spec in self.patterns))
