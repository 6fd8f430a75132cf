"""Reductions of metrics over the parts of a step, worked out by hand."""

import json
import pickle

import pytest

from megarl.base.reductions import Largest, Smallest, Total, combine_metrics


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (float, 3.0),  # (1 x 1.0 + 3 x 3.0 + 2 x 4.0) / 6 rows
        (Largest, 4.0),
        (Smallest, 1.0),
        (Total, 8.0),
    ],
)
def test_values_carry_their_reduction(kind, expected):
    parts = [({"x": kind(1.0)}, 1), ({"x": kind(3.0)}, 3), ({}, 9), ({"x": kind(4.0)}, 2)]
    combined = combine_metrics(parts)
    assert combined == {"x": expected} and type(combined["x"]) is kind
    assert combine_metrics([({"x": kind(7.0)}, 5)]) == {"x": 7.0}


def test_values_are_numbers_to_files_and_processes():
    assert json.dumps({"x": Total(2), "y": Largest(0.5)}) == '{"x": 2.0, "y": 0.5}'
    copy = pickle.loads(pickle.dumps(Smallest(3.0)))
    assert type(copy) is Smallest and copy == 3.0
