"""The trainer's side of the sync stage packs on its own device."""

import torch

from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.ops.acceptance import sync
from megarl.ops.acceptance.models import SHAPES
from megarl.sharding.placement import ProcessLocation, RolloutLayout, Routes
from megarl.sharding.plan import build_plan


def test_weights_for_cuda_ipc_are_packed_on_the_trainers_device(monkeypatch):
    monkeypatch.setattr(sync, "_random", lambda params, device: {})  # no random numbers on this device
    model = parse_model_config(SHAPES["tiny"])
    plan = build_plan(WeightMap(model), ParallelLayout(), RolloutLayout(1), 2**20, 2)
    gpu = ProcessLocation("node", "GPU-1", ("GPU-1",))
    sender = sync._sender(model, plan, Routes([gpu], [gpu]), torch.device("meta"))
    assert sender.pools.keys() == {"device"}
    assert sender.pools["device"].take().data.device == torch.device("meta")
