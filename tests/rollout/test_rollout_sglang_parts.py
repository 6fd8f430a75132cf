"""Parts of the SGLang engine that need no SGLang: shards, checks of updates, requests and responses."""

import base64
import importlib.util
import json
import os
import pickle
import socket
import struct
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.expected_errors import raises

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.models import ParallelLayout, WeightMap, parse_model_config, read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.model_config import Experts
from megarl.models.verification import ParamRectangle, rectangle_checksum, tensor_checksum
from megarl.rollout import EngineOptions, Request, RolloutError, SamplingParams, check_engine_model
from megarl.rollout.interface import EngineLost, RequestRefused
from megarl.rollout.sglang import options
from megarl.rollout.sglang.backend import NAN_STOP, CallWatch, ResponseContext, parse_completion, request_payload
from megarl.rollout.sglang.engine import _check_divides, _memory_tags
from megarl.rollout.sglang.options import (
    SHIM,
    EngineNodes,
    RankRendezvous,
    SGLangOptions,
    check_server_args,
    environment,
    model_arguments,
    server_args,
)
from megarl.rollout.sglang.weights import CommandChannel, channel_addresses
from megarl.sharding import sglang_loader as loader
from megarl.sharding.placement import ProcessLocation, RolloutLayout, Routes, current_location
from megarl.sharding.plan import build_plan, receiver_plans
from megarl.sharding.receiver import ReceiverSpec
from megarl.sharding.sender import BucketSender
from megarl.sharding.sglang_loader import Reply, SGLangShard
from megarl.sharding.transports.interface import PeerTransports

LAYOUT = ParallelLayout()


class Model(torch.nn.Module):
    """Parameters by dotted name, as SGLang's model has them."""

    def __init__(self, shapes):
        super().__init__()
        self.held = {name: torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in shapes.items()}

    def named_parameters(self):
        return self.held.items()

    def parameters(self):
        return iter(self.held.values())


