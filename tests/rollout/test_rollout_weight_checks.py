import pytest
import torch
from support.expected_errors import raises

from megarl.base.errors import WeightSyncError
from megarl.models.verification import Coverage
from megarl.sharding.receiver import ShardWeights, check_complete


def test_the_incomplete_parameter_is_named():
    whole, part = Coverage("a", (2,), WeightSyncError), Coverage("b", (2, 3), WeightSyncError)
    whole.add((0,), (2,))
    part.add((1, 0), (1, 3))
    check_complete([whole], 4)
    with pytest.raises(WeightSyncError) as caught:
        check_complete([whole, part], 4)
    assert str(caught.value) == (
        "weight version 4 is incomplete: 1 of 2 parameters, first 'b' with 3 of 6 elements written "
        "[sync.missing-elements]"
    )


# ---- updates of one rank


@pytest.fixture
def weights():
    update = ShardWeights({"a": torch.full((3, 2), 9.0), "b": torch.full((3,), 9.0)})
    update.begin(3)
    return update


BAD_SLICES = {
    "unknown name": (("c", (0,), torch.zeros(1)), "sync.unknown-parameter", ["'c'"]),
    "beyond the end": (("b", (2,), torch.zeros(2)), "model.slice-outside", ["[2] at [2]", "[3]"]),
    "before the start": (("b", (-1,), torch.zeros(2)), "model.slice-outside", ["[-1]"]),
    "wrong rank": (("b", (0, 0), torch.zeros(2, 2)), "model.slice-outside", ["[2, 2]"]),
    "twice": (("a", (0, 0), torch.zeros(1, 1)), "model.slice-overlap", ["'a'"]),
}


@pytest.mark.parametrize("case", BAD_SLICES)
def test_a_bad_slice_is_not_written_and_loses_the_update(weights, case):
    tensor_slice, code, values = BAD_SLICES[case]
    weights.write([("a", (0, 0), torch.ones(1, 2))])
    with raises(code, *values, error=WeightSyncError):
        weights.write([tensor_slice])
    assert weights.tensors["a"].tolist() == [[1, 1], [9, 9], [9, 9]] and weights.tensors["b"].tolist() == [9, 9, 9]
    with raises("sync.no-open-update"):
        weights.end(3)
    assert weights.version == -1


def test_an_update_writes_every_element_in_any_order(weights):
    weights.write([("b", (1,), torch.full((2,), 5.0)), ("a", (0, 1), torch.full((3, 1), 7.0))])
    weights.write([("a", (0, 0), torch.full((3, 1), 6.0)), ("b", (0,), torch.full((1,), 4.0))])
    assert weights.version == -1
    weights.end(3)
    assert weights.version == 3
    assert weights.tensors["a"].tolist() == [[6, 7]] * 3 and weights.tensors["b"].tolist() == [4, 5, 5]


def test_slices_may_come_from_one_reused_buffer(weights):
    buffer = torch.empty(3)

    def slices():
        yield "b", (0,), buffer.fill_(1.0)
        yield "a", (0, 0), buffer.fill_(2.0).view(3, 1)
        yield "a", (0, 1), buffer.fill_(3.0).view(3, 1)

    weights.write(slices())
    weights.end(3)
    assert weights.tensors["a"].tolist() == [[2, 3]] * 3 and weights.tensors["b"].tolist() == [1, 1, 1]


def test_a_gap_another_version_and_a_negative_version_are_refused(weights):
    weights.write([("a", (0, 0), torch.ones(3, 2)), ("b", (0,), torch.ones(2))])
    with raises("sync.missing-elements", "1 of 2", "'b' with 2 of 3"):
        weights.end(3)
    weights.begin(4)
    with raises("sync.version-mismatch", "version 4", "version 5"):
        weights.end(5)
    with raises("sync.negative-version", -2):
        weights.begin(-2)
