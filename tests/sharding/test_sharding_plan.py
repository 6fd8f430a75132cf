"""The plan, checked op by op on numbered elements, independently of the planner."""

import pickle
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
from megarl.sharding.placement import Placement, RolloutLayout, Slot
from megarl.sharding.plan import build_plan, receiver_plans, sender_plans
from megarl.sharding.verification import check_coverage

ELEMENT = 2
BUCKETS = st.sampled_from([6, 40, 300, 5000, 1 << 20])


def plan_of(case, bucket_bytes):
    return build_plan(case.weight_map, case.train, case.rollout, bucket_bytes, ELEMENT, case.placement)


@settings(max_examples=25)
@given(plan_cases(), BUCKETS, st.integers(1, 4))
def test_each_wave_has_replicas_and_buckets_of_its_own_and_the_same_slices(case, bucket_bytes, wave_replicas):
    whole = plan_of(case, bucket_bytes)
    plan = build_plan(
        case.weight_map, case.train, case.rollout, bucket_bytes, ELEMENT, case.placement, wave_replicas=wave_replicas
    )
    assert [n for wave in plan.waves for n in wave.replicas] == list(range(case.rollout.replicas))
    assert [n for wave in plan.waves for n in wave.buckets] == list(range(len(plan.buckets)))
    assert max(len(wave.replicas) for wave in plan.waves) <= wave_replicas
    sent = Counter()
    for rank in range(case.train.world_size):
        for number, bucket in enumerate(plan.sent_by(rank)):
            assert sum(nbytes(plan, op) for op in bucket.ops) <= bucket_bytes
            (wave,) = (wave for wave in plan.waves if number in wave.buckets)
            assert {op.dst_rank // case.rollout.tp for op in bucket.ops} <= set(wave.replicas)
            sent.update(op._replace(src_rank=0, src_param="") for op in bucket.ops)
    assert sent == Counter(op._replace(src_rank=0, src_param="") for op in ops_of(whole, case))
    for rank, part in enumerate(receiver_plans(plan)):
        (wave,) = (wave for wave in plan.waves if rank // case.rollout.tp in wave.replicas)
        assert part.imported_by(rank) == plan.imported_by(rank) == wave.buckets
        filled = [number for number, bucket in enumerate(part.received_by(rank)) if bucket.ops]
        assert set(filled) <= set(wave.buckets)


def nbytes(plan, op):
    return prod(op.shape) * (4 if op.dst_param in plan.float32_params else ELEMENT)


def ops_of(plan, case):
    return [m for rank in range(case.rollout.world_size) for b in plan.received_by(rank) for m in b.ops]


def cut(op, source):
    """The values that an op reads, in the shape of the receiver."""
    shape = op.shape[len(op.shape) - len(op.src_start) :]
    return source[op.src_rank][op.src_param][box(op.src_start, shape)].reshape(op.shape)


@settings(max_examples=30)
@given(plan_cases(), BUCKETS)
def test_every_engine_element_is_written_exactly_once_from_the_right_source(case, bucket_bytes):
    numbers = labels(case.weight_map)
    source, plan = held_in_training(case, numbers), plan_of(case, bucket_bytes)
    for rank in range(case.rollout.world_size):
        params = rollout_params(case, rank)
        written = {param.name: np.zeros(param.shape, int) for param in params}
        for bucket in plan.received_by(rank):
            for op in bucket.ops:
                assert op.dst_rank == rank
                # Add instead of assign: an element that is written twice is wrong.
                written[op.dst_param][box(op.dst_start, op.shape)] += cut(op, source)
        for name, expected in labelled(params, numbers).items():
            np.testing.assert_array_equal(written[name], expected, err_msg=f"{rank} {name}")
        check_coverage(plan, {rank: params})


@settings(max_examples=60)
@given(plan_cases(), st.sampled_from([6, 40, 300]))
def test_every_transfer_comes_from_a_rank_that_holds_it(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    for number, holders in enumerate(plan.table.holder_sets):
        assert np.isin(plan.source[:, plan.table.holders == number], holders).all()


@settings(max_examples=25)
@given(plan_cases(), BUCKETS)
def test_no_rank_sends_or_receives_more_than_the_bucket_size(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    total = [0] * len(plan.buckets)
    for parts in (
        [plan.sent_by(rank) for rank in range(case.train.world_size)],
        [plan.received_by(rank) for rank in range(case.rollout.world_size)],
    ):
        total = [0] * len(plan.buckets)
        for part in parts:
            for number, bucket in enumerate(part):
                own = sum(nbytes(plan, op) for op in bucket.ops)
                assert own <= bucket_bytes
                total[number] += own
                assert bucket.nbytes == plan.buckets[number]
        assert total == list(plan.buckets) and min(total) > 0
    assert sum(total) == plan.nbytes


@settings(max_examples=20)
@given(plan_cases(), BUCKETS)
def test_sender_and_receiver_list_the_same_ops_in_the_same_order(case, bucket_bytes):
    plan = plan_of(case, bucket_bytes)
    ends = [defaultdict(list), defaultdict(list)]
    for listed, parts in (
        (ends[0], [plan.sent_by(rank) for rank in range(case.train.world_size)]),
        (ends[1], [plan.received_by(rank) for rank in range(case.rollout.world_size)]),
    ):
        for part in parts:
            for number, bucket in enumerate(part):
                for op in bucket.ops:
                    listed[number, op.src_rank, op.dst_rank].append(op)
    assert ends[0] == ends[1]
    assert {(number, src, dst // case.rollout.tp) for number, src, dst in ends[0]} == {
        (number, src, replica)
        for number, receivers in enumerate(plan.receivers)
        for src, replicas in receivers.items()
        for replica in replicas
    }
    pairs = Counter()
    for (_, src, dst), ops in ends[0].items():
        pairs[src, dst] += sum(nbytes(plan, op) for op in ops)
    src, dst, amounts = (column.tolist() for column in plan.pair_nbytes())
    assert dict(zip(zip(src, dst, strict=True), amounts, strict=True)) == pairs


@settings(max_examples=25)
@given(plan_cases(), BUCKETS)
def test_elements_on_the_same_device_or_node_are_never_fetched_from_farther_away(case, bucket_bytes):
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
    for op in ops_of(plan, case):
        receiver, sender = placement.rollout[op.dst_rank], placement.train[op.src_rank]
        if receiver != sender:
            assert on_device[receiver].isdisjoint(elements := cut(op, source).ravel().tolist())
            assert receiver.node == sender.node or on_node[receiver.node].isdisjoint(elements)


@settings(max_examples=20)
@given(plan_cases())
def test_a_rank_receives_only_its_shard_minus_the_elements_on_its_device(case):
    numbers = labels(case.weight_map)
    source, plan = held_in_training(case, numbers), plan_of(case, 300)
    src, dst, amounts = plan.pair_nbytes()
    for rank in range(case.rollout.world_size):
        slot = case.placement and case.placement.rollout[rank]
        here = [n for n, other in enumerate(case.placement.train if case.placement else ()) if other == slot]
        on_device = {element for n in here for tensor in source[n].values() for element in tensor.ravel().tolist()}
        bound = 0
        for name, tensor in labelled(rollout_params(case, rank), numbers).items():
            missing = sum(element != 0 and element not in on_device for element in tensor.ravel().tolist())
            bound += missing * (4 if name in plan.float32_params else ELEMENT)
        assert amounts[(dst == rank) & ~np.isin(src, here)].sum() == bound


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("architecture", "ep"), [("LlamaForCausalLM", 1), ("Qwen2MoeForCausalLM", 2)])
def test_holders_of_the_same_elements_send_equal_bytes(architecture, ep, replicas):
    train = ParallelLayout(tp=2, pp=2, dp=4, ep=ep, etp=1 if ep > 1 else 0)
    case = Case(weight_map_of(architecture, layers=8, hidden=64, ffn=16), train, RolloutLayout(2, ep, replicas), None)
    plan = plan_of(case, 800)  # small parts: a sixteenth is what a part is cut to, and twice that a transfer at most
    sent = Counter()
    for src, _, amount in zip(*(column.tolist() for column in plan.pair_nbytes()), strict=True):
        sent[src] += amount
    for stage in range(train.pp):
        for tp_rank in range(train.tp):
            loads = [sent[train.rank(tp=tp_rank, dp=dp, pp=stage)] for dp in range(train.dp)]
            assert max(loads) - min(loads) <= 4 * 100 < 0.1 * max(loads)


def test_the_tied_embedding_copy_sends_half_of_the_bytes():
    weight_map = weight_map_of(hidden=32, vocab=4000, tied=True)
    plan = build_plan(weight_map, ParallelLayout(pp=2), RolloutLayout(), 20000, ELEMENT)
    sent = [sum(nbytes(plan, m) for b in plan.sent_by(rank) for m in b.ops) for rank in range(2)]
    assert abs(sent[0] - sent[1]) <= 20000 / 8
    names = {m.src_param for b in plan.sent_by(1) for m in b.ops if m.dst_param == "model.embed_tokens.weight"}
    assert names == {"output_layer.weight"}


def test_distant_ranks_are_served_by_idle_senders():
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
        assert {op.src_rank for op in bucket.ops} == {0, 1, 2, 3}


def test_experts_are_sent_one_by_one():
    case = Case(
        weight_map_of("Qwen2MoeForCausalLM", layers=2), ParallelLayout(tp=2, ep=2, etp=1), RolloutLayout(2, 2), None
    )
    ops = [m for m in ops_of(plan_of(case, 1 << 20), case) if ".experts." in m.dst_param]
    assert {op.shape[0] for op in ops} == {1} and {op.dst_start[0] for op in ops} == {0, 1}
    assert {op.src_param.split(".")[6] for op in ops} == {"0", "1", "2", "3"}


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
    assert build_plan(weight_map_of(), ParallelLayout(), RolloutLayout(), 2, ELEMENT).buckets[0] == 2


def test_a_training_layout_with_too_few_ranks_for_its_experts_is_refused():
    with pytest.raises(ValueError, match=r"TP2 PP1 DP1 EP2.* 2 ranks of a stage do not divide into 2 x 2"):
        build_plan(weight_map_of("Qwen2MoeForCausalLM"), ParallelLayout(2, ep=2), RolloutLayout(), 100, ELEMENT)


def test_a_placement_of_other_layouts_is_refused():
    placement = Placement.of_devices([0, 1], [0], devices_per_node=8)
    with pytest.raises(ValueError, match=r"placement\.train has slots of 2 ranks, the layout has 4 ranks"):
        build_plan(weight_map_of(), ParallelLayout(tp=4), RolloutLayout(), 100, ELEMENT, placement)
    with pytest.raises(ValueError, match=r"placement\.rollout has slots of 1 ranks, the layout has 3 ranks"):
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


def test_planning_671b_parameters_on_512_ranks_needs_little_memory():
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


@settings(max_examples=20)
@given(plan_cases())
def test_a_rank_plan_has_the_ops_of_its_rank(case):
    plan = build_plan(case.weight_map, case.train, case.rollout, 300, 2, case.placement)
    senders, receivers = list(sender_plans(plan, case.train.world_size)), list(receiver_plans(plan))
    assert len(senders) == case.train.world_size and len(receivers) == case.rollout.world_size
    for rank, part in enumerate(senders):
        assert part.sent_by(rank) == plan.sent_by(rank)
    for rank, part in enumerate(receivers):
        assert part.received_by(rank) == plan.received_by(rank)
        check_coverage(part, {rank: rollout_params(case, rank)})
    assert all(part.float32_params == plan.float32_params for part in (*senders, *receivers))


def test_a_rank_plan_is_small_and_refuses_other_ranks():
    plan = build_plan(weight_map_of(layers=32), ParallelLayout(tp=2, pp=8), RolloutLayout(tp=2, replicas=32), 1000, 2)
    sender, receiver = next(sender_plans(plan, 16)), next(receiver_plans(plan))
    with pytest.raises(ValueError, match="this is the plan of training rank 0, not of training rank 1"):
        sender.sent_by(1)
    with pytest.raises(ValueError, match="this is the plan of rollout rank 0, not of training rank 0"):
        receiver.sent_by(0)
    whole = len(pickle.dumps(plan))
    assert all(len(pickle.dumps(part)) < whole / 5 for part in (*sender_plans(plan, 16), *receiver_plans(plan)))


@settings(max_examples=20)
@given(plan_cases())
def test_parts_that_travel_together_cover_every_element_in_buckets_of_the_same_size(case):
    plan = build_plan(case.weight_map, case.train, case.rollout, 300, 2, case.placement, together=True)
    check_coverage(plan, {rank: rollout_params(case, rank) for rank in range(case.rollout.world_size)})
    for rank in range(case.rollout.world_size):
        for bucket in plan.received_by(rank):
            sizes = [prod(op.shape) * (4 if op.dst_param in plan.float32_params else 2) for op in bucket.ops]
            assert sum(sizes) <= 300


@pytest.mark.parametrize(("tp", "rollout"), [(4, 1), (8, 2), (2, 4)])
def test_the_parts_of_a_matrix_travel_together(tp, rollout):
    """Each training rank sends a part of every matrix; few buckets lie between the first and the last part."""
    weight_map = weight_map_of("Qwen3ForCausalLM", layers=24, hidden=64, ffn=128, heads=8, groups=8, head_dim=8)

    def longest(together):
        plan = build_plan(weight_map, ParallelLayout(tp=tp), RolloutLayout(rollout), 40_000, 2, together=together)
        buckets = defaultdict(set)
        for number, bucket in enumerate(plan.received_by(0)):
            for op in bucket.ops:
                if weight_map.is_linear(op.dst_param):
                    buckets[op.dst_param].add(number)
        return max(max(numbers) - min(numbers) for numbers in buckets.values()), len(plan.buckets)

    (near, count), (far, staggered) = longest(True), longest(False)
    assert near <= 2 and count <= staggered + 2
    assert far > count / 2 or tp < rollout