def sglang_model(shard, **changed):
    """A model with the shapes that a shard expects, without `None` ones."""
    shapes = shard._shapes(shard._places) | changed
    return Model({name: shape for name, shape in shapes.items() if shape is not None})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_rows_are_placed_as_in_sglang(make_folder, tp):
    """SGLang: 64 rows in equal parts, of which the first 50 are the model's."""
    folder = make_folder()
    reader, together, rows = HFReader(folder), [], []
    for rank in range(tp):
        shard = SGLangShard(reader.config, tp, rank)
        model = sglang_model(shard)
        assert model.held["lm_head.weight"].shape == (64 // tp, 32)
        views = shard.views(model)
        for name, tensor in load_local(reader, shard.params, torch.float32):
            views[name].copy_(tensor)
        shard.clear_padding(model)
        together.append(model.held["lm_head.weight"].data)
        rows.append(len(views["lm_head.weight"]))
    whole = torch.cat(together)
    assert torch.equal(whole[:50], load_file(folder / "model.safetensors")["lm_head.weight"])
    assert (whole[50:] == 0).all()
    assert rows == [max(0, min(50 - rank * 64 // tp, 64 // tp)) for rank in range(tp)]


@pytest.mark.parametrize(
    ("changed", "code", "value"),
    [
        ({"model.norm.weight": None}, "sglang.parameter-missing", "norm"),
        ({"model.more.weight": [1]}, "sglang.parameter-extra", "more"),
        ({"model.norm.weight": [33]}, "sglang.parameter-shape", "[33], expected [32]"),
    ],
)
def test_another_model_in_sglang_is_refused(make_folder, changed, code, value):
    shard = SGLangShard(read_model_config(make_folder()), 1, 0)
    with raises(code, f"'{next(iter(changed))}'", value, error=WeightSyncError):
        shard.views(sglang_model(shard, **changed))


def test_parameters_are_declared_once_and_looked_up_at_each_use(make_folder, monkeypatch):
    """SGLang replaces its parameters when it loads a folder, and frees their memory between syncs."""
    declare, calls = WeightMap.rollout_params, []
    monkeypatch.setattr(
        WeightMap, "rollout_params", lambda *args, **options: calls.append(args) or declare(*args, **options)
    )
    shard = SGLangShard(read_model_config(make_folder()), 2, 1)
    model = sglang_model(shard)
    before = shard.views(model)
    for param in model.held.values():
        param.data = torch.full_like(param.data, 3.0)
    after = shard.views(model)
    assert after.keys() == before.keys() and len(shard.params) == len(after)
    for name, view in after.items():
        assert (view == 3).all() and view.data_ptr() != before[name].data_ptr()
    shard.clear_padding(model)
    assert (model.held["lm_head.weight"].data == 0).any() and len(calls) == 1
    size = len(pickle.dumps(shard))
    assert size == len(pickle.dumps(SGLangShard(shard.config, 2, 1))), "sent without its parameters"
    assert pickle.loads(pickle.dumps(shard)) == shard and pickle.loads(pickle.dumps(shard)).params == shard.params


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 9,
    "max_position_embeddings": 16,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def test_latent_projections_are_fused_as_in_sglang():
    """As in SGLang: ``fused_qkv_a_proj_with_mqa`` is ``q_a_proj`` over ``kv_a_proj_with_mqa``, on every rank."""
    query, key_value = torch.arange(48.0).view(6, 8), -torch.arange(48.0).view(6, 8)
    for layer in (0, 1):
        block = f"model.layers.{layer}.self_attn."
        fused = block + "fused_qkv_a_proj_with_mqa.weight"
        for rank in (0, 1):
            shard = SGLangShard(parse_model_config(LATENT), 2, rank)
            model = sglang_model(shard)
            assert model.held[fused].shape == (12, 8)
            assert not {block + "q_a_proj.weight", block + "kv_a_proj_with_mqa.weight"} & set(model.held)
            views = shard.views(model)
            views[block + "q_a_proj.weight"].copy_(query)
            views[block + "kv_a_proj_with_mqa.weight"].copy_(key_value)
            assert torch.equal(model.held[fused].data, torch.cat([query, key_value]))


HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "partial_rotary_factor": 0.5,
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}
HYBRID_IN_SGLANG = {  # on one of two ranks; names and shapes of SGLang 0.5.23's classes
    "model.embed_tokens.weight": [64, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [64, 8],
    **{f"model.layers.{n}.{kind}_layernorm.weight": [8] for n in (0, 1) for kind in ("input", "post_attention")},
    "model.layers.0.linear_attn.in_proj_qkvz.weight": [3 + 3 + 10 + 10, 8],
    "model.layers.0.linear_attn.in_proj_ba.weight": [4, 8],
    "model.layers.0.linear_attn.conv1d.weight": [3 + 3 + 10, 1, 4],
    "model.layers.0.linear_attn.A_log": [2],
    "model.layers.0.linear_attn.dt_bias": [2],
    "model.layers.0.linear_attn.norm.weight": [5],
    "model.layers.0.linear_attn.out_proj.weight": [8, 10],
    "model.layers.1.qkv_proj.weight": [2 * 2 * 4 + 4 + 4, 8],
    "model.layers.1.q_norm.weight": [4],
    "model.layers.1.k_norm.weight": [4],
    "model.layers.1.o_proj.weight": [8, 8],
}
EXPERTS_IN_SGLANG = {
    "gate.weight": [4, 8],
    "experts.w13_weight": [4, 6, 8],
    "experts.w2_weight": [4, 8, 3],
    "shared_expert.gate_up_proj.weight": [10, 8],
    "shared_expert.down_proj.weight": [8, 5],
    "shared_expert_gate.weight": [1, 8],
}
MLP_IN_SGLANG = {"gate_up_proj.weight": [12, 8], "down_proj.weight": [8, 6]}


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLM"])
def test_gated_delta_nets_have_the_parameters_of_sglang(architecture):
    """A rank's rows: those of its heads in the order of Qwen3-Next's checkpoint, or one kind after the other."""
    shard = SGLangShard(parse_model_config(HYBRID | {"architectures": [architecture]}), 2, 1)
    blocks = MLP_IN_SGLANG if architecture == "Qwen3_5ForCausalLM" else EXPERTS_IN_SGLANG
    mlps = {f"model.layers.{n}.mlp.{name}": shape for n in (0, 1) for name, shape in blocks.items()}
    assert shard._shapes(shard._places) == HYBRID_IN_SGLANG | mlps
    views = shard.views(Model(HYBRID_IN_SGLANG | mlps))
    assert views.keys() == {param.name for param in shard.params}
    rows = {
        name: [(piece.hf_name.split(".")[-2], piece.start[0], piece.stop[0]) for piece in param.pieces]
        for name, param in ((param.name.partition(".linear_attn.")[2], param) for param in shard.params)
    }
    if architecture == "Qwen3NextForCausalLM":
        assert rows["in_proj_qkvz.weight"] == [("in_proj_qkvz", 26, 52)]
        assert rows["in_proj_ba.weight"] == [("in_proj_ba", 4, 8)]
    else:
        queries = [("in_proj_qkv", 3, 6), ("in_proj_qkv", 9, 12), ("in_proj_qkv", 22, 32)]
        assert rows["in_proj_qkvz.weight"] == [*queries, ("in_proj_z", 10, 20)]
        assert rows["in_proj_ba.weight"] == [("in_proj_b", 2, 4), ("in_proj_a", 2, 4)]
    assert rows["conv1d.weight"] == [("conv1d", 3, 6), ("conv1d", 9, 12), ("conv1d", 22, 32)]


@pytest.mark.parametrize(
    ("change", "options", "code", "value"),
    [
        ({}, {"device": "cpu"}, "sglang.model-needs-gpu", "rollout.name=embedded"),
        ({}, {"device": "cuda", "tensor_parallel_size": 4}, "layout.rollout-heads", "linear_num_key_heads"),
        ({"mlp_only_layers": [0]}, {"device": "cuda"}, "sglang.dense-layers", "rollout.name=embedded"),
    ],
)
def test_gated_delta_nets_that_sglang_lacks_are_refused(change, options, code, value):
    config = parse_model_config(HYBRID | {"architectures": ["Qwen3NextForCausalLM"]} | change)
    with raises(code, "Qwen3NextForCausalLM", value, error=ModelError):
        check_engine_model("sglang", config, EngineOptions(**options))


SINKS = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default"},
}
SINKS_IN_SGLANG = {  # on one of two ranks; names and shapes of SGLang 0.5.23's classes with moe_runner_backend=triton
    "model.embed_tokens.weight": [64, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [64, 8],
    "model.layers.0.input_layernorm.weight": [8],
    "model.layers.0.post_attention_layernorm.weight": [8],
    "model.layers.0.self_attn.sinks": [2],
    "model.layers.0.self_attn.qkv_proj.weight": [2 * 4 + 4 + 4, 8],
    "model.layers.0.self_attn.qkv_proj.bias": [2 * 4 + 4 + 4],
    "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.self_attn.o_proj.bias": [8],
    "model.layers.0.mlp.router.weight": [3, 8],
    "model.layers.0.mlp.router.bias": [3],
    "model.layers.0.mlp.experts.w13_weight": [3, 6, 8],
    "model.layers.0.mlp.experts.w13_weight_bias": [3, 6],
    "model.layers.0.mlp.experts.w2_weight": [3, 8, 3],
    "model.layers.0.mlp.experts.w2_weight_bias": [3, 8],
}


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_with_biases_have_the_parameters_of_sglang(rank):
    """Gates and ups alternate in a rank's rows; the ranks' outputs are summed, so one rank has the output's bias."""
    shard = SGLangShard(parse_model_config(SINKS), 2, rank)
    assert shard._shapes(shard._places) == SINKS_IN_SGLANG
    model = Model(SINKS_IN_SGLANG)
    for tensor in model.held.values():
        tensor.data.fill_(7.0)  # a start without weights leaves random ones
    assert shard.views(model).keys() == {param.name for param in shard.params}
    shard.clear_padding(model)
    zeros = {name for name, tensor in model.held.items() if not tensor.any()}
    bias = "model.layers.0.mlp.experts.w2_weight_bias"
    assert zeros == ({bias} if rank else set())
    pieces = {param.name: param.pieces for param in shard.params}
    assert [piece.start for piece in pieces[f"{bias.replace('w2_weight_bias', 'w13_weight')}"]] == [(6 * rank, 0)] * 3
    assert len(pieces[bias]) == (0 if rank else 3)


@pytest.mark.parametrize(
    ("change", "options", "code", "values"),
    [
        ({}, {"device": "cpu"}, "sglang.model-needs-gpu", ["rollout.name=embedded"]),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            {},
            "sglang.quantized-experts",
            ["mxfp4", "megarl convert megatron-to-hf"],
        ),
        (
            {},
            {"server_args": {"moe_runner_backend": "triton_kernel"}},
            "sglang.expert-kernels",
            ["server_args.moe_runner_backend='triton_kernel'", "'triton'"],
        ),
    ],
)
def test_forms_of_experts_that_a_sync_does_not_write_are_refused(change, options, code, values):
    config = parse_model_config(SINKS | change)
    with raises(code, "GptOssForCausalLM", *values):
        check_engine_model("sglang", config, SGLangOptions(**{"device": "cuda", **options}))


def test_experts_with_biases_select_their_kernels():
    config = parse_model_config(SINKS)
    check_engine_model("sglang", config, SGLangOptions(device="cuda", server_args={"moe_runner_backend": "triton"}))
    assert model_arguments(config, {"log_level": "info"}) == {"log_level": "info", "moe_runner_backend": "triton"}
    assert model_arguments(parse_model_config(LATENT), {}) == {}


DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32}
OLMO3 = DENSE | WINDOW | {
    "architectures": ["Olmo3ForCausalLM"],
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}},
}  # fmt: skip
GEMMA3 = DENSE | WINDOW | {"architectures": ["Gemma3ForCausalLM"]}
OLMOE = DENSE | {"architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("fields", "options", "code", "values"),
    [
        (GEMMA3, {"tensor_parallel_size": 2}, "sglang.gemma-ranks", ["over 2 ranks"]),
        (OLMOE | {"num_key_value_heads": 4}, {"tensor_parallel_size": 2}, "sglang.olmoe-ranks", ["here 2"]),
        (OLMOE, {}, "sglang.olmoe-ranks", ["num_key_value_heads=2", "num_attention_heads=4"]),
        (OLMO3, {"url": "http://host:30000"}, "sglang.layer-rope", ["urls", "rope_parameters", "full_attention"]),
        (
            LLAMA | {"rope_parameters": YARN | {"attention_factor": 1.5}},
            {},
            "sglang.yarn-factor",
            ["attention_factor=1.5", "1.20794", "rollout.name=embedded"],
        ),
    ],
    ids=["embedding", "norms over ranks", "norms over heads", "positions of a server", "factor of YaRN"],
)
def test_what_sglang_computes_otherwise_is_refused(fields, options, code, values):
    with raises(code, fields["architectures"][0], *values, error=ModelError):
        check_engine_model("sglang", parse_model_config(fields), SGLangOptions(device="cuda", **options))


