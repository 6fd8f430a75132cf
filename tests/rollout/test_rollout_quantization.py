"""Blockwise FP8 in weight updates: the blocks of a quantized folder in every layout, checksums, damage, refusals."""

import copy
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from support.expected_errors import raises
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from weight_syncs import WeightSync, rank_params

from megarl.base.errors import ModelError
from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.models.number_formats import FP8_DTYPE, BlockwiseFP8, dequantize_blocks
from megarl.rollout import EngineOptions, Request, check_engine_model, create_engine
from megarl.rollout.interface import SamplingParams
from megarl.rollout.registry import ENGINES, EngineEntry
from megarl.rollout.sglang.model_checks import check_quantization
from megarl.rollout.sglang.options import quantization_args
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.sharding.quantization import IncomingMatrices
from megarl.sharding.receiver import ShardWeights
from megarl.sharding.sender import source_slice
from megarl.sharding.sglang_loader import SGLangShard
from megarl.sharding.verification import checksums_by_name, compare_checksums, partial_checksums, weight_rectangles

sys.path.append(str(Path(__file__).parents[1] / "sharding"))
from resharding_cases import local_tensors, training_tensors

THEIRS = types.SimpleNamespace(
    quantization_config=types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
)
SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 70, "max_position_embeddings": 64}
MIXED = {
    **SIZES,
    "architectures": ["Qwen2MoeForCausalLM"],
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "mlp_only_layers": [0],
}
LATENTS = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DENSE = {
    **SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
NAMES = {
    "Qwen2MoeForCausalLM": {
        "0.self_attn.qkv_proj.weight",
        "0.self_attn.o_proj.weight",
        "0.mlp.gate_up_proj.weight",
        "0.mlp.down_proj.weight",
        "1.self_attn.qkv_proj.weight",
        "1.self_attn.o_proj.weight",
        "1.mlp.experts.w13_weight",
        "1.mlp.experts.w2_weight",
        "1.mlp.shared_expert.gate_up_proj.weight",
        "1.mlp.shared_expert.down_proj.weight",
    },
    "DeepseekV3ForCausalLM": {
        *(f"{n}.self_attn.{name}.weight" for n in (0, 1) for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
        *(f"{n}.self_attn.{name}.weight" for n in (0, 1) for name in ("kv_b_proj", "o_proj")),
        "0.mlp.gate_up_proj.weight",
        "0.mlp.down_proj.weight",
        "1.mlp.experts.w13_weight",
        "1.mlp.experts.w2_weight",
        "1.mlp.shared_experts.gate_up_proj.weight",
        "1.mlp.shared_experts.down_proj.weight",
    },
}
"""Matrices that SGLang creates with its FP8 method; routers, gates of shared experts and vocabularies have none."""


def quantized_by_transformers(weights):
    """The values that a matrix has after transformers' quantization, on the grid of the whole Hugging Face tensor."""
    rows, columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -columns % 128, 0, -rows % 128))
    codes, scales = Fp8Quantize(THEIRS).convert({"a.weight": padded}).values()
    return Fp8Dequantize(THEIRS)._dequantize_one(codes, scales, weights.dtype)[:rows, :columns]


class Rank:
    """SGLang's parameters on a rank, by name, before any weights."""

    def __init__(self, shard):
        self.shard = shard
        shapes = shard._shapes(shard._places)
        self.held = {}
        for name, shape in shapes.items():
            dtype = FP8_DTYPE if name + "_scale_inv" in shapes else torch.float32
            self.held[name] = torch.nn.Parameter(torch.full(shape, -1.0).to(dtype), requires_grad=False)

    def named_parameters(self):
        return self.held.items()


