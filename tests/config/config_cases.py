"""Smallest configurations of each job, and the problems of changed ones."""

from __future__ import annotations

from typing import Any

import pytest
from support.dotted_keys import set_keys

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.problems import InvalidConfigError, Problem

TRAIN = {
    "data": {"train_files": ["train.parquet"]},
    "actor_rollout_ref": {"model": {"path": "model"}},
    "trainer": {"experiment_name": "test"},
}
EVALUATE = {
    "data": {"val_files": ["val.parquet"]},
    "actor_rollout_ref": {"model": {"path": "model"}},
    "trainer": {"experiment_name": "test"},
}
SFT = {
    "data": {"train_files": ["train.parquet"]},
    "model": {"path": "model"},
    "trainer": {"experiment_name": "test"},
}


def with_keys(values: dict[str, Any], base: dict[str, Any] = TRAIN) -> dict[str, Any]:
    """The base with dotted keys set."""
    return set_keys(base, values)


def same_value(reported: Any, value: Any) -> bool:
    """Whether a problem reports the value of its key, which may have been converted to the key's type."""
    return bool(reported == value) or reported == [value] or str(reported) == str(value)


def problems_of(values: dict[str, Any], schema: Any = TrainConfig, base: dict[str, Any] = TRAIN) -> dict[str, Problem]:
    """The problems of an invalid configuration, by path."""
    with pytest.raises(InvalidConfigError) as caught:
        build(schema, with_keys(values, base))
    for problem in caught.value.problems:
        assert problem.path in str(caught.value) and problem.text in str(caught.value)
        assert problem.path not in values or same_value(problem.value, values[problem.path]), problem
    return {problem.path: problem for problem in caught.value.problems}


def check_problem(problem: Problem, expected: str) -> None:
    """Compare a problem with ``code``, or with ``code: values`` that its text must name."""
    code, _, values = expected.partition(": ")
    assert problem.code == code and values in problem.text, problem