def test_sglang_gets_the_rotary_embedding_of_full_attention():
    """OLMo 3's own config has one for all layers, and needs no replacement."""
    config = parse_model_config(OLMO3)
    check_engine_model("sglang", config, SGLangOptions(device="cuda"))
    users = {"json_model_override_args": '{"max_position_embeddings": 64}'}
    fields = json.loads(model_arguments(config, users)["json_model_override_args"])
    assert fields == {"max_position_embeddings": 64, "rope_parameters": YARN}
    scaling = {"rope_theta": 5e5, "rope_scaling": YARN | {"attention_factor": 1.2079441541679836}}
    plain = parse_model_config({k: v for k, v in OLMO3.items() if k != "rope_parameters"} | scaling)
    check_engine_model("sglang", plain, SGLangOptions(device="cuda", url="http://host:30000"))
    assert model_arguments(plain, {}) == model_arguments(parse_model_config(GEMMA3), {}) == {}


def test_decays_that_sglang_holds_in_float32_are_compared():
    """The other parameters must have the sent dtype."""
    sent = torch.randn(3).bfloat16()
    for name, is_compared in (("model.layers.0.linear_attn.A_log", True), ("model.norm.weight", False)):
        rank, part = loader.RankLoader(), ParamRectangle(name, (0,), (3,), (0,), (3,), "bfloat16")
        rank._shard = SimpleNamespace(views=lambda model, name=name: {name: sent.float()})
        if is_compared:
            assert rank.sums(None, [part]) == [rectangle_checksum(sent, (0,))]
        else:
            with raises("sync.verify-dtype", name):
                rank.sums(None, [part])


