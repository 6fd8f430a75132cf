"""A trained vision tower for SGLang: its parameters' split and padding, arguments, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.expected_errors import raises

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.hf_config import check_layout
from megarl.rollout import EngineOptions, check_engine_model
from megarl.rollout.sglang import options
from megarl.rollout.sglang.http import _check_server_info
from megarl.rollout.sglang.options import SGLangOptions, server_args
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.sharding.sglang_loader import FEATURE_CACHES, RankLoader, SGLangShard
from megarl.sharding.verification import check_coverage

PUBLISHED = Path(__file__).parent.parent / "ops" / "plan" / "models"
WHOLE = ("norm", "ln_q", "patch_embed", "attn.proj.bias", "down_proj.bias", "fc2.bias", "mlp.2.bias")
"""Parts of the names of a tower's parameters that each of SGLang's ranks has as a whole."""


def published(name, **settings):
    """A published model with settings of its tower; its decoder has few layers, whose heads eight ranks divide."""
    config = read_model_config(PUBLISHED / name).with_trained_tower()
    vision = replace(config.vision, settings=config.vision.settings | settings)
    return replace(config, num_layers=4, num_attention_heads=32, num_key_value_heads=8, vision=vision)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B"])
def test_every_element_of_a_published_tower_reaches_the_engine_once(name, tp):
    """An element is on one rank, or that of a whole parameter on each; a plan writes each rank's part once."""
    weight_map = WeightMap(published(name, depth=2))
    params = {rank: weight_map.rollout_params(tp, rank, vocab_multiple=64) for rank in range(tp)}
    copies = {name: np.zeros(shape[:2], int) for name, shape in weight_map.hf_shapes().items() if "visual" in name}
    for shard in params.values():
        for param in shard:
            for piece in param.pieces if param.name in copies else ():
                assert piece.hf_name == param.name and piece.shape[2:] == param.shape[2:]
                copies[param.name][tuple(map(slice, piece.start[:2], piece.stop[:2]))] += 1
    assert len(copies) == (30 if "2.5" in name else 51)
    for param, count in copies.items():
        assert (count == (tp if any(part in param for part in WHOLE) else 1)).all(), param
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    check_coverage(build_plan(weight_map, layout, RolloutLayout(tp=tp, vocab_multiple=64), 2**28, 2), params)


