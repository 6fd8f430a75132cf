"""Codes of errors survive pickling, and end the printed message."""

import pickle

from support.expected_errors import raises

from megarl.base.errors import DataError
from megarl.cluster.calls import WorkerFailed
from megarl.config.problems import InvalidConfigError, Problem


def test_errors_pickle_with_their_attributes():
    copy = pickle.loads(pickle.dumps(DataError("row 3 of a.jsonl has no prompt", code="data.no-prompt")))
    assert (copy.text, copy.code) == ("row 3 of a.jsonl has no prompt", "data.no-prompt")
    assert str(copy) == "row 3 of a.jsonl has no prompt [data.no-prompt]"
    error = WorkerFailed("actor rank 1 died", "actor", 1, "update", True, "log", code="worker.died")
    failed = pickle.loads(pickle.dumps(error))
    assert (failed.role, failed.rank, failed.verb, failed.died, failed.remote_traceback) == (
        "actor", 1, "update", True, "log",
    )  # fmt: skip


def test_each_problem_of_a_configuration_ends_with_its_code():
    problems = [Problem("a.b", 1, "must be 2", "x.one"), Problem("a.c", None, "must be set", "x.two", "a letter")]
    copy = pickle.loads(pickle.dumps(InvalidConfigError(problems)))
    assert copy.problems == tuple(problems) and copy.code == "x.one"
    lines = str(copy).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "a.b=1", "must be 2 [x.one]", "a.c=null", "must be set [x.two]", "meaning: a letter",
    ]  # fmt: skip


def test_an_expected_error_has_its_code_and_values():
    with raises("data.no-prompt", "row 3", 7):
        raise DataError("row 3 has 7 columns", code="data.no-prompt")