def test_without_a_latent_of_queries_nothing_is_fused():
    model = sglang_model(SGLangShard(parse_model_config(LATENT | {"q_lora_rank": None}), 1, 0))
    attention = {
        name.removeprefix("model.layers.1.self_attn."): t.shape for name, t in model.held.items() if "1.self" in name
    }
    assert attention["q_proj.weight"] == (8, 8) and attention["kv_a_proj_with_mqa.weight"] == (6, 8)
    assert not any("fused" in name for name in model.held)


def test_an_indivisible_size_is_named(make_folder):
    with raises("layout.engine-ranks", "rollout.tensor_model_parallel_size=3", error=ConfigError):
        _check_divides(read_model_config(make_folder()), 3)
    with raises("layout.engine-ranks", "vocabulary", "64 rows"):
        _check_divides(read_model_config(make_folder(hidden_size=48, num_attention_heads=3, num_key_value_heads=3)), 3)
    options = EngineOptions(device="cuda", tensor_parallel_size=4)
    with raises("layout.rollout-heads", "num_attention_heads", "of 4", "DeepseekV3ForCausalLM has 2"):
        check_engine_model("sglang", parse_model_config(LATENT), options)
    check_engine_model("sglang", parse_model_config(LATENT | {"num_attention_heads": 4}), options)


@pytest.mark.parametrize(
    "args", [{"ep_size": 2}, {"quantization": "fp8"}, {"moe_a2a_backend": "deepep"}, {"enable_dp_attention": True}]
)
def test_arguments_that_change_the_ranks_parameters_are_refused(args):
    (name,) = args
    with raises("sglang.parameter-argument", f"server_args.{name}={args[name]!r}"):
        check_server_args(args)


def test_sizes_padded_by_sglang_on_a_cpu_are_refused(make_folder):
    config = read_model_config(make_folder(intermediate_size=96))
    check_engine_model("sglang", config, EngineOptions())
    check_engine_model("sglang", config, EngineOptions(device="cuda", tensor_parallel_size=2))
    with pytest.raises(ModelError) as caught:
        check_engine_model("sglang", config, EngineOptions(tensor_parallel_size=2))
    assert str(caught.value) == (
        "rollout engine 'sglang' on a CPU over 2 ranks needs intermediate_size to be a multiple of 64, "
        "Qwen2ForCausalLM has 96: SGLang would hold padded weights there [sglang.cpu-padding]"
    )


def test_ranks_of_a_replica_have_consecutive_devices():
    assert [EngineOptions(device="cuda", tensor_parallel_size=2).device_of(rank) for rank in (0, 1)] == [
        "cuda:0",
        "cuda:1",
    ]
    assert EngineOptions(device="cuda:2").device_of(1) == "cuda:3"
    assert EngineOptions().device_of(1) == "cpu"


