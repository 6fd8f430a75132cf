"""Weight syncs end to end: their result, the order of their stages, and failures."""

import gc
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import model, plan_cases
from resharding_cases import cases, weight_map_of
from support.expected_errors import raises
from sync_in_process import Engine, Setup, two_nodes

from megarl.base.errors import WeightSyncError
from megarl.models import ParallelLayout

LAYOUT = ParallelLayout(2, 2, 2)


@pytest.fixture
def setup():
    created = []

    def make(*args, **options):
        created.append(Setup(*(args or (weight_map_of(), LAYOUT, 4, 2)), **options))
        return created[-1]

    yield make
    for sync in created:
        sync.close()


def assert_two_syncs_are_exact(setup):
    for step in (1, 2):
        setup.trained = setup.trainer(step)
        metrics = setup.manager.sync_weights()
        setup.assert_engines_hold(step)
        assert setup.manager.version == step
        assert {(e.version, e.stale) for e in setup.engines} == {(step, False)}
        assert metrics["weight_sync/bytes"] == setup.plan.nbytes
        assert metrics["weight_sync/buckets"] == len(setup.plan.buckets)
        assert metrics["weight_sync/seconds"] > 0
        per_second = metrics["weight_sync/gb_per_s"] * metrics["weight_sync/seconds"]
        assert per_second == pytest.approx(setup.plan.nbytes / 1e9)
    assert setup.buffers_in_use() == 0


@settings(max_examples=15)
@given(cases(), st.sampled_from(["inline", "shared_memory"]), st.integers(0, 2))
def test_engines_hold_the_trainers_weights_bit_for_bit_after_each_sync(case, transport, verify_freq):
    setup = Setup(*case, transport=transport, verify_freq=verify_freq)
    try:
        assert_two_syncs_are_exact(setup)
    finally:
        setup.close()


@pytest.mark.parametrize("layout", [LAYOUT, ParallelLayout(1, 2, 1)])
def test_sync_over_a_process_group_is_exact(setup, layout):
    sync = setup(weight_map_of("Qwen2MoeForCausalLM"), layout, 2, 2, transport="gloo", verify_freq=1)
    assert_two_syncs_are_exact(sync)


def test_each_pair_of_processes_on_two_nodes_has_its_transport(setup):
    places = two_nodes(LAYOUT.world_size, 4)
    sync = setup(weight_map_of(), LAYOUT, 4, 1, transport="auto", places=places, verify_freq=1)
    used = {name for sender in sync.senders for name in sender.peers.transports}
    assert used == {"gloo", "shared_memory"}
    assert_two_syncs_are_exact(sync)


def test_a_transport_that_cannot_connect_two_ranks_is_refused(setup):
    with raises("sync.transport-unavailable", "sync.transport=shared_memory", "actor rank", "rollout rank"):
        setup(weight_map_of(), LAYOUT, 4, 1, transport="shared_memory", places=two_nodes(LAYOUT.world_size, 4))


@pytest.mark.parametrize("transport", ["inline", "shared_memory", "gloo"])
def test_sync_in_bfloat16(setup, transport):
    layout = ParallelLayout(2, 1, 1)
    sync = setup(weight_map_of(), layout, 1, 1, transport=transport, dtype=torch.bfloat16, verify_freq=1)
    sync.manager.sync_weights()
    sync.assert_engines_hold(0)


@settings(max_examples=15)
@given(plan_cases(), st.sampled_from(["inline", "shared_memory"]))
def test_every_family_syncs_in_the_engine_dtype_except_float32_parameters(case, transport):
    tp, ep, replicas, _ = case.rollout
    options = {"transport": transport, "ep": ep, "dtype": torch.bfloat16, "held": torch.float32, "verify_freq": 1}
    setup = Setup(case.weight_map, case.train, tp, replicas, **options)
    try:
        setup.manager.sync_weights()
        setup.assert_engines_hold(0)
    finally:
        setup.close()


