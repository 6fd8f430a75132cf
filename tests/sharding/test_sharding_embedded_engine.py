"""A sync into the embedded engine gives the same weights as loading the model folder."""

import pytest
import torch
import transformers

from megarl.base.errors import WeightSyncError
from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout import EngineOptions
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.sharding.placement import RolloutLayout, Routes, current_location
from megarl.sharding.plan import build_plan, receiver_plans
from megarl.sharding.receiver import ReceiverSpec
from megarl.sharding.sender import BucketSender
from megarl.sharding.transports.interface import PeerTransports, TransportOptions

FLOAT32 = torch.float32


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENTS = {
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LINEAR = {
    "layer_types": ["full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
MODELS = {
    "untied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {"num_key_value_heads": 2, "num_experts": 4, **EXPERTS}),
    "by_head": ("Qwen3Next", {"num_key_value_heads": 2, "num_experts": 4, **EXPERTS, **LINEAR}),
    "by_kind": ("Qwen3_5Text", {"num_key_value_heads": 2, **LINEAR}),
    "latents": ("DeepseekV3", {"num_key_value_heads": 4, **LATENTS, **EXPERTS}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    prefix, fields = MODELS[request.param]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **fields)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    for name, tensor in model.named_buffers():
        if name.endswith("correction_bias"):
            tensor.normal_()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def connect(engine, plan, senders, transport="shared_memory"):
    here = current_location()
    (part,) = receiver_plans(plan)
    engine.receiver.connect([ReceiverSpec(part, Routes([here] * senders, [here], transport), None, "float32")])


LAYOUTS = [
    ParallelLayout(2, 1, 1),
    ParallelLayout(2, 2, 2),
    ParallelLayout(dp=2, ep=2),
    ParallelLayout(2, 1, 2, ep=4, etp=1),
    ParallelLayout(2, 2, 2, ep=2, etp=2),
]


@pytest.mark.parametrize(
    ("layout", "dtype"), [*((layout, "float32") for layout in LAYOUTS), (LAYOUTS[3], "bfloat16")], ids=str
)
def test_every_parameter_has_the_checksum_of_the_model_folder(folder, layout, dtype):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    plan = build_plan(weight_map, layout, RolloutLayout(), 1000, 4)
    ranks = [
        dict(load_local(reader, weight_map.megatron_params(layout, rank), torch.float32))
        for rank in range(layout.world_size)
    ]
    options = EngineOptions(dtype=dtype)

    def way(count):
        return PeerTransports(dict.fromkeys(range(count), "shared_memory"), TransportOptions(torch.device("cpu")))

    senders = [
        BucketSender(plan, rank, lambda rank=rank: ranks[rank], way(1), FLOAT32, torch.device("cpu"))
        for rank in range(len(ranks))
    ]
    engine, reference = EmbeddedEngine(reader.config, options), EmbeddedEngine(reader.config, options)
    connect(engine, plan, len(ranks))

    engine.receiver.begin(3)
    for index in range(len(plan.buckets)):
        exports = [sender.export_bucket(index) for sender in senders]
        engine.receiver.import_bucket(index, [export[0] for export in exports if 0 in export])
        assert engine.stale
    engine.receiver.end(3)

    reference.load_hf(str(folder))
    assert engine.weight_version == 3
    assert engine.checksum() == reference.checksum()
    weights = engine._weights.tensors
    exact = {name for name, tensor in weights.items() if tensor.dtype == FLOAT32}
    biases = {"model.layers.1.mlp.gate.e_score_correction_bias"} & set(weights)
    assert exact == (set(weights) if dtype == "float32" else biases)


def test_an_engine_of_another_model_refuses_the_sync(folder):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    plan = build_plan(weight_map, ParallelLayout(), RolloutLayout(), 1 << 20, 4)
    params = dict(load_local(reader, weight_map.megatron_params(ParallelLayout(), 0), torch.float32))
    way = PeerTransports({0: "inline"}, TransportOptions(torch.device("cpu")))
    message = BucketSender(plan, 0, lambda: params, way, FLOAT32, torch.device("cpu")).export_bucket(0)[0]

    kinds = reader.config.raw.get("layer_types")
    changes = {"num_hidden_layers": 1, "layer_types": kinds and kinds[:1]}
    engine = EmbeddedEngine(parse_model_config({**reader.config.raw, **changes}))
    connect(engine, plan, 1, "inline")
    engine.receiver.begin(1)
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\."):
        engine.receiver.import_bucket(0, [message])
    assert engine.stale