class TestLoader:
    """The loader on a plain torch module, in a thread as if SGLang had called it; commands use a real connection."""

    @pytest.fixture
    def ask(self, make_folder, monkeypatch):
        monkeypatch.setattr(loader, "_LOADER", loader.RankLoader())
        shard = SGLangShard(read_model_config(make_folder()), 1, 0)
        model = sglang_model(shard)
        channel, (rank,) = channel_to_ranks(1, model)

        def ask(action, *arguments):
            (reply,) = channel.exchange([pickle.dumps((action, arguments))], CallWatch(action, 30.0))
            if reply.error:
                raise WeightSyncError(reply.error, code=reply.code)
            return reply.values

        ask.model, ask.shard = model, shard
        yield ask
        channel.close()
        rank.join(60)
        assert not rank.is_alive()

    def test_a_sync_reaches_the_parameters(self, ask, make_folder):
        folder = make_folder(seed=1)
        assert ProcessLocation(*ask("attach", ask.shard)).node == current_location().node
        weight_map = WeightMap(ask.shard.config)
        (part,) = receiver_plans(build_plan(weight_map, LAYOUT, RolloutLayout(vocab_multiple=64), 9000, 4))
        tensors = dict(load_local(HFReader(folder), weight_map.megatron_params(LAYOUT, 0), torch.float32))
        routes = Routes([current_location()], [current_location()])
        peers = PeerTransports.for_sender(routes, 0, [0], torch.device("cpu"), None)
        whole = build_plan(weight_map, LAYOUT, RolloutLayout(vocab_multiple=64), 9000, 4)
        sender = BucketSender(whole, 0, lambda: tensors, peers, torch.float32, torch.device("cpu"))
        ask("connect", ReceiverSpec(part, routes, None, "float32"))
        ask("begin", 4)
        ask("open", 0, None)
        for index in range(len(whole.buckets)):
            ask("bucket", index, list(sender.export_bucket(index).values()))
        assert ask("close", True) == [0]
        ask("end", 4)
        expected = dict(load_local(HFReader(folder), ask.shard.params, torch.float32))
        assert ask("checksum") == {name: tensor_checksum(t) for name, t in expected.items()}
        head = ask.model.held["lm_head.weight"].data
        assert torch.equal(head[:50], expected["lm_head.weight"]) and (head[50:] == 0).all()
        part = ParamRectangle("model.norm.weight", (1,), (2,), (7,), (2,), "float32")
        assert ask("sums", [part]) == [rectangle_checksum(expected["model.norm.weight"][1:3], (7,))]
        with raises("sync.verify-dtype", "'model.norm.weight'", "float32"):
            ask("sums", [part._replace(dtype="bfloat16")])

    def test_errors_are_replies(self, ask):
        with raises("sglang.not-attached"):
            ask("checksum")
        ask("attach", ask.shard)
        with raises("sync.no-receivers"):
            ask("bucket", 0, [])
        with raises("sync.rank-failed", "KeyError: 'unknown'"):
            ask("sums", [ParamRectangle("unknown", (1,), (2,), (7,), (2,), "float32")])

    def test_groups_with_training_ranks_use_the_interface_of_the_engine(self, ask, monkeypatch):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        seen = []
        peers = SimpleNamespace(open=lambda session: seen.append(os.environ["GLOO_SOCKET_IFNAME"]))
        loader._LOADER._receiver = SimpleNamespace(peers=peers)
        ask("open", 0, "eth7")
        ask("open", 1, None)
        assert seen == ["eth7", "lo"] and os.environ["GLOO_SOCKET_IFNAME"] == "lo"