def receive(config, train, tp, dtype=torch.float32, bucket=20_000):
    """Send a checkpoint with one value per element through the plan to all ranks of an engine in FP8."""
    weight_map = WeightMap(config)
    generator = torch.Generator().manual_seed(1)
    shapes = weight_map.hf_shapes().items()
    checkpoint = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes}
    trainer = training_tensors(weight_map, train, checkpoint)
    plan = build_plan(weight_map, train, RolloutLayout(tp, vocab_multiple=64), bucket, dtype.itemsize, together=True)
    ranks = []
    for number in range(tp):
        rank = Rank(SGLangShard(config, tp, number, quantized=True))
        views = rank.shard.quantized_views(rank, rank.shard.views(rank))
        matrices = IncomingMatrices(rank.shard.params, views.codes.__contains__, views)
        rank.weights = ShardWeights(rank.shard.views(rank), matrices)
        rank.weights.begin(1)
        for received in plan.received_by(number):
            ops = received.ops
            rank.weights.write(
                (op.dst_param, op.dst_start, source_slice(trainer[op.src_rank], op).reshape(op.shape)) for op in ops
            )
        rank.weights.end(1)
        rank.views = views
        ranks.append(rank)
    return weight_map, checkpoint, ranks


def restored(codes, scales):
    """The weights that codes and scales stand for; stacked ones by expert."""
    if codes.dim() == 3:
        return torch.stack([restored(*expert) for expert in zip(codes, scales, strict=True)])
    dequantize_blocks(BlockwiseFP8(codes, scales, torch.tensor(True)), out := torch.empty(codes.shape))
    return out