MERGERS = {"merger": 1152} | {f"deepstack_merger_list.{n}": 4608 for n in range(3)}
# Shapes of SGLang 0.5.23's classes on the second of two ranks.
SHAPES = {
    "Qwen2.5-VL-7B": {
        "patch_embed.proj.weight": [1280, 3, 2, 14, 14],
        **{f"blocks.31.norm{n}.weight": [1280] for n in (1, 2)},
        "blocks.31.attn.qkv_proj.weight": [3 * 8 * 80, 1280],
        "blocks.31.attn.qkv_proj.bias": [3 * 8 * 80],
        "blocks.31.attn.proj.weight": [1280, 8 * 80],
        "blocks.31.attn.proj.bias": [1280],
        "blocks.31.mlp.gate_up_proj.weight": [2 * 1712, 1280],
        "blocks.31.mlp.gate_up_proj.bias": [2 * 1712],
        "blocks.31.mlp.down_proj.weight": [1280, 1712],
        "blocks.31.mlp.down_proj.bias": [1280],
        "merger.ln_q.weight": [1280],
        "merger.mlp.0.weight": [2560, 5120],
        "merger.mlp.0.bias": [2560],
        "merger.mlp.2.weight": [3584, 2560],
        "merger.mlp.2.bias": [3584],
    },
    "Qwen3-VL-8B": {
        "patch_embed.proj.weight": [1152, 3, 2, 16, 16],
        "patch_embed.proj.bias": [1152],
        "pos_embed.weight": [1152, 1152],
        **{f"blocks.26.norm{n}.{part}": [1152] for n in (1, 2) for part in ("weight", "bias")},
        "blocks.26.attn.qkv_proj.weight": [3 * 8 * 72, 1152],
        "blocks.26.attn.qkv_proj.bias": [3 * 8 * 72],
        "blocks.26.attn.proj.weight": [1152, 8 * 72],
        "blocks.26.attn.proj.bias": [1152],
        "blocks.26.mlp.linear_fc1.weight": [2152, 1152],
        "blocks.26.mlp.linear_fc1.bias": [2152],
        "blocks.26.mlp.linear_fc2.weight": [1152, 2152],
        "blocks.26.mlp.linear_fc2.bias": [1152],
        **{f"{m}.norm.{part}": [size] for m, size in MERGERS.items() for part in ("weight", "bias")},
        **{f"{m}.linear_fc1.weight": [2304, 4608] for m in MERGERS},
        **{f"{m}.linear_fc1.bias": [2304] for m in MERGERS},
        **{f"{m}.linear_fc2.weight": [4096, 2304] for m in MERGERS},
        **{f"{m}.linear_fc2.bias": [4096] for m in MERGERS},
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_parameters_of_published_towers_are_those_of_sglang(name):
    shard, last = SGLangShard(published(name), 2, 1), f"blocks.{31 if '2.5' in name else 26}."
    tower = {n.removeprefix("visual."): shape for n, shape in shard._shapes(shard._places).items() if "visual" in n}
    assert {n: shape for n, shape in tower.items() if not n.startswith("blocks.") or n.startswith(last)} == SHAPES[name]


def model_of(shard):
    """A model with SGLang's parameters of a shard."""
    shapes = shard._shapes(shard._places)
    parameters = {name: torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in shapes.items()}
    return SimpleNamespace(named_parameters=parameters.items, parameters=lambda: iter(parameters.values()))


def small(name, **settings):
    """A published model with a small decoder, and a tower of one block."""
    sizes = {"hidden_size": 64, "head_dim": 32, "ffn_hidden_size": 64, "vocab_size": 128}
    return replace(published(name, **{"depth": 1, "hidden_size": 32, "num_heads": 4, **settings}), **sizes)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projections_are_fused_with_padding_between_them(tp):
    """SGLang pads a width of 20 to 24, and each rank has its rows of the gate before those of the up projection."""
    config = small("Qwen2.5-VL-7B", intermediate_size=20)
    gate, up, down = torch.randn(20, 32), torch.randn(20, 32), torch.randn(32, 20)
    padded, columns = torch.zeros(2, 24, 32), torch.zeros(32, 24)
    padded[0, :20], padded[1, :20], columns[:, :20] = gate, up, down
    for rank in range(tp):
        shard, share = SGLangShard(config, tp, rank), 24 // tp
        rows = slice(rank * share, (rank + 1) * share)
        model, block = model_of(shard), "visual.blocks.0.mlp."
        views = shard.views(model)
        views[block + "gate_proj.weight"].copy_(gate[rows])
        views[block + "up_proj.weight"].copy_(up[rows])
        views[block + "down_proj.weight"].copy_(down[:, rows])
        shard.clear_padding(model)
        held = dict(model.named_parameters())
        assert torch.equal(held[block + "gate_up_proj.weight"], padded[:, rows].flatten(0, 1))
        assert torch.equal(held[block + "down_proj.weight"], columns[:, rows])
        assert (held[block + "gate_up_proj.bias"] == 0).sum() == 2 * (share - len(gate[rows]))
        assert (held[block + "down_proj.bias"] == -1).all()


def test_positions_are_padded_as_a_vocabulary():
    """Of 64 rows the first 16 have weights: all of them are on the first of two ranks."""
    config = small("Qwen3-VL-8B", num_position_embeddings=16, deepstack_visual_indexes=[0])
    for rank, rows in enumerate([16, 0]):
        shard = SGLangShard(config, 2, rank)
        model = model_of(shard)
        table = dict(model.named_parameters())["visual.pos_embed.weight"]
        assert shard.views(model)["visual.pos_embed.weight"].shape == (rows, 32) and table.shape == (32, 32)
        shard.clear_padding(model)
        assert (table[:rows] == -1).all() and (table[rows:] == 0).all()


@pytest.mark.parametrize(
    ("name", "settings", "tp", "setting"),
    [
        ("Qwen2.5-VL-7B", {"num_heads": 2}, 4, "vision_config.num_heads=2"),
        ("Qwen3-VL-8B", {"intermediate_size": 4308, "num_heads": 8}, 8, "vision_config.intermediate_size=4308"),
    ],
)
def test_ranks_that_do_not_divide_a_trained_tower_are_refused(name, settings, tp, setting):
    config = small(name, **settings)
    layout = ParallelLayout(tp=tp)
    with raises("layout.tp-heads", f"rollout.tensor_model_parallel_size={tp}", setting, error=ConfigError):
        check_layout(config, layout, "rollout", of_engine=True)
    check_layout(config, layout, "actor.megatron")  # the trainer replicates the tower
    check_layout(config.with_trained_tower(False), layout, "rollout", of_engine=True)


def test_ranks_divide_the_padded_width():
    config = small("Qwen2.5-VL-7B", intermediate_size=20, num_heads=8)
    check_layout(config, ParallelLayout(tp=8), "rollout", of_engine=True)
    assert WeightMap(config).rollout_params(8, 7, vocab_multiple=64)


def test_a_width_that_sglang_pads_further_on_a_cpu_is_refused():
    """SGLang needs multiples of 32 on each rank of a CPU: 3420 becomes 3424, which two ranks do not have."""
    config = replace(published("Qwen2.5-VL-7B"), ffn_hidden_size=64)
    check_engine_model("sglang", config, EngineOptions(device="cpu"))
    two = EngineOptions(device="cpu", tensor_parallel_size=2)
    with raises("sglang.cpu-padding", "vision_config.intermediate_size", 3424, error=ModelError):
        check_engine_model("sglang", config, two)
    check_engine_model("sglang", config.with_trained_tower(False), two)


def test_arguments_for_a_trained_tower(monkeypatch):
    """It needs no weights of the folder, and each rank has a part of it."""
    monkeypatch.setattr(options, "server_arg_names", frozenset)
    monkeypatch.setattr(options, "is_installed", lambda name: False)
    folder, trained = str(PUBLISHED / "Qwen2.5-VL-7B"), SGLangOptions(device="cuda", trained_tower=True)
    assert server_args(folder, 64, trained)["load_format"] == "dummy"
    whole = {"server_args": {"mm_enable_dp_encoder": True}}
    with raises("sglang.parameter-argument", "mm_enable_dp_encoder", error=ConfigError):
        server_args(folder, 64, replace(trained, **whole))
    with raises("sglang.parameter-argument", "mm_enable_dp_encoder", error=ConfigError):
        check_engine_model("sglang", published("Qwen2.5-VL-7B"), replace(trained, **whole))
    assert server_args(folder, 64, SGLangOptions(device="cuda", **whole))["load_format"] == "auto"
    info = {"load_format": "dummy", "image_processor_backend": "pil", "mm_enable_dp_encoder": False}
    trained = replace(trained, deterministic=False)
    _check_server_info("http://host:1", info, folder, trained)
    with raises("sglang.server-mismatch", "mm_enable_dp_encoder", error=ConfigError):
        _check_server_info("http://host:1", info | {"mm_enable_dp_encoder": True}, folder, trained)


def test_features_of_images_are_dropped_at_each_update(monkeypatch):
    """The versions of SGLang have them in one of two modules."""
    shard, rank = SGLangShard(small("Qwen2.5-VL-7B", intermediate_size=20), 1, 0), RankLoader()
    model = model_of(shard)
    rank.attach(model, shard)
    rank._receiver = SimpleNamespace(begin=lambda version: None)
    for name in FEATURE_CACHES:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    with raises("sglang.image-features", error=WeightSyncError):
        rank.begin(model, 0)
    for name in FEATURE_CACHES:
        cache = {"image": "features"}
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(embedding_cache=cache))
        rank.begin(model, 1)
        assert not cache


def test_a_trained_tower_is_not_taken_for_that_of_the_folder(monkeypatch):
    """A server that served a run with a trained tower first has no copy of the folder's."""
    monkeypatch.setitem(sys.modules, FEATURE_CACHES[0], SimpleNamespace(embedding_cache={}))
    shard, rank = SGLangShard(small("Qwen2.5-VL-7B", intermediate_size=20), 1, 0), RankLoader()
    model = model_of(shard)
    frozen = replace(shard, config=shard.config.with_trained_tower(False))
    rank.attach(model, shard)
    rank._receiver = SimpleNamespace(begin=lambda version: None)
    rank.begin(model, 1)
    with raises("sglang.trained-tower", error=WeightSyncError):
        rank.attach(model, frozen)
    rank.tower_loaded(model)
    rank.attach(model, frozen)
