import pytest

from megarl.base.disjoint_groups import disjoint_groups


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, []),
        ({"a": "x", "b": "x", "c": "x"}, [["a"], ["b"], ["c"]]),
        ({"a": "x", "b": "y", "c": "z"}, [["a", "b", "c"]]),
        ({"a": "x", "b": "y", "c": "x"}, [["a", "b"], ["c"]]),
        ({"a": "x", "b": "x", "c": "y"}, [["a", "c"], ["b"]]),
        ({"a": "x", "b": "xy", "c": "y"}, [["a"], ["b"], ["c"]]),
        ({"a": "", "b": "x", "c": ""}, [["a", "b", "c"]]),
    ],
)
def test_no_two_items_of_a_group_share_a_resource(resources, expected):
    assert disjoint_groups(resources, resources.__getitem__) == expected
