from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_weights import assemble, labelled_checkpoint, megatron_reference, rollout_reference, tiny_config

from megarl.models import ParallelLayout, WeightMap, canonical_name


@st.composite
def models_and_layouts(draw):
    tp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    groups = tp * draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    config = tiny_config(
        draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        layers=pp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 7)),
        ffn=tp * draw(st.integers(1, 3)),
        heads=heads,
        groups=groups,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        vocab=draw(st.integers(1, 140)),
        tied=draw(st.booleans()),
    )
    return config, ParallelLayout(tp, pp, dp)


def equal(params, reference, checkpoint):
    assert Counter(p.name for p in params) == Counter(list(reference))
    for param in params:
        assert param.shape == reference[param.name].shape, param.name
        np.testing.assert_array_equal(assemble(param, checkpoint), reference[param.name], err_msg=param.name)


@settings(max_examples=40)
@given(models_and_layouts(), st.booleans())
def test_training_shards_equal_whole_tensor_reshapes(case, value_head):
    config, layout = case
    weight_map = WeightMap(config, value_head)
    checkpoint = labelled_checkpoint(weight_map.hf_shapes())
    padded = weight_map.padded_vocab(layout.tp)
    for rank in range(layout.world_size):
        reference = megatron_reference(checkpoint, config, layout, rank, padded, value_head)
        equal(weight_map.megatron_params(layout, rank), reference, checkpoint)


@settings(max_examples=40)
@given(models_and_layouts())
def test_rollout_shards_equal_whole_tensor_reshapes(case):
    config, layout = case
    weight_map = WeightMap(config)
    checkpoint = labelled_checkpoint(weight_map.hf_shapes())
    for tp_rank in range(layout.tp):
        reference = rollout_reference(checkpoint, config, layout.tp, tp_rank)
        equal(weight_map.rollout_params(layout.tp, tp_rank), reference, checkpoint)


@pytest.mark.parametrize(("groups", "tp"), [(2, 4), (1, 4), (2, 8), (4, 2)])
def test_engine_ranks_share_key_value_heads(groups, tp):
    config = tiny_config(heads=8, groups=groups)
    weight_map = WeightMap(config)
    checkpoint = labelled_checkpoint(weight_map.hf_shapes())
    for kind in ("weight", "bias"):
        name = "model.layers.1.self_attn.{}_proj." + kind
        q, k, v = (
            checkpoint[name.format(part)].reshape(heads, 2, -1)
            for part, heads in zip("qkv", (8, groups, groups), strict=True)
        )
        for tp_rank in range(tp):
            heads = range(tp_rank * 8 // tp, (tp_rank + 1) * 8 // tp)
            # A rank holds the key-value heads that its query heads attend to.
            mine = sorted({head // (8 // groups) for head in heads})
            (param,) = (p for p in weight_map.rollout_params(tp, tp_rank) if p.name == name.format("qkv"))
            expected = np.concatenate([q[heads], k[mine], v[mine]]).reshape(param.shape)
            np.testing.assert_array_equal(assemble(param, checkpoint), expected)


def test_layout_that_does_not_divide_the_model_is_rejected():
    weight_map = WeightMap(tiny_config(heads=6, groups=3))
    with pytest.raises(ValueError, match="3 key-value heads do not divide over 2 ranks"):
        weight_map.rollout_params(2, 0)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\..*' of shape \[.*\] does not divide into 5 shards"):
        WeightMap(tiny_config(heads=5, groups=5)).rollout_params(5, 0)


@settings(max_examples=40)
@given(models_and_layouts(), st.booleans())
def test_export_has_each_element_exactly_once(case, value_head):
    config, layout = case
    weight_map = WeightMap(config, value_head)
    seen = {name: np.zeros(shape, dtype=int) for name, shape in weight_map.hf_shapes().items()}
    for rank in range(layout.world_size):
        held = {p.name: p for p in weight_map.megatron_params(layout, rank)}
        for param in weight_map.export_params(layout, rank):
            assert param == held[param.name]
            for piece in param.pieces:
                seen[piece.hf_name][tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))] += 1
    for name, count in seen.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_hf_shapes_are_those_of_the_real_model(family, tied, real_model_folder):
    from safetensors.torch import load_file

    from megarl.models import read_model_config

    folder = real_model_folder(family, tied)
    real = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert WeightMap(read_model_config(folder)).hf_shapes() == real


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(500, 1, 512), (500, 2, 512), (512, 2, 512), (513, 2, 544), (1, 4, 64)]
)
def test_vocabulary_is_padded_to_a_multiple_of_16_per_rank(vocab, tp, padded):
    assert WeightMap(tiny_config(vocab=vocab)).padded_vocab(tp) == padded


def test_layer_names_are_global_under_pipeline_parallelism():
    weight_map = WeightMap(tiny_config(layers=6))
    layout = ParallelLayout(tp=1, pp=3, dp=2)
    for stage, layers in enumerate([{"0", "1"}, {"2", "3"}, {"4", "5"}]):
        names = [p.name for p in weight_map.megatron_params(layout, layout.rank(dp=1, pp=stage))]
        assert {n.split(".")[2] for n in names if n.startswith("decoder.layers.")} == layers


def test_tied_output_layer_is_copied_on_the_last_stage_only():
    weight_map = WeightMap(tiny_config(tied=True))

    def names(layout, rank):
        return {p.name for p in weight_map.megatron_params(layout, rank)}

    assert "output_layer.weight" not in names(ParallelLayout(tp=2), 0)
    assert "output_layer.weight" not in names(ParallelLayout(pp=2), 0)
    assert "output_layer.weight" in names(ParallelLayout(pp=2), 1)
    assert "lm_head.weight" not in {p.name for p in weight_map.rollout_params(1, 0)}
    assert "lm_head.weight" not in weight_map.hf_shapes()


def test_value_head_replaces_the_output_layer():
    weight_map = WeightMap(tiny_config(hidden=12), value_head=True)
    assert weight_map.hf_shapes()["score.weight"] == (1, 12)
    assert "lm_head.weight" not in weight_map.hf_shapes()
    for rank in range(2):
        [head] = [p for p in weight_map.megatron_params(ParallelLayout(tp=2), rank) if p.name == "output_layer.weight"]
        assert head.shape == (1, 12)


def test_fused_norm_names_are_mapped_to_the_local_ones():
    layer = "decoder.layers.11."
    assert canonical_name(layer + "self_attention.linear_qkv.layer_norm_weight") == layer + "input_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.layer_norm_weight") == layer + "pre_mlp_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.weight") == layer + "mlp.linear_fc1.weight"
    weight_map = WeightMap(tiny_config(layers=12))
    known = {p.name for p in weight_map.megatron_params(ParallelLayout(), 0)}
    assert canonical_name(layer + "self_attention.linear_qkv.layer_norm_weight") in known
