"""Reward functions by name, by file, or by dotted path; imports no torch.

A function of samples is called as ``fn(data_source=..., solution_str=..., ground_truth=..., extra_info=...)`` and
returns a number, or a mapping with the number under ``score`` and whatever else is to be recorded; it may be a
coroutine function. A function of batches is called as ``fn(data_sources=..., solution_strs=..., ground_truths=...,
extra_infos=...)`` with lists, and returns as many results. One that has a parameter ``prompt_str`` (``prompt_strs``)
is told the prompt too.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megarl.errors import ConfigError, RewardFunctionError
from megarl.own_module import functions_of, locate

RewardFunction = Callable[..., Any]

REWARDS: dict[str, RewardFunction] = {}
ISOLATED: set[str] = set()
"""Registered names of functions that interpret what the policy wrote, and so must run outside of the driver."""
WARM_UPS: dict[str, Callable[[], None]] = {}
"""By registered name: what a process does once before it scores, such as slow imports."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
PROMPT, PROMPTS = "prompt_str", "prompt_strs"
_WAYS = "path.py:function or package.module.function"


class Traits(NamedTuple):
    """How a reward function is called.

    Attributes:
        batch: with lists, once for many samples.
        is_async: it is a coroutine function.
        wants_prompt: it has a parameter for the prompt.
    """

    batch: bool = False
    is_async: bool = False
    wants_prompt: bool = False


def register_reward(
    name: str, *, isolated: bool = False, warm_up: Callable[[], None] | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a reward function known under a name.

    Args:
        name: in configurations.
        isolated: it interprets what the policy wrote, and must run outside of the driver.
        warm_up: called once in a process that will call the function.

    Raises:
        RewardFunctionError: the name belongs to another function.
    """

    def register(fn: RewardFunction) -> RewardFunction:
        if REWARDS.get(name, fn) is not fn:
            raise RewardFunctionError(
                f"reward {name!r} is registered already, by {REWARDS[name].__module__}; choose another name"
            )
        REWARDS[name] = fn
        if isolated:
            ISOLATED.add(name)
        if warm_up is not None:
            WARM_UPS[name] = warm_up
        return fn

    return register


def custom_reward_spec(path: str, name: str) -> str:
    """The spec for :func:`load_reward_function` of verl's ``custom_reward_function.path`` and ``.name``."""
    return f"{path}:{name}"


def load_reward_function(spec: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """The reward function that a spec names, imported and checked to be callable as megarl calls it.

    Args:
        spec: a registered name, ``path.py:function``, or ``package.module.function``.
        kwargs: what it is given beside its arguments.

    Raises:
        RewardFunctionError: there is no such name, file, module or function, importing it fails, or it does not take
            the arguments of a reward function.
    """
    if spec in REWARDS:
        fn = REWARDS[spec]
        check_signature(fn, spec, kwargs)
        return fn
    if not set(spec) & set(":."):
        near = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardFunctionError(f"there is no reward {spec!r}; {hint}known are {sorted(REWARDS)}; or give {_WAYS}")
    try:
        module, name = locate(spec, "reward function", "function")
    except ConfigError as error:
        raise RewardFunctionError(str(error)) from error
    found = getattr(module, name, None)
    if found is None:
        raise RewardFunctionError(
            f"reward function {spec!r}: it has no {name!r}; its functions are {functions_of(module)}"
        )
    check_signature(found, spec, kwargs)
    return found


def check_signature(fn: Any, spec: str, kwargs: Mapping[str, Any] | None = None) -> Traits:
    """Check that something can be called as a reward function, and say how.

    Raises:
        RewardFunctionError: it is not callable, or does not take the keyword arguments.
    """
    if not callable(fn):
        raise RewardFunctionError(f"reward function {spec!r} is a {type(fn).__name__}; it must be a function")
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-ins have none
        return Traits(is_async=is_async)
    batch = BATCH_ARGUMENTS[0] in signature.parameters
    names, prompt = (BATCH_ARGUMENTS, PROMPTS) if batch else (ARGUMENTS, PROMPT)
    wants_prompt = prompt in signature.parameters
    given = dict.fromkeys([*names, *([prompt] if wants_prompt else []), *(kwargs or {})])
    try:
        signature.bind(**given)
    except TypeError as error:
        raise RewardFunctionError(
            f"reward function {spec!r} has the signature {signature} ({error}); it is called with the keyword "
            f"arguments {', '.join((*names, *(kwargs or {})))} (or, if it takes batches, {', '.join(BATCH_ARGUMENTS)})"
        ) from error
    if batch and is_async:
        raise RewardFunctionError(
            f"reward function {spec!r} takes a batch and is a coroutine function; it can be one of both"
        )
    return Traits(batch, is_async, wants_prompt)