UNQUANTIZED = ("embed_tokens", "lm_head", ".gate.", "shared_expert_gate")
LAYOUTS = {"tp4": ParallelLayout(tp=4), "tp2-pp2-ep2": ParallelLayout(tp=2, pp=2, ep=2, etp=1)}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fields", [MIXED, LATENTS], ids=["experts", "latents"])
@pytest.mark.parametrize("train", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_has_the_blocks_of_the_quantized_folder(fields, train, tp):
    """Training shards end within blocks: 256 rows over 4 ranks, and tiles of a bucket of 20 kB."""
    _, checkpoint, ranks = receive(parse_model_config(fields), train, tp)
    folder = {
        name: quantized_by_transformers(tensor)
        if tensor.dim() == 2 and not any(part in name for part in UNQUANTIZED)
        else tensor
        for name, tensor in checkpoint.items()
    }
    for rank in ranks:
        names = {name.removeprefix("model.layers.") for name in rank.views.codes}
        assert names == NAMES[fields["architectures"][0]]
        expected = local_tensors(rank.shard.params, folder, 0)
        for name, values in rank.weights.tensors.items():
            if name in rank.views.codes:
                codes, scales = rank.views.codes[name], rank.views.scales[name]
                assert codes.dtype == FP8_DTYPE and scales.dtype == torch.float32
                values = restored(codes, scales)
            assert torch.equal(values, expected[name]), name
        assert rank.weights.peak_bytes and not rank.weights.matrices.nbytes


def test_only_incomplete_matrices_take_memory():
    config = parse_model_config(MIXED | {"num_hidden_layers": 6})
    _, checkpoint, (rank,) = receive(config, ParallelLayout(tp=2), 1, torch.bfloat16)
    sent = sum(tensor.nbytes for tensor in checkpoint.values())
    assert 0 < rank.weights.peak_bytes < sent / 5


def test_a_verified_sync_compares_the_weights_before_their_quantization():
    config = parse_model_config(MIXED)
    weight_map, checkpoint, ranks = receive(config, ParallelLayout(tp=2), 2, torch.bfloat16)
    train = ParallelLayout()
    (whole,) = training_tensors(weight_map, train, checkpoint)
    actor = partial_checksums(weight_map.export_params(train, 0), whole, torch.bfloat16, (), convert=True)

    def engine():
        sums = []
        for rank in ranks:
            params, held = rank.shard.params, rank.weights.tensors
            rank.weights.tensors = {n: t if t.dtype == FP8_DTYPE else t.bfloat16() for n, t in held.items()}
            parts = weight_rectangles(params, torch.bfloat16, ())
            sums.append(checksums_by_name(params, [rank.weights.rectangle_checksum(part) for part in parts]))
        return sums

    compare_checksums([actor], engine(), 2)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    whole["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"][5, 200] += 1.0
    other = partial_checksums(weight_map.export_params(train, 0), whole, torch.bfloat16, (), convert=True)
    with raises("sync.checksum-differs", f"'{name}'"):
        compare_checksums([other], engine(), 2)
    part = weight_rectangles(ranks[0].shard.params, torch.float32, ())[1]
    with raises("sync.verify-dtype", part.name, "float32"):
        ranks[0].weights.matrices.checksum(part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**{**DENSE, "architectures": None}, eos_token_id=1, tie_word_embeddings=False)
    model = transformers.Qwen3ForCausalLM(config)
    path = tmp_path_factory.mktemp("fp8")
    model.save_pretrained(path)
    return path


def fp8_engine(folder, **options):
    return create_engine("embedded", str(folder), EngineOptions(quantization="fp8", **options))


def test_the_embedded_engine_computes_with_the_weights_of_a_quantized_model(folder):
    """Its log-probs are those of transformers with every linear layer, except the output layer, quantized."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(quantized_by_transformers(module.weight))
    engine = fp8_engine(folder)
    assert WeightSync(engine, folder, bucket_bytes=30_000).run(1)[0].peak_bytes == 0
    synced = engine.checksum()
    answer = engine.generate([Request("a", [2, 3, 5, 7], SamplingParams(12, ignore_eos=True), seed=0)])[0]

    def log_probs(reference):
        ids = torch.tensor([[2, 3, 5, 7, *answer.token_ids]])
        with torch.no_grad():
            rows = reference(ids).logits[0, 3:-1].double().log_softmax(-1)
        return rows[torch.arange(12), torch.tensor(answer.token_ids)]

    ours = torch.tensor(answer.log_probs, dtype=torch.float64)
    assert (ours - log_probs(model)).abs().max() < 1e-5
    assert 1e-4 < (ours - log_probs(exact)).abs().max() < 0.2
    engine.load_hf(str(folder), version=2)
    assert engine.checksum() == synced


def test_the_embedded_engines_checksums_are_those_of_the_sent_weights(folder):
    engine = fp8_engine(folder)
    sync = WeightSync(engine, folder)
    sync.run(1)
    (params,) = rank_params(engine)
    weight_map = WeightMap(engine.config)
    actor = partial_checksums(
        weight_map.export_params(ParallelLayout(), 0), sync.tensors, torch.float32, (), convert=True
    )
    (sums,) = engine.rectangle_checksums([weight_rectangles(params, torch.float32, ())])
    compare_checksums([actor], [checksums_by_name(params, sums)], 1)


@pytest.mark.parametrize(
    "damage",
    [
        float("nan"),
        pytest.param(
            float("inf"),
            marks=pytest.mark.release(
                twin="tests/rollout/test_rollout_quantization.py::test_weights_that_are_not_finite_are_refused_by_name"
            ),
        ),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(folder, damage):
    engine = fp8_engine(folder)
    sync = WeightSync(engine, folder)
    sync.tensors["decoder.layers.1.mlp.linear_fc2.weight"][200, 300] = damage
    sync.begin(1)
    sync.send()
    sync.close()
    with raises("sync.weights-not-finite", "version 1: 'model.layers.1.mlp.down_proj.weight'", "=fp8", "1 of 8"):
        engine.receiver.end(1)
    assert engine.stale


@pytest.mark.parametrize(
    ("fields", "options", "code", "values"),
    [
        ({}, {"device": "cpu"}, "sglang.fp8-cpu", ["rollout.name=embedded"]),
        ({}, {"dtype": "float32"}, "sglang.fp8-dtype", ["rollout.dtype=float32", "dtype=bfloat16"]),
        ({}, {"tensor_parallel_size": 4}, "rollout.fp8-blocks", ["v_proj.weight' on rank 0", 192, "_size=1 or 2"]),
        ({"intermediate_size": 500}, {}, "rollout.fp8-blocks", ["_size=1:", "up_proj.weight' on rank 0", "null"]),
    ],
)
def test_what_sglang_cannot_hold_in_fp8_is_refused(fields, options, code, values):
    config = parse_model_config(DENSE | fields)
    options = EngineOptions(**{"device": "cuda", "dtype": "bfloat16", "quantization": "fp8", **options})
    with raises(code, "quantization=fp8", *values, error=ModelError):
        check_engine_model("sglang", config, options)


def test_models_whose_blocks_divide_are_accepted():
    options = EngineOptions(device="cuda", dtype="bfloat16", quantization="fp8", tensor_parallel_size=2)
    for fields in (DENSE, MIXED, LATENTS):
        check_engine_model("sglang", parse_model_config(fields), options)
    with raises("sglang.fp8-latent", "q_lora_rank=64", "DeepseekV3ForCausalLM", 128):
        check_engine_model("sglang", parse_model_config(LATENTS | {"q_lora_rank": 64}), options)


def test_sglang_does_not_quantize_experts_with_biases():
    raw = json.loads(
        (Path(__file__).parents[1] / "ops/plan/models/gpt-oss-20b/config.json").read_text(encoding="utf-8")
    )
    options = EngineOptions(device="cuda", dtype="bfloat16", quantization="fp8")
    with raises("sglang.fp8-model", "experts with biases", "GptOssForCausalLM"):
        check_quantization(parse_model_config(raw), options)


def test_an_engine_that_does_not_quantize_is_refused(monkeypatch):
    monkeypatch.setitem(ENGINES._entries, "mine", EngineEntry(lambda path, options: None, None))
    with raises("rollout.quantization-unsupported", "quantization=fp8", "rollout.name=mine"):
        check_engine_model("mine", parse_model_config(DENSE), EngineOptions(quantization="fp8"))


def quantized_views(rank):
    return rank.shard.quantized_views(rank, rank.shard.views(rank))


def test_other_formats_in_sglang_are_refused_by_name():
    rank = Rank(SGLangShard(parse_model_config(DENSE), 1, 0, quantized=True))
    name = "model.layers.0.mlp.down_proj.weight"
    rank.held["model.layers.0.self_attn.attn.k_scale"] = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    quantized_views(rank)
    scales = rank.held[name + "_scale_inv"]
    rank.held[name + "_scale_inv"] = torch.nn.Parameter(scales.int(), requires_grad=False)
    with raises("sglang.fp8-scales", f"'{name}'", "torch.int32", "server_args.fp8_gemm_runner_backend"):
        quantized_views(rank)
    rank.held[name + "_scale_inv"] = scales
    rank.held[name] = torch.nn.Parameter(torch.zeros(rank.held[name].shape), requires_grad=False)
    with raises("sglang.fp8-codes", f"'{name}'", "torch.float32"):
        quantized_views(rank)


def test_sglang_starts_with_the_quantization_of_a_deepseek_folder():
    arguments = quantization_args({"json_model_override_args": '{"rope_theta": 5}'})
    assert arguments["quantization"] == "fp8"
    overrides = json.loads(arguments["json_model_override_args"])
    assert overrides["rope_theta"] == 5
    ours = overrides["quantization_config"]
    theirs = transformers.FineGrainedFP8Config().to_dict()
    assert ours["activation_scheme"] == theirs["activation_scheme"]
    assert ours["weight_block_size"] == list(theirs["weight_block_size"])
    assert ours["quant_method"] == theirs["quant_method"].value and ours["fmt"] == "e4m3"
    with raises("sglang.config-overrides", "json_model_override_args='x'"):
        quantization_args({"json_model_override_args": "x"})