def test_deepseeks_router_bias_arrives_in_float32(setup):
    sizes = {"layers": 2, "hidden": 8, "ffn": 4, "heads": 2, "groups": 2, "vocab": 20, "tied": False}
    weight_map = model("DeepseekV3ForCausalLM", **sizes)
    sync = setup(weight_map, ParallelLayout(pp=2), 2, 1, dtype=torch.bfloat16, held=torch.float32, verify_freq=1)
    # The plan's limit holds one element of four bytes; labels beyond 256 are no bfloat16 numbers.
    sync.manager.sync_weights()
    sync.assert_engines_hold(0)
    (kept,) = {name for name in sync.plan.float32_params if name in sync.engines[0].weights}
    bias = sync.engines[1].weights[kept]
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())


# ---- order


def test_order_of_stages_on_a_shared_device(setup):
    sync = setup(weight_map_of(), ParallelLayout(), 1, 1, bucket=1 << 20, free_engine=True, verify_freq=1)
    sync.manager.sync_weights()
    sync.manager.free_engines()
    assert len(sync.plan.buckets) == 1
    sync.actor.settle()
    steps = [
        event for event in sync.log if event[:2] not in (("rollout", "open_transfer"), ("rollout", "weight_shares"))
    ]
    assert steps == [
        ("actor", "make_room"),
        ("rollout", "wake", ("weights",)),
        ("rollout", "begin_update", 1),
        ("actor", "open_transfer", 0),
        ("actor", "export_bucket", 0),
        ("rollout", "import_bucket", 0),
        ("actor", "weight_shares"),
        ("rollout", "close_transfer", True),
        ("actor", "close_transfer", True),
        ("rollout", "wake", ("kv_cache",)),
        ("rollout", "end_update", 1),
        ("rollout", "sleep", ("weights", "kv_cache")),
    ]


def test_engines_on_separate_devices_stay_awake(setup):
    sync = setup()
    sync.manager.sync_weights()
    sync.manager.free_engines()
    assert not {event[1] for event in sync.log} & {"sleep", "wake"}


def test_export_is_one_bucket_ahead_of_import(setup):
    sync = setup()
    count = len(sync.plan.buckets)
    assert count > 3
    most_ahead = []
    write = sync.receivers[0].import_bucket

    def import_bucket(index, messages):
        # Would time out if the export of the next bucket began only after this import.
        deadline = time.monotonic() + 120
        while ("actor", "export_bucket", min(index + 1, count - 1)) not in sync.log:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        out = {i for _, verb, *rest in sync.log if verb == "export_bucket" for i in rest}
        most_ahead.append(len(out) - index)
        write(index, messages)

    sync.receivers[0].import_bucket = import_bucket
    sync.manager.sync_weights()
    assert max(most_ahead) == 2


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_the_source_packs_two_buckets_while_the_engines_begin_except_in_a_new_session(setup, transport):
    """In a new session a training rank would wait for the engines at the rendezvous."""
    sync = setup(transport=transport)
    begin, exported = sync.receivers[0].begin, []

    def begin_late(version):
        if version != 1:
            deadline = time.monotonic() + 120
            while ("actor", "export_bucket", 1) not in sync.log:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        exported.append([rest for _, verb, *rest in sync.log if verb == "export_bucket"])
        begin(version)

    sync.receivers[0].begin = begin_late
    for step in (1, 2):
        sync.log.clear()
        sync.trained = sync.trainer(step)
        sync.manager.sync_weights()
        sync.assert_engines_hold(step)
    assert exported == [[], [[0], [1]]]


def test_no_process_holds_more_than_two_buckets(setup):
    limit = 400
    sync = setup(weight_map_of(), LAYOUT, 4, 2, transport="shared_memory", bucket=limit)
    metrics = sync.manager.sync_weights()
    pools = [pool for sender in sync.senders for pool in sender.pools.values()]
    largest = max(pool.peak_bytes for pool in pools)
    assert metrics["weight_sync/peak_mb"] == largest / 2**20
    destination_ranks = 8  # each packing of a bucket may begin up to 63 bytes after the last
    assert limit < largest <= 2 * (limit + 63 * destination_ranks)
    assert all(pool.held_bytes <= 2 * pool.size for pool in pools)


# ---- rolling sync


