import pytest
import torch

from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.rollout.embedded.weights import WeightStore


def test_a_refused_slice_writes_nothing_and_other_dtypes_are_converted():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    store.begin(0)
    store.write([("p", (0,), torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(WeightSyncError):
        store.write([("p", (1,), torch.full((3,), 5.0))])
    assert store.tensors["p"].tolist() == [1, 1, 0, 0]
    assert store.tensors["p"].dtype == torch.float32


def test_updates_are_in_place():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    address = store.tensors["p"].data_ptr()
    store.begin(1)
    store.write([("p", (0,), torch.ones(4))])
    store.end(1)
    assert store.tensors["p"].data_ptr() == address
