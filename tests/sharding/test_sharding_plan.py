"""The plan against numbered elements that are followed move by move, independently of how the plan was made."""

import tracemalloc
from collections import Counter, defaultdict
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Case, box, held_in_training, labelled, labels, model, plan_cases, rollout_params
from resharding_cases import weight_map_of

from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.sharding import Placement, RolloutLayout, Slot, build_plan, check_coverage

ELEMENT = 2
BUCKETS = st.sampled_from([6, 40, 300, 5000, 1 << 20])


def plan_of(case, bucket_bytes):
    return build_plan(case.weight_map, case.train, case.rollout, bucket_bytes, ELEMENT, case.placement)


def nbytes(plan, move):
    return prod(move.shape) * (4 if move.dst_param in plan.float32_params else ELEMENT)


def moves_of(plan, case):
    return [m for rank in range(case.rollout.world_size) for b in plan.received_by(rank) for m in b.moves]


def cut(move, source):
    """What a move reads, in the shape in which it arrives."""
    shape = move.shape[len(move.shape) - len(move.src_start) :]
    return source[move.src_rank][move.src_param][box(move.src_start, shape)].reshape(move.shape)


@settings(max_examples=80)
@given(plan_cases(), BUCKETS)
def test_every_element_of_every_engine_is_written_once_from_one_that_is_its_own(case, bucket_bytes):
    numbers = labels(case.weight_map)
    source, plan = held_in_training(case, numbers), plan_of(case, bucket_bytes)
    for rank in range(case.rollout.world_size):
        params = rollout_params(case, rank)
        written = {param.name: np.zeros(param.shape, int) for param in params}
        for bucket in plan.received_by(rank):
            for move in bucket.moves:
                assert move.dst_rank == rank
                # Adding, not assigning: an element that is written twice comes out wrong.
                written[move.dst_param][box(move.dst_start, move.shape)] += cut(move, source)
        for name, expected in labelled(params, numbers).items():
            np.testing.assert_array_equal(written[name], expected, err_msg=f"{rank} {name}")
        check_coverage(plan, {rank: params})