@pytest.mark.parametrize("transport", ["inline", "shared_memory", "gloo"])
@pytest.mark.parametrize("wave", [1, 2, None])
def test_replicas_hold_their_requests_only_during_their_wave(setup, transport, wave):
    sync = setup(weight_map_of(), LAYOUT, 2, 3, transport=transport, wave=wave, verify_freq=1)
    for step in (1, 2, 3):
        sync.trained = sync.trainer(step)
        sync.rollout.seen.clear()
        metrics, paused = sync.manager.sync_weights_in_flight()
        sync.assert_engines_hold(step)
        assert {(e.version, e.stale) for e in sync.engines} == {(step, False)}
        assert [held.requests for held in paused] == list(range(3)), "each replica is asked once"
        assert metrics["weight_sync/pause_s"] <= metrics["weight_sync/seconds"]
        assert metrics["weight_sync/verified"] == 1
    assert sync.buffers_in_use() == 0
    for replica in range(3):
        (own,) = (wave.buckets for wave in sync.plan.waves if replica in wave.replicas)
        imports = [("import_bucket", number) for number in own]
        assert [event for event in sync.rollout.seen[replica] if event[0] != "weight_shares"] == [
            ("pause",),
            ("begin_update", 3),
            ("open_transfer", 0),
            *imports,
            ("close_transfer", True),
            ("end_update", 3),
            ("resume",),
        ]


def test_waves_follow_each_other_from_the_second_sync_on(setup):
    sync, order = setup(weight_map_of(), LAYOUT, 2, 3, wave=1), []
    submit_on = sync.rollout.submit_on

    def listed(ranks, verb, *arguments, **options):
        if verb in ("pause", "resume"):
            order.append((verb, ranks))
        return submit_on(ranks, verb, *arguments, **options)

    sync.rollout.submit_on = listed
    sync.manager.sync_weights_in_flight()
    assert order == [("pause", [0, 1, 2]), ("resume", [0, 1, 2])], "all processes meet in the first sync"
    order.clear()
    sync.manager.sync_weights_in_flight()
    assert order == [(verb, [replica]) for replica in range(3) for verb in ("pause", "resume")]


@pytest.mark.parametrize("event", [("pause",), ("import_bucket",), ("end_update",), ("resume",)])
def test_a_failure_in_the_last_wave_stops_all_replicas_and_the_next_sync_has_one_wave(setup, event):
    sync = setup(weight_map_of(), LAYOUT, 2, 3, transport="gloo", wave=1)
    sync.manager.sync_weights_in_flight()
    sync.trained = sync.trainer(1)
    sync.rollout.fail_at = event
    with raises("sync.failed", "version 2", "lost rank", error=WeightSyncError):
        sync.manager.sync_weights_in_flight()
    sync.rollout.settle()
    assert all(engine.stale for engine in sync.engines)
    for replica in range(2):  # a replica that serves again holds its requests before its weights become stale
        events = [seen for seen in sync.rollout.seen[replica] if seen[0] in ("pause", "resume", "begin_update")]
        assert events[-2:] == [("pause",), ("begin_update", 2)]
    sync.rollout.fail_at = None
    _, paused = sync.manager.sync_weights_in_flight()
    assert len(paused) == 3
    sync.assert_engines_hold(1)


# ---- failures


STAGES = [
    ("actor", ("make_room",)),
    ("rollout", ("wake", ("weights",))),
    ("rollout", ("begin_update",)),
    ("actor", ("open_transfer",)),
    ("actor", ("export_bucket", 0)),
    ("actor", ("export_bucket", 3)),
    ("rollout", ("import_bucket", 0)),
    ("rollout", ("import_bucket", 3)),
    ("actor", ("weight_shares",)),
    ("rollout", ("weight_shares",)),
    ("actor", ("close_transfer", True)),
    ("rollout", ("wake", ("kv_cache",))),
    ("rollout", ("end_update",)),
]
# In a process group the others would wait, until their time is up, for the process that does not come.
FAILURES = [
    (transport, side, event)
    for transport in ("inline", "shared_memory", "gloo")
    for side, event in STAGES
    if (transport, side, event) != ("gloo", "actor", ("open_transfer",))
]