class TestCommandChannel:
    def test_a_wait_for_ranks_ends_with_the_call_of_sglang(self):
        channel = CommandChannel()
        channel.invite(2)
        with raises("sglang.engine-lost", "'x': it ended", error=EngineLost):
            channel.accept(2, CallWatch("x", 30.0, lambda: "it ended").check)
        channel.close()

    def test_replies_have_the_order_of_the_ranks(self, monkeypatch):
        monkeypatch.setattr(loader, "_LOADER", SimpleNamespace(echo=lambda model, value: value))
        channel, ranks = channel_to_ranks(3)
        watch = CallWatch("echo", 120.0)
        for turn in range(2):
            replies = channel.exchange([pickle.dumps(("echo", (10 * turn + rank,))) for rank in range(3)], watch)
            assert replies == [Reply(10 * turn + rank) for rank in range(3)]
        channel.close()
        for rank in ranks:
            rank.join(60)
            assert not rank.is_alive()

    def test_ranks_of_an_earlier_call_are_not_taken_for_those_of_the_next_one(self, monkeypatch):
        monkeypatch.setattr(loader, "_LOADER", SimpleNamespace(echo=lambda model, value: value))
        channel, (early,) = channel_to_ranks(1)
        invitations = channel.invite(1)
        early.join(60)
        assert not early.is_alive() and not channel.is_open
        (rank,) = start_ranks(invitations)
        channel.accept(1, CallWatch("x", 120.0).check)
        ((text, empty),) = pickle.loads(invitations[0])
        call = json.loads(text)
        late = threading.Thread(
            target=loader.load, args=(None, [(json.dumps(call | {"call_id": call["call_id"] - 1}), empty)])
        )
        late.start()
        late.join(60)
        assert not late.is_alive() and rank.is_alive()
        assert channel.exchange([pickle.dumps(("echo", (5,)))], CallWatch("x", 120.0)) == [Reply(5)]
        channel.close()

    def test_a_client_that_stands_still_or_sends_nonsense_keeps_no_rank_out(self, monkeypatch):
        monkeypatch.setattr(loader, "_LOADER", SimpleNamespace(echo=lambda model, value: value))
        channel = CommandChannel()
        address, key = tuple(channel.to["address"]), bytes.fromhex(channel.to["key"])
        invitations = channel.invite(1)
        with socket.create_connection(address), socket.create_connection(address) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for head in (b"[]", b"{}", b"?"):
                with Client(address, authkey=key) as client:
                    client.send_bytes(head)
            start_ranks(invitations)
            channel.accept(1, CallWatch("x", 120.0).check)
            assert channel.exchange([pickle.dumps(("echo", (5,)))], CallWatch("x", 120.0)) == [Reply(5)]
        channel.close()

    def test_closing_does_not_wait_for_a_thread_that_accepts_nothing_more(self, monkeypatch):
        at_work = threading.Event()

        def take(channel, connection):
            at_work.set()
            while not channel._closed:
                time.sleep(0.01)
            connection.close()

        monkeypatch.setattr(CommandChannel, "_take", take)
        channel = CommandChannel()
        with Client(tuple(channel.to["address"]), authkey=bytes.fromhex(channel.to["key"])):
            assert at_work.wait(60)
            closing = threading.Thread(target=channel.close, daemon=True)
            closing.start()
            closing.join(60)
            assert not closing.is_alive()

    def test_a_rank_that_does_not_reply_is_sent_away(self, monkeypatch):
        resumed = threading.Event()
        monkeypatch.setattr(loader, "_LOADER", SimpleNamespace(wait=lambda model: resumed.wait(30)))
        channel, (rank,) = channel_to_ranks(1)
        with raises("sglang.call-timeout", "'wait'", "0.2 s", error=EngineLost):
            channel.exchange([pickle.dumps(("wait", ()))], CallWatch("wait", 0.2))
        channel.hang_up()
        resumed.set()
        rank.join(60)
        assert not rank.is_alive() and not channel.is_open
        channel.close()

    def test_a_rank_that_reads_nothing_is_lost(self):
        """As a stopped process, with a command that exceeds the buffers of the connection."""
        channel = CommandChannel(send_timeout_s=0.5)
        ((text, _),) = pickle.loads(channel.invite(1)[0])
        call = json.loads(text)
        with Client(tuple(call["address"]), authkey=bytes.fromhex(call["key"])) as rank:
            rank.send_bytes(json.dumps({"call_id": call["call_id"], "rank": 0}).encode())
            channel.accept(1, CallWatch("x", 120.0).check)
            with pytest.raises(OSError, match="temporarily unavailable"):
                channel.exchange([bytes(2**26)], CallWatch("x", 120.0))
        channel.close()

    def test_a_rank_takes_no_commands_from_an_engine_without_the_key(self, monkeypatch):
        """A rank unpickles commands, and so executes code of their sender."""
        ran = []
        monkeypatch.setattr(loader, "_LOADER", SimpleNamespace(run=lambda model: ran.append(1)))
        channel = CommandChannel()
        (invitation,) = channel.invite(1)
        ((text, empty),) = pickle.loads(invitation)
        call = json.loads(text) | {"key": "00" * 32}
        loader.load(None, [(json.dumps(call), empty)])
        with raises("sglang.call-timeout"):
            channel.accept(1, CallWatch("x", 0.0).check)
        start_ranks([invitation])  # the channel still accepts the real rank
        channel.accept(1, CallWatch("x", 120.0).check)
        channel.close()
        loader.load(None, [(text, empty)])  # nobody listens any more
        assert not ran


def start_ranks(invitations, model=None):
    """Call the loader in a thread per rank, with the arguments that SGLang would pass on."""
    ranks = [
        threading.Thread(target=loader.load, args=(model, pickle.loads(call)), daemon=True) for call in invitations
    ]
    for rank in ranks:
        rank.start()
    return ranks


def channel_to_ranks(count, model=None):
    channel = CommandChannel()
    ranks = start_ranks(channel.invite(count), model)
    channel.accept(count, CallWatch("x", 120.0).check)
    return channel, ranks


def test_address_for_ranks_on_another_host(monkeypatch):
    assert channel_addresses("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "192.0.2.1")  # of a translating gateway, not of this machine
    assert channel_addresses("127.0.0.1") == ("192.0.2.1", "127.0.0.1")
    channel = CommandChannel("127.0.0.1")
    assert channel.to["address"][0] == "192.0.2.1" and channel._listener.address[0] == "127.0.0.1"
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "gateway.invalid")
    assert channel_addresses("127.0.0.1") == ("gateway.invalid", "127.0.0.1")
    own = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family == socket.AF_INET]
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", own[-1])
    assert channel_addresses("127.0.0.1") == (own[-1], own[-1])
    channel.close()


def response_of(pairs, kind="length", **meta):
    meta = {"output_token_logprobs": [(p, t, None) for t, p in pairs], "finish_reason": {"type": kind}, **meta}
    return {"output_ids": [t for t, _ in pairs], "meta_info": meta}


REQUEST = Request("r", [1, 2], SamplingParams(3), 5)
READING = ResponseContext(frozenset({7}), 4)


def test_a_response_of_several_weight_versions():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    done = parse_completion(REQUEST, response_of([(5, -1.0), (6, -2.0), (8, -0.5)], weight_versions=spans), READING)
    assert (done.token_ids, done.log_probs) == ([5, 6, 8], [-1.0, -2.0, -0.5])
    assert (done.weight_version, done.weight_versions, done.finish_reason) == (3, (3, 3, 4), "length")
    plain = parse_completion(REQUEST, response_of([(5, -1.0)] * 3, weight_version="2"), READING)
    assert (plain.weight_version, plain.weight_versions) == (2, ())