@settings(max_examples=200)
@given(plan_cases(), st.sampled_from([6, 40, 300]))
def test_every_parcel_comes_from_a_rank_that_holds_it(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    for number, holders in enumerate(plan.table.holder_sets):
        assert np.isin(plan.source[:, plan.table.holders == number], holders).all()


@settings(max_examples=60)
@given(plan_cases(), BUCKETS)
def test_no_rank_sends_or_receives_more_than_a_bucket_in_one(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    total = [0] * len(plan.buckets)
    for parts in (
        [plan.sent_by(rank) for rank in range(case.train.world_size)],
        [plan.received_by(rank) for rank in range(case.rollout.world_size)],
    ):
        total = [0] * len(plan.buckets)
        for part in parts:
            for number, bucket in enumerate(part):
                own = sum(nbytes(plan, move) for move in bucket.moves)
                assert own <= bucket_bytes
                total[number] += own
                assert bucket.nbytes == plan.buckets[number].nbytes
        assert total == [bucket.nbytes for bucket in plan.buckets] and min(total) > 0
    assert sum(total) == plan.nbytes


@settings(max_examples=40)
@given(plan_cases(), BUCKETS)
def test_both_ends_of_a_pair_of_ranks_list_the_same_moves_in_one_order(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    ends = [defaultdict(list), defaultdict(list)]
    for listed, parts in (
        (ends[0], [plan.sent_by(rank) for rank in range(case.train.world_size)]),
        (ends[1], [plan.received_by(rank) for rank in range(case.rollout.world_size)]),
    ):
        for part in parts:
            for number, bucket in enumerate(part):
                for move in bucket.moves:
                    listed[number, move.src_rank, move.dst_rank].append(move)
    assert ends[0] == ends[1]
    pairs = Counter()
    for (_, src, dst), moves in ends[0].items():
        pairs[src, dst] += sum(nbytes(plan, move) for move in moves)
    src, dst, amounts = (column.tolist() for column in plan.pair_nbytes())
    assert dict(zip(zip(src, dst, strict=True), amounts, strict=True)) == pairs


@settings(max_examples=60)
@given(plan_cases(), BUCKETS)
def test_what_is_on_the_device_or_the_node_is_never_fetched_from_farther_away(case, bucket_bytes):
    numbers = labels(case.weight_map)
    source, plan = held_in_training(case, numbers), plan_of(case, bucket_bytes)
    placement = case.placement or Placement(
        tuple(Slot(0, 1 + rank) for rank in range(case.train.world_size)),
        tuple(Slot(0, -1 - rank) for rank in range(case.rollout.world_size)),
    )
    on_device, on_node = defaultdict(set), defaultdict(set)
    for slot, tensors in zip(placement.train, source, strict=True):
        for tensor in tensors.values():
            on_device[slot].update(tensor.ravel().tolist())
            on_node[slot.node].update(tensor.ravel().tolist())
    for move in moves_of(plan, case):
        here, there = placement.rollout[move.dst_rank], placement.train[move.src_rank]
        if here != there:
            assert on_device[here].isdisjoint(elements := cut(move, source).ravel().tolist())
            assert here.node == there.node or on_node[here.node].isdisjoint(elements)


@settings(max_examples=40)
@given(plan_cases())
def test_a_rank_receives_its_shard_less_what_its_device_holds_and_nothing_else(case):
    numbers = labels(case.weight_map)
    source, plan = held_in_training(case, numbers), plan_of(case, 300)
    src, dst, amounts = plan.pair_nbytes()
    for rank in range(case.rollout.world_size):
        slot = case.placement and case.placement.rollout[rank]
        here = [n for n, other in enumerate(case.placement.train if case.placement else ()) if other == slot]
        there = {element for n in here for tensor in source[n].values() for element in tensor.ravel().tolist()}
        bound = 0
        for name, tensor in labelled(rollout_params(case, rank), numbers).items():
            missing = sum(element != 0 and element not in there for element in tensor.ravel().tolist())
            bound += missing * (4 if name in plan.float32_params else ELEMENT)
        assert amounts[(dst == rank) & ~np.isin(src, here)].sum() == bound


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("architecture,ep", [("LlamaForCausalLM", 1), ("Qwen2MoeForCausalLM", 2)])
def test_ranks_that_hold_the_same_send_the_same_amount(architecture, ep, replicas):
    train = ParallelLayout(tp=2, pp=2, dp=4, ep=ep, etp=1 if ep > 1 else 0)
    case = Case(weight_map_of(architecture, layers=8, hidden=64, ffn=16), train, RolloutLayout(2, ep, replicas), None)
    plan = plan_of(case, 800)  # small parts: a sixteenth is what a part is cut to, and twice that a parcel at most
    sent = Counter()
    for src, _, amount in zip(*(column.tolist() for column in plan.pair_nbytes()), strict=True):
        sent[src] += amount
    for stage in range(train.pp):
        for tp_rank in range(train.tp):
            loads = [sent[train.rank(tp=tp_rank, dp=dp, pp=stage)] for dp in range(train.dp)]
            assert max(loads) - min(loads) <= 4 * 100 < 0.1 * max(loads)


def test_the_copy_of_a_tied_embedding_sends_its_half():
    weight_map = weight_map_of(hidden=32, vocab=4000, tied=True)
    plan = build_plan(weight_map, ParallelLayout(pp=2), RolloutLayout(), 20000, ELEMENT)
    sent = [sum(nbytes(plan, m) for b in plan.sent_by(rank) for m in b.moves) for rank in range(2)]
    assert abs(sent[0] - sent[1]) <= 20000 / 8
    names = {m.src_param for b in plan.sent_by(1) for m in b.moves if m.dst_param == "model.embed_tokens.weight"}
    assert names == {"output_layer.weight"}


def test_ranks_elsewhere_are_served_by_those_that_serve_nobody_near():
    # Four copies on four nodes, engines on the first two: each takes from its own node, the third from the idle ones.
    train, rollout = ParallelLayout(dp=4), RolloutLayout(replicas=4)
    placement = Placement.of_devices([0, 10, 20, 30], [1, 11, 41, 51], devices_per_node=10)
    case = Case(weight_map_of(layers=8), train, rollout, placement)
    plan = plan_of(case, 300)
    by_rank = {dst: Counter() for dst in range(4)}
    for src, dst, amount in zip(*(column.tolist() for column in plan.pair_nbytes()), strict=True):
        by_rank[dst][src] += amount
    assert [set(sources) for sources in by_rank.values()] == [{0}, {1}, {2}, {3}]


def test_all_pipeline_stages_send_in_every_bucket():
    weight_map, train = weight_map_of(layers=12, hidden=16), ParallelLayout(tp=1, pp=4)
    total = ELEMENT * sum(prod(shape) for shape in weight_map.hf_shapes().values())
    plan = build_plan(weight_map, train, RolloutLayout(), total // 6, ELEMENT)
    assert 6 < len(plan.buckets) <= 8
    for bucket in plan.received_by(0)[:6]:
        assert {move.src_rank for move in bucket.moves} == {0, 1, 2, 3}


def test_experts_travel_one_by_one():
    case = Case(
        weight_map_of("Qwen2MoeForCausalLM", layers=2), ParallelLayout(tp=2, ep=2, etp=1), RolloutLayout(2, 2), None
    )
    moves = [m for m in moves_of(plan_of(case, 1 << 20), case) if ".experts." in m.dst_param]
    assert {move.shape[0] for move in moves} == {1} and {move.dst_start[0] for move in moves} == {0, 1}
    assert {move.src_param.split(".")[6] for move in moves} == {"0", "1", "2", "3"}


def test_float32_parameters_count_four_bytes_and_are_named_at_both_ends():
    weight_map = model("DeepseekV3ForCausalLM", layers=2, hidden=8, ffn=4, heads=2, groups=2, vocab=20, tied=False)
    plan = build_plan(weight_map, ParallelLayout(ep=2, dp=2), RolloutLayout(2, 2), 500, ELEMENT)
    assert plan.float32_params == {
        "decoder.layers.1.mlp.router.expert_bias",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
    expected = sum(
        prod(piece.shape) * (4 if weight_map.is_float32(piece.hf_name) else ELEMENT)
        for rank in range(2)
        for param in weight_map.rollout_params(2, rank, 2)
        for piece in param.pieces
    )
    assert plan.nbytes == expected
    with pytest.raises(ValueError, match="bucket_bytes=3 must hold at least one element of 4 bytes"):
        build_plan(weight_map, ParallelLayout(), RolloutLayout(), 3, ELEMENT)


def test_a_bucket_must_hold_an_element():
    with pytest.raises(ValueError, match="bucket_bytes=1 must hold"):
        build_plan(weight_map_of(), ParallelLayout(), RolloutLayout(), 1, ELEMENT)
    assert build_plan(weight_map_of(), ParallelLayout(), RolloutLayout(), 2, ELEMENT).buckets[0].nbytes == 2


def test_a_training_layout_that_has_too_few_ranks_for_its_experts_is_refused():
    with pytest.raises(ValueError, match=r"TP2 PP1 DP1 EP2.* 2 ranks of a stage do not divide into 2 x 2"):
        build_plan(weight_map_of("Qwen2MoeForCausalLM"), ParallelLayout(2, ep=2), RolloutLayout(), 100, ELEMENT)


def test_a_placement_of_other_layouts_is_refused():
    placement = Placement.of_devices([0, 1], [0], devices_per_node=8)
    with pytest.raises(ValueError, match=r"placement\.train names the slots of 2 ranks, the layout has 4"):
        build_plan(weight_map_of(), ParallelLayout(tp=4), RolloutLayout(), 100, ELEMENT, placement)
    with pytest.raises(ValueError, match=r"placement\.rollout names the slots of 1 ranks, the layout has 3"):
        build_plan(weight_map_of(), ParallelLayout(tp=2), RolloutLayout(replicas=3), 100, ELEMENT, placement)


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def test_a_model_of_671b_parameters_on_512_ranks_is_planned_in_little_memory():
    weight_map = WeightMap(parse_model_config(DEEPSEEK))
    train = ParallelLayout(tp=8, pp=8, dp=8, ep=8, last_stage_layers=5)
    rollout = RolloutLayout(16, 16, 4)
    tracemalloc.start()
    plan = build_plan(weight_map, train, rollout, 1 << 29, ELEMENT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    check_coverage(plan, {37: weight_map.rollout_params(16, 5, 16)})
    src, dst, amounts = plan.pair_nbytes()
    assert len(np.unique(src)) == 512
    sent, received = np.bincount(src, amounts), np.bincount(dst, amounts)
    for rank in (0, 37, 63):
        shard = weight_map.rollout_params(16, rank % 16, 16)
        float32 = 58 * 256 * 2  # two bytes more for each expert of a layer with experts
        assert received[rank] == float32 + ELEMENT * sum(prod(p.shape) for param in shard for p in param.pieces)
    # Hardly more buckets than the busiest rank must have.
    assert len(plan.buckets) <= 1.1 * max(sent.max(), received.max()) / (1 << 29)
