"""A sync into the embedded engine gives the same weights as loading the model folder."""

import pytest
import torch

from megarl.base.errors import WeightSyncError
from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.sharding import RolloutLayout, Routes, build_plan, receiver_plans
from megarl.sharding.placement import current_location
from megarl.sharding.receiver import ReceiverSpec
from megarl.sharding.sender import BucketSender
from megarl.sharding.transports.interface import PeerTransports

FLOAT32 = torch.float32


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def connect(engine, plan, senders, transport="shared_memory"):
    here = current_location()
    (part,) = receiver_plans(plan)
    engine.connect_receivers([ReceiverSpec(part, Routes([here] * senders, [here], transport), None, "float32")])


@pytest.mark.parametrize("layout", [ParallelLayout(2, 1, 1), ParallelLayout(2, 2, 2)])
def test_every_parameter_has_the_checksum_of_the_model_folder(folder, layout):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    plan = build_plan(weight_map, layout, RolloutLayout(), 1000, 4)
    ranks = [
        dict(load_local(reader, weight_map.megatron_params(layout, rank), torch.float32))
        for rank in range(layout.world_size)
    ]

    def way(count):
        return PeerTransports(dict.fromkeys(range(count), "shared_memory"))

    senders = [BucketSender(plan, rank, lambda rank=rank: ranks[rank], way(1), FLOAT32) for rank in range(len(ranks))]
    engine, reference = EmbeddedEngine(reader.config), EmbeddedEngine(reader.config)
    connect(engine, plan, len(ranks))

    engine.begin_update(3)
    for index in range(len(plan.buckets)):
        exports = [sender.export_bucket(index) for sender in senders]
        engine.import_bucket(index, [export[0] for export in exports if 0 in export])
        assert engine.stale
        for sender in senders:
            sender.release_bucket(index)
    engine.end_update(3)

    reference.load_hf(str(folder))
    assert engine.weight_version == 3
    assert engine.checksum() == reference.checksum()


def test_an_engine_of_another_model_refuses_the_sync(folder):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    plan = build_plan(weight_map, ParallelLayout(), RolloutLayout(), 1 << 20, 4)
    params = dict(load_local(reader, weight_map.megatron_params(ParallelLayout(), 0), torch.float32))
    way = PeerTransports({0: "inline"})
    message = BucketSender(plan, 0, lambda: params, way, FLOAT32).export_bucket(0)[0]

    engine = EmbeddedEngine(parse_model_config({**reader.config.raw, "num_hidden_layers": 1}))
    connect(engine, plan, 1, "inline")
    engine.begin_update(1)
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\."):
        engine.import_bucket(0, [message])
    assert engine.stale