EXPERTS = Experts(count=9, per_token=2, ffn_hidden_size=4, layers=(False, True, True))


def encoded(routes):
    return base64.b64encode(routes.astype(np.int32).tobytes()).decode()


def test_routes_are_decoded_without_dense_layers():
    """SGLang's field has all layers, and the tokens from the requested one to the last but one."""
    request = replace(REQUEST, routes_from=1)
    payload = request_payload(request, "x-1", frozenset({7}), 0)
    assert payload["return_routed_experts"] and payload["routed_experts_start_len"] == 1
    assert "return_routed_experts" not in request_payload(REQUEST, "x-1", frozenset({7}), 0)
    routes = np.arange(3 * 3 * 2).reshape(3, 3, 2) % 9
    response = response_of([(5, -1.0)] * 3, routed_experts=encoded(routes))
    done = parse_completion(request, response, READING._replace(experts=EXPERTS))
    assert done.routes.dtype == np.int16 and np.array_equal(done.routes, routes[:, 1:])
    assert parse_completion(REQUEST, response, READING).routes is None


@pytest.mark.parametrize(
    ("routes", "code", "value"),
    [
        (None, "sglang.no-routes", "enable_return_routed_experts=true"),
        (np.zeros((2, 3, 2)), "sglang.malformed-routes", "12 experts, expected [3, 3, 2]"),
        (np.full((3, 3, 2), 9), "sglang.malformed-routes", "9 to 9 of 9"),
    ],
)
def test_missing_and_impossible_routes_are_errors(routes, code, value):
    response = response_of([(5, -1.0)] * 3, routed_experts=None if routes is None else encoded(routes))
    with raises(code, "request 'r'", value, error=RolloutError):
        parse_completion(replace(REQUEST, routes_from=1), response, READING._replace(experts=EXPERTS))


SUPPORTED = replace(REQUEST, params=SamplingParams(3, top_p=0.9, support=12))


def test_a_support_is_requested_with_room_for_tokens_of_equal_probability():
    payload = request_payload(SUPPORTED, "x-1", frozenset({7}), 50)
    assert payload["return_sampling_mask"] and payload["sampling_params"]["top_k"] == 4
    narrow = replace(SUPPORTED, params=SamplingParams(3, top_k=2, support=10))
    assert request_payload(narrow, "x-1", frozenset({7}), 0)["sampling_params"]["top_k"] == 2
    assert "return_sampling_mask" not in request_payload(REQUEST, "x-1", frozenset({7}), 0)


def test_a_support_is_read_with_its_log_probs():
    meta = {
        "output_token_sampling_mask": [[5, 6], [6], [9, 8, 4]],
        "output_token_sampling_logprobs": [-0.25, 0.0, -1.5],
    }
    done = parse_completion(SUPPORTED, response_of([(5, -1.0), (6, -2.0), (8, -3.0)], **meta), READING)
    assert done.log_probs == [-0.25, 0.0, -1.5] and done.token_ids == [5, 6, 8]
    assert done.support.dtype == np.int32
    assert done.support.tolist() == [[5, 6] + [-1] * 10, [6] + [-1] * 11, [9, 8, 4] + [-1] * 9]
    nothing = parse_completion(SUPPORTED, response_of([], "abort"), READING)
    assert nothing.support.shape == (0, 12)


@pytest.mark.parametrize(
    ("sets", "log_probs", "error", "code"),
    [
        (None, None, RolloutError, "sglang.no-support"),
        ([[5]] * 2, [0.0] * 2, RolloutError, "sglang.malformed-support"),
        ([[5], [5], [6]], [0.0] * 3, RolloutError, "sglang.malformed-support"),
        ([[5], [5], list(range(13))], [0.0] * 3, RequestRefused, "sglang.support-too-large"),
        ([[5]] * 3, [0.0, 0.0, float("nan")], RolloutError, "rollout.logprobs-not-finite"),
    ],
)
def test_missing_and_impossible_supports_are_errors(sets, log_probs, error, code):
    meta = {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": log_probs}
    with raises(code, "request 'r'", error=error):
        parse_completion(SUPPORTED, response_of([(5, -1.0)] * 3, **meta), READING)


def test_routes_are_recorded_if_they_are_returned(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.setattr(options, "server_arg_names", lambda: frozenset({"enable_return_routed_experts"}))
    recording = SGLangOptions(return_routes=True)
    assert server_args(str(tmp_path), 64, recording)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in server_args(str(tmp_path), 64, SGLangOptions())


def test_a_stop_token_as_the_last_allowed_one_counts_as_stop():
    assert parse_completion(REQUEST, response_of([(5, -1.0), (6, -1.0), (7, -1.0)]), READING).finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "reason"), [([5, 6, 6], "length"), ([5, 7], "stop"), ([5, 6], "abort"), ([], "abort")]
)
def test_an_abort_after_the_last_token_interrupts_nothing(tokens, reason):
    """Nothing is left to generate, so the response is not submitted again."""
    response = response_of([(token, -1.0) for token in tokens], "abort")
    assert parse_completion(REQUEST, response, READING).finish_reason == reason


