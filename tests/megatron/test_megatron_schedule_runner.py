"""Micro-batches reach the device before their forward pass, through pinned memory, and one ahead."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from engine_cases import Setup, engine, micro_batches, policy_loss
from tiny_models import rows, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch
from megarl.megatron.engine.model import StageModel
from megarl.megatron.layers import context_parallel, packed
from megarl.megatron.layers.context_parallel import context_parallel_part
from megarl.models import ParallelLayout

CUDA = torch.device("cuda", 0)


def test_a_copy_to_a_gpu_goes_through_pinned_memory_and_does_not_wait():
    tensor = mock.Mock(device=torch.device("cpu"))
    assert packed.copy_to(tensor, CUDA) is tensor.pin_memory().to.return_value
    tensor.pin_memory().to.assert_called_once_with(CUDA, non_blocking=True)
    tensor.to.assert_not_called()


def test_other_copies_are_plain():
    for source, target in (("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cpu")):
        tensor = mock.Mock(device=torch.device(source))
        assert packed.copy_to(tensor, torch.device(target)) is tensor.to.return_value
        tensor.pin_memory.assert_not_called()


def test_copies_to_the_host_go_to_pinned_memory_and_do_not_wait(monkeypatch):
    pinned = mock.Mock()
    monkeypatch.setattr(packed.torch, "empty", pinned)
    tensor = mock.Mock(device=CUDA, shape=(3, 4), dtype=torch.bfloat16)
    assert packed.begin_copy_to_host(tensor) is pinned().copy_.return_value
    assert pinned.call_args_list[0] == mock.call((3, 4), dtype=torch.bfloat16, pin_memory=True)
    pinned().copy_.assert_called_once_with(tensor, non_blocking=True)
    host = mock.Mock(device=torch.device("cpu"))
    assert packed.begin_copy_to_host(host) is host


def every_tensor(value):
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for each in inner for tensor in every_tensor(each)]


@pytest.mark.parametrize("share", [False, True])
def test_every_tensor_of_a_micro_batch_is_copied(share):
    prompt = torch.tensor([5, 6])
    parts = [(prompt, torch.tensor([7])), (prompt, torch.tensor([1, 2]))]
    whole = PackedMicroBatch.from_rows(parts, {"weights": torch.ones(3)}, share_prompts=share)
    for value in (whole, context_parallel_part(whole)):
        copied: list[Tensor] = []

        def copy(tensor, device, copied=copied):
            copied.append(tensor)
            return tensor

        with mock.patch.object(packed, "copy_to", copy), mock.patch.object(context_parallel, "copy_to", copy):
            value.to(CUDA)
        assert sorted(map(id, copied)) == sorted(map(id, every_tensor(value))) and len(copied) >= 5


def events(place, path, setup):
    """Copies to the device, forward passes and losses of a step, in order."""
    seen: list[str] = []

    def noting(name, function):
        def call(*args, **options):
            if not seen or seen[-1] != name:
                seen.append(name)
            return function(*args, **options)

        return call

    with engine(place, path, setup) as built:
        chunk = built.chunks[0]
        with (
            mock.patch.object(packed, "copy_to", noting("copy", packed.copy_to)),
            mock.patch.object(context_parallel, "copy_to", noting("copy", packed.copy_to)),
            mock.patch.object(chunk, "forward", noting("forward", chunk.forward)),
        ):
            loss = noting("loss", policy_loss)
            built.forward_backward(micro_batches(rows(), setup), loss, OutputOptions(with_entropy=True))
    return seen


def test_the_next_micro_batch_is_copied_after_the_loss_of_the_current_one(pool, tmp_path):
    save_model(tmp_path, "qwen3")
    setup = Setup(ParallelLayout(), optimizer=OptimizerOptions())
    (order,) = pool.run(events, 1, tmp_path, setup)
    assert order == ["copy", "forward", "loss"] * 3  # no copy between a forward and its loss


@pytest.mark.parametrize(
    ("longest", "ranks", "bound"),
    [((3, 5), 1, 128), ((100, 28), 1, 128), ((100, 29), 1, 256), ((9, 1), 3, 384)],
)
def test_the_longest_sequence_is_rounded_up(longest, ranks, bound):
    chunk = mock.Mock()
    chunk.config.context_parallel_size = ranks
    parts = [(torch.ones(n, dtype=torch.int64), torch.ones(m, dtype=torch.int64)) for n, m in ((1, 1), longest)]
    part = context_parallel_part(PackedMicroBatch.from_rows(parts), ranks, 0)
    sequences = StageModel((chunk,), torch.ones(4)).sequences(part)
    assert sequences.max_seqlen_q == sequences.max_seqlen_kv == bound
    ends = sequences.cu_seqlens_q
    assert ends.dtype is torch.int32 and ends.tolist() == [0, part.lengths[0], sum(part.lengths)]
    assert ends is sequences.cu_seqlens_kv and (sequences.cu_seqlens_q_padded is ends) == (ranks > 1)
