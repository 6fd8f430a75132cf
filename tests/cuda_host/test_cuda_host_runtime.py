"""The runtime finds what a GPU would refuse before a kernel runs."""

import pytest
import torch

CUDA = torch.device("cuda")


def test_device_is_described_as_an_h100():
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    assert "H100 80GB HBM3" in properties.name and torch.cuda.device_count() == 1


def test_copies_are_copies():
    values = torch.arange(7)
    assert values.to(CUDA).clone().cpu().tolist() == values.tolist()
    assert torch.empty(3, pin_memory=True).copy_(torch.ones(3, device=CUDA).copy_(torch.full((3,), 2.0))).sum() == 6


def test_mixed_devices_dtypes_and_large_launches_raise():
    on_device = torch.zeros(4, 4, device=CUDA)
    with pytest.raises(RuntimeError, match="at least two devices"):
        on_device + torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match="same dtype"):
        on_device @ torch.zeros(4, 4, device=CUDA, dtype=torch.bfloat16)


def test_synchronization_inside_a_capture_raises():
    values = torch.zeros(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            values.add_(1)
            with pytest.raises(RuntimeError, match="stream is capturing"):
                values.sum().item()
        finally:
            graph.capture_end()
    graph.replay()