@pytest.mark.parametrize(
    ("response", "code", "value"),
    [
        (response_of([(5, float("nan"))] * 3), "rollout.logprobs-not-finite", "'r'"),
        (
            response_of([(5, -1.0)], "stop", finish_reason={"type": "stop", "matched": NAN_STOP}),
            "rollout.logprobs-not-finite",
            "'r'",
        ),
        (response_of([(5, -1.0)] * 2), "sglang.cache-too-small", "2 of max_new_tokens=3"),
        ({**response_of([(5, -1.0)] * 3), "output_ids": [5, 5]}, "sglang.malformed-answer", "2 tokens"),
        (response_of([(5, -1.0)], "error"), "sglang.malformed-answer", "finish_reason 'error'"),
    ],
)
def test_an_inconsistent_response_is_an_error(response, code, value):
    with raises(code, value, error=RolloutError):
        parse_completion(REQUEST, response, READING)


def test_seeds_are_sent_in_deterministic_mode_only():
    seeded = request_payload(REQUEST, "x-1", frozenset({7}), 50)["sampling_params"]
    assert (seeded["sampling_seed"], seeded["top_k"], seeded["stop_token_ids"]) == (5, 50, [7])
    assert "sampling_seed" not in request_payload(REQUEST, "x-1", frozenset({7}), 0)["sampling_params"]


def test_token_filters_are_sent():
    request = replace(REQUEST, params=replace(REQUEST.params, min_p=0.1, repetition_penalty=1.2, top_k=3, top_p=0.5))
    sent = request_payload(request, "x-1", frozenset({7}), 0)["sampling_params"]
    assert [sent[name] for name in ("min_p", "repetition_penalty", "top_k", "top_p")] == [0.1, 1.2, 3, 0.5]
    with raises("sglang.no-min-p", "min_p=0.1", "sglang.deterministic=false", error=RolloutError):
        request_payload(request, "x-1", frozenset({7}), 50)


def test_environment_of_sglangs_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "0,2,4|1,3"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "6|6"
    assert environment(SGLangOptions(device="cuda:1")) == {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # trainers on several nodes: NCCL must reach them
    several = environment(SGLangOptions(device="cuda:1"))
    assert several["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in several
    two_nodes = SGLangOptions(device="cuda:1", server_args={"nnodes": 2})
    assert "GLOO_SOCKET_IFNAME" not in environment(two_nodes), "its ranks are on several machines"


@pytest.mark.parametrize("number", [0, 1])
def test_the_nodes_of_an_engine_meet_at_the_store_of_the_first(number):
    nodes = EngineNodes(("127.0.0.1", "127.0.0.1"), 29500, number)
    options = SGLangOptions(tensor_parallel_size=4, nodes=nodes)
    rendezvous = RankRendezvous(options)
    assert rendezvous.arguments == {"nnodes": 2, "node_rank": number, "dist_init_addr": "127.0.0.1:29500"}
    assert rendezvous.variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "tcp://127.0.0.1:29500"
    assert environment(options)["GLOO_SOCKET_IFNAME"] == "lo"
    assert options.local_ranks == 2
    assert EngineNodes(("::1", "::2"), 5).rendezvous == "[::1]:5"


def test_expandable_segments_are_removed_for_sglang_on_a_gpu_only(monkeypatch):
    """SGLang's memory saver rejects them; other settings of the allocator stay."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    on_gpu = environment(SGLangOptions(device="cuda"))
    assert on_gpu["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512" and on_gpu["PYTORCH_ALLOC_CONF"] == ""
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(environment(SGLangOptions()))


def test_cuda_graphs_sleep_with_the_kv_cache():
    assert _memory_tags({"kv_cache"}) == ["cuda_graph", "kv_cache"]
    assert _memory_tags({"weights"}) == ["weights"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="reads SGLang's argument names")
@pytest.mark.sglang
def test_sampling_needs_no_compiler_on_a_node_without_nvcc(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.setattr(options.shutil, "which", lambda name: None)
    assert server_args(str(tmp_path), 64, SGLangOptions(device="cuda"))["sampling_backend"] == "pytorch"
    monkeypatch.setattr(options.shutil, "which", lambda name: name if name == "/opt/cuda/bin/nvcc" else None)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert "sampling_backend" not in server_args(str(tmp_path), 64, SGLangOptions(device="cuda"))


def murmur3(data):
    """MurmurHash3, 32 bits, seed 0, of whole words, from its definition."""
    low, state = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & low
        word = (word << 15 | word >> 17) & low
        state ^= word * 0x1B873593 & low
        state = (state << 13 | state >> 19) & low
        state = (state * 5 + 0xE6546B64) & low
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_substitute_of_sglangs_seeding_kernel():
    spec = importlib.util.spec_from_file_location("stand_in", SHIM / "sgl_kernel" / "__init__.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    seeds, positions, columns = [0, 1, 2**62 + 12345], [3, 0, 900], [0, 5, 151_000]
    hashes = stand_in.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashes.dtype == torch.uint32
    assert hashes.tolist() == [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    with pytest.raises(NotImplementedError, match="compiled kernel 'convert_weight_packed'"):
        stand_in.convert_weight_packed()