@pytest.mark.parametrize(("transport", "side", "event"), FAILURES, ids=str)
def test_engines_are_stale_after_a_failure_at_any_stage_and_a_retry_succeeds(setup, transport, side, event):
    sync = setup(weight_map_of(), ParallelLayout(1, 2, 1), 1, 2, transport=transport, free_engine=True, verify_freq=1)
    sync.manager.sync_weights()
    sync.trained = sync.trainer(1)
    getattr(sync, side).fail_at = event
    with raises("sync.failed", "version 2", "lost rank", error=WeightSyncError):
        sync.manager.sync_weights()
    assert sync.manager.version == 1
    sync.rollout.settle()
    begun = sync.engines[:-1] if event == ("begin_update",) else sync.engines
    assert all(engine.stale for engine in begun)
    assert sync.buffers_in_use() == 0

    getattr(sync, side).fail_at = None
    sync.manager.sync_weights()
    sync.assert_engines_hold(1)
    assert {(e.version, e.stale) for e in sync.engines} == {(2, False)}


@pytest.mark.parametrize("index", [0, 3])
def test_the_failing_bucket_is_named(setup, index):
    sync = setup()
    sync.actor.fail_at = ("export_bucket", index)
    count = len(sync.plan.buckets)
    with raises("sync.failed") as caught:
        sync.manager.sync_weights()
    assert str(caught.value) == (
        f"weight sync to version 1 failed at bucket {index + 1} of {count}; the rollout engines are stale and serve "
        "nothing: lost rank [sync.failed]"
    )


def test_an_interrupt_propagates_and_frees_the_buffers(setup):
    sync = setup(transport="shared_memory")

    def interrupt(index, messages):
        raise KeyboardInterrupt

    sync.receivers[0].import_bucket = interrupt
    with pytest.raises(KeyboardInterrupt):
        sync.manager.sync_weights()
    assert sync.buffers_in_use() == 0 and sync.engines[0].stale


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_descriptors_do_not_grow_over_many_syncs(setup, transport):
    sync = setup(weight_map_of(), ParallelLayout(2, 1, 1), 1, 2, transport=transport)

    def open_descriptors():
        sync.actor.settle()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def fail_and_retry():
        sync.rollout.fail_at = ("import_bucket", 1)
        with raises("sync.failed"):
            sync.manager.sync_weights()
        sync.rollout.fail_at = None
        sync.manager.sync_weights()

    fail_and_retry()
    before = open_descriptors()
    for _ in range(3):
        fail_and_retry()
        sync.manager.sync_weights()
    deadline = time.monotonic() + 60
    while open_descriptors() > before:  # threads close connections when they notice their end
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- verification


def corrupted(engine, name):
    """An engine that corrupts one element of a parameter."""

    def write(updates):
        Engine.write(engine, updates)
        for param, start, _ in updates:
            if param == name:
                engine.weights[name][start] += 1

    return write


@pytest.mark.parametrize("transport", ["inline", "shared_memory", "gloo"])
def test_verification_names_the_differing_parameter(setup, transport):
    sync = setup(transport=transport, verify_freq=1)
    victim = sync.engines[5]
    victim.write = corrupted(victim, "model.layers.1.mlp.down_proj.weight")
    where = "'model.layers.1.mlp.down_proj.weight' of rollout replica 1 (rank 4 to 7)"
    with raises("sync.failed", "failed at verification", where, error=WeightSyncError):
        sync.manager.sync_weights()
    assert victim.stale


def test_without_verification_the_fault_passes(setup):
    sync = setup(verify_freq=0)
    sync.engines[0].write = lambda slices: None
    sync.manager.sync_weights()
    assert sync.engines[0].weights["model.norm.weight"].sum() == 0


@pytest.mark.parametrize(("freq", "verified"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (20, [1])])
def test_the_first_sync_and_every_nth_one_are_verified(setup, freq, verified):
    sync, seen, reported = setup(weight_map_of(), ParallelLayout(), 1, 1, verify_freq=freq), [], []
    for number in range(1, 6):
        sync.log.clear()
        metrics = sync.manager.sync_weights()
        seen += [number] if ("actor", "weight_shares") in sync.log else []
        reported += [number] if metrics["weight_sync/verified"] == 1.0 else []
        seconds = metrics.get("weight_sync/verify_seconds")
        assert (seconds is not None) == (number in seen)
        assert seconds is None or 0 < seconds < metrics["weight_sync/seconds"]
    assert seen == reported == verified
