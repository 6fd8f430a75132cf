"""Blocks that the ranks of any valid layout save: each element of each tensor once, and faults that a save refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import MODELS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.expected_errors import raises
from support.valid_layouts import valid_layouts
from tiny_models import model_config

from megarl.base.errors import CheckpointError, ConfigError
from megarl.megatron.checkpoint.sharded import StoredState, saved_items
from megarl.megatron.checkpoint.storage import SavePlanner, check_index, check_written
from megarl.megatron.engine.optimizer import StateShard
from megarl.megatron.runtime.memory import TensorMemory
from megarl.models import ParallelLayout, WeightMap
from megarl.models.adapters import AdapterMap, LoraOptions

RANKS = 8
FAMILIES: dict[str, dict[str, Any]] = {**MODELS, "tied": {"family": "qwen2", "tied": True}}
ADAPTERS = (
    None,
    LoraOptions(rank=3, alpha=6.0),
    LoraOptions(rank=2, alpha=6.0, kind="dora"),
)


@cache
def config_of(name):
    return model_config(**{**FAMILIES[name], "num_key_value_heads": 4})


@cache
def layouts_of(name, ranks):
    return valid_layouts(config_of(name), ranks)


def optimizer_shards(trained, layout, rank, params, is_sharded):
    """Each parameter's state: random cuts over its replicas, of which some have none, or the whole on every replica."""
    coordinate, expert = layout.coordinate(rank), layout.expert_coordinate(rank)
    shards = {}
    for param in trained.megatron_params(layout, rank):
        if any(trained.is_float32(piece.hf_name) for piece in param.pieces):
            continue
        replica, replicas = coordinate.dp * layout.cp + coordinate.cp, layout.dp * layout.cp
        if ".local_experts." in param.name:
            replica, replicas = expert.edp, layout.expert_dp
        size, draw = params[param.name].numel(), random.Random(param.name)  # the same cuts on every replica
        cuts = [0, *sorted(draw.randint(0, size) for _ in range(replicas - 1)), size]
        start, stop = (cuts[replica], cuts[replica + 1]) if is_sharded else (0, size)
        if start < stop:
            shards[param.name] = StateShard(start, stop, {"exp_avg": torch.empty(stop - start)})
    return shards


def shapes_of(trained):
    shapes = trained.hf_shapes()
    return {"weight": shapes, "exp_avg": {n: shape for n, shape in shapes.items() if not trained.is_float32(n)}}


def planned(trained, layout, is_sharded):
    """The index of a save, as rank 0 plans it."""
    shapes, plans = shapes_of(trained), []
    for rank in range(layout.world_size):
        params = {param.name: torch.empty(param.shape) for param in trained.megatron_params(layout, rank)}
        shards = optimizer_shards(trained, layout, rank, params, is_sharded)
        state = StoredState(shapes["weight"], params, shards, is_sharded)
        items = saved_items(
            trained.contributions(layout, rank), state, lambda tensor: TensorMemory((tensor.view(-1),), False)
        )
        planner = SavePlanner(list(items), shapes)
        plans.append(planner.create_local_plan())
    return planner.create_global_plan(plans)[1]


@settings(max_examples=40)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(ADAPTERS), st.booleans())
def test_ranks_of_any_layout_save_each_element_once(data, name, lora, is_sharded):
    config = config_of(name)
    layout = data.draw(st.sampled_from(layouts_of(name, RANKS)))
    weights = WeightMap(config, value_head="critic" in FAMILIES[name])
    trained: Any = weights if lora is None else AdapterMap(weights, lora)
    if lora is not None:
        try:
            trained.check_layout(layout)
        except ConfigError:
            assume(False)
    index = planned(trained, layout, is_sharded)
    shapes = {
        f"{kind}/{name}": shape for kind, of_kind in shapes_of(trained).items() for name, shape in of_kind.items()
    }
    assert index.state_dict_metadata.keys() == shapes.keys()
    for key, shape in shapes.items():
        count = np.zeros(shape, dtype=int)
        for chunk in index.state_dict_metadata[key].chunks:
            count[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (count == 1).all(), key


def removed(chunks, at):
    del chunks[at]


def repeated(chunks, at):
    chunks.append(chunks[at])


def moved(chunks, at):
    first, *others = chunks[at].offsets
    chunks[at] = replace(chunks[at], offsets=torch.Size([first + 1, *others]))


def shortened(chunks, at):
    *others, last = chunks[at].sizes
    chunks[at] = replace(chunks[at], sizes=torch.Size([*others, last - 1]))


INCOMPLETE, OVERLAP, OUTSIDE = "checkpoint.tensor-incomplete", "model.slice-overlap", "model.slice-outside"
CODES: dict[Callable[[list[Any], int], None], set[str]] = {
    removed: {INCOMPLETE},
    repeated: {OVERLAP},
    moved: {OVERLAP, OUTSIDE},
    shortened: {INCOMPLETE, OUTSIDE},  # outside: nothing is left of the block
}


@settings(max_examples=30)
@given(st.data(), st.sampled_from([*CODES]))
def test_a_changed_block_is_refused(data, change):
    layout = data.draw(st.sampled_from(layouts_of("qwen3_moe", 4)))
    trained = WeightMap(config_of("qwen3_moe"))
    index = planned(trained, layout, is_sharded=True)
    key = data.draw(st.sampled_from(sorted(index.state_dict_metadata)))
    chunks = index.state_dict_metadata[key].chunks
    change(chunks, data.draw(st.integers(0, len(chunks) - 1)))
    with pytest.raises(CheckpointError) as caught:
        check_index(index, shapes_of(trained))
    assert f"'{key}'" in caught.value.text and caught.value.code in CODES[change]


def test_an_absent_unknown_or_reshaped_tensor_is_refused():
    trained = WeightMap(config_of("qwen3_moe"))
    shapes, key = shapes_of(trained), "model.norm.weight"
    changed: list[tuple[dict[str, tuple[int, ...]], str, str]] = [
        ({}, "extra-tensor", key),
        ({key: (33,)}, "tensor-shape", key),
        ({key: (32,), "another": (32,)}, "tensor-not-written", "another"),
    ]
    for expected, fault, named in changed:
        others = {name: shape for name, shape in shapes["weight"].items() if name != key}
        index = planned(trained, ParallelLayout(tp=2, etp=1), is_sharded=False)
        with raises(f"checkpoint.{fault}", f"'weight/{named}'"):
            check_index(index, {**shapes, "weight": others | expected})


def blocks_of(index):
    for key, tensor in index.state_dict_metadata.items():
        yield from ((key, chunk) for chunk in tensor.chunks)


def test_a_block_that_no_rank_wrote_is_refused():
    index = planned(WeightMap(config_of("tied")), ParallelLayout(tp=2), is_sharded=False)
    written = [(key, chunk.offsets) for key, chunk in blocks_of(index)]
    assert sum(prod(chunk.sizes) for _, chunk in blocks_of(index)) > 0
    check_written(index, written)
    for number, (key, _) in enumerate(written):
        with raises("checkpoint.block-not-written", f"'{key}'"):
            check_written(index, written[:number] + written[number + 1 :])
