"""Reward functions by name, by file, or by dotted path; imports no torch.

A reward function is called as ``fn(data_source=..., solution_str=..., ground_truth=..., extra_info=...)`` and returns a
number, or a mapping with the number under ``score`` and whatever else is to be recorded.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarl.errors import ConfigError, RewardError
from megarl.own_module import functions_of, locate

RewardFunction = Callable[..., float | Mapping[str, Any]]

REWARDS: dict[str, RewardFunction] = {}
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_WAYS = "path.py:function or package.module.function"


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a reward function known under a name.

    Raises:
        RewardError: the name belongs to another function.
    """

    def register(fn: RewardFunction) -> RewardFunction:
        if REWARDS.get(name, fn) is not fn:
            raise RewardError(
                f"reward {name!r} is registered already, by {REWARDS[name].__module__}; choose another name"
            )
        REWARDS[name] = fn
        return fn

    return register


def custom_reward_spec(path: str, name: str) -> str:
    """The spec for :func:`load_reward_function` of verl's ``custom_reward_function.path`` and ``.name``."""
    return f"{path}:{name}"


def load_reward_function(spec: str) -> RewardFunction:
    """The reward function that a spec names, imported and checked to be callable as megarl calls it.

    Args:
        spec: a registered name, ``path.py:function``, or ``package.module.function``.

    Raises:
        RewardError: there is no such name, file, module or function, importing it fails, or it does not take the
            arguments ``data_source, solution_str, ground_truth, extra_info``.
    """
    if spec in REWARDS:
        return REWARDS[spec]
    if not set(spec) & set(":."):
        near = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(f"there is no reward {spec!r}; {hint}known are {sorted(REWARDS)}; or give {_WAYS}")
    try:
        module, name = locate(spec, "reward function", "function")
    except ConfigError as error:
        raise RewardError(str(error)) from error
    fn = getattr(module, name, None)
    if fn is None:
        raise RewardError(f"reward function {spec!r}: it has no {name!r}; its functions are {functions_of(module)}")
    check_signature(fn, spec)
    return fn


def check_signature(fn: Any, spec: str) -> None:
    """Check that something can be called as a reward function.

    Raises:
        RewardError: it is not callable, is a coroutine function, or does not take the four keyword arguments.
    """
    if not callable(fn):
        raise RewardError(f"reward function {spec!r} is a {type(fn).__name__}; it must be a function")
    if inspect.iscoroutinefunction(fn):
        raise RewardError(f"reward function {spec!r} is a coroutine function; it must be a plain function")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-ins have none
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise RewardError(
            f"reward function {spec!r} has the signature {signature} ({error}); it is called with the keyword "
            f"arguments {', '.join(ARGUMENTS)}"
        ) from error
