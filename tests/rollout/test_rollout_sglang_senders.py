"""Memory in which SGLang's weight transports collect slices, without SGLang."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megarl.models import read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout.sglang.loader import ReplyListener
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.senders import TensorSender
from megarl.rollout.sglang.shards import SGLangShards
from megarl.rollout.sglang.whole_tensors import WholeTensorSender

BUCKET_BYTES = 6000


@pytest.mark.parametrize("shared", [True, False])
def test_staging_buffers_of_all_ranks_count_until_the_update_ends(make_folder, shared):
    shards = SGLangShards(read_model_config(make_folder()), 2)
    devices = [torch.device("cpu")] * 2
    sender = TensorSender(shards, lambda *_, **__: None, ReplyListener(None), devices, shared, BUCKET_BYTES)
    assert sender.staging_bytes == 0
    for rank in (0, 1):
        sender.put(rank, "model.norm.weight", (0,), torch.ones(32))
        assert sender.staging_bytes == (rank + 1) * BUCKET_BYTES
    sender.abandon()
    assert sender.staging_bytes == 0


class CountingSender(WholeTensorSender):
    """Counts the bytes of each bucket in place of sending it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = []

    def _send(self, bucket, version):
        self.sent.append(sum(tensor.nbytes for _, tensor in bucket))


def test_whole_tensors_count_while_they_are_incomplete_or_unsent(make_folder):
    folder = make_folder()
    shards = SGLangShards(read_model_config(folder), 1)
    sender = CountingSender(shards, lambda *_, **__: None, SGLangOptions(bucket_bytes=BUCKET_BYTES))
    weights = load_file(folder / "model.safetensors")
    params = list(load_local(HFReader(folder), shards.params[0].values(), torch.float32))
    sender.begin(1)
    for name, tensor in params:
        sender.put(0, name, (0,) * tensor.dim(), tensor)
    sender.end(1)
    assert sum(sender.sent) == sum(tensor.nbytes for tensor in weights.values()) and len(sender.sent) > 2
    assert sender.staging_bytes == max(sender.sent) >= BUCKET_BYTES
    sender.begin(2)
    assert sender.staging_bytes == 0
    names = ["model.embed_tokens.weight", "lm_head.weight"]  # one row of each: both stay incomplete
    for name in names:
        sender.put(0, name, (0, 0), dict(params)[name][:1])
    assert sender.staging_bytes == sum(weights[name].nbytes for name in names)
