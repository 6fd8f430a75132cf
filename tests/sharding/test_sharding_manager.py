"""The whole way of the weights in one process: every rank's sender and receiver, futures between them."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_cases import box, cases, labelled_checkpoint, rollout_tensors, training_tensors, weight_map_of

from megarl.errors import WeightSyncError
from megarl.models import ParallelLayout
from megarl.sharding import RolloutLayout, ShardingManager, build_plan
from megarl.sharding.receiver import BucketReceiver, route_shipments
from megarl.sharding.sender import BucketSender
from megarl.sharding.transport import create_transport


class Engine:
    """A rollout rank that holds weights."""

    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(t) for name, t in weights.items()}
        self.version, self.stale = 0, False

    def begin_update(self, version):
        self.stale = True

    def update_weights(self, updates):
        for name, start, values in updates:
            self.weights[name][box(start, values.shape)].copy_(values)

    def end_update(self, version):
        self.version, self.stale = version, False


class Source:
    """All training ranks; ``fail_at`` raises while that bucket is exported."""

    def __init__(self, plan, ranks, transport, verify=False):
        self.ranks = ranks
        self.transports = [create_transport(transport) for _ in ranks]
        self.senders = [
            BucketSender(plan, rank, lambda rank=rank: self.ranks[rank], self.transports[rank], verify)
            for rank in range(len(ranks))
        ]
        self.pool = ThreadPoolExecutor(1)
        self.fail_at, self.log = None, []

    def export_bucket(self, index):
        return self.pool.submit(self._export, index)

    def _export(self, index):
        self.log.append(("export", index))
        exports = [sender.export_bucket(index) for sender in self.senders]
        if index == self.fail_at:
            raise RuntimeError("lost rank")
        return exports

    def release_bucket(self, index):
        self.log.append(("release", index))
        return self.pool.submit(lambda: [sender.release_bucket(index) for sender in self.senders])

    def held(self):
        self.pool.submit(int).result()
        return sum(len(getattr(t, "_segments", ())) for t in self.transports)


class Target:
    """All rollout ranks; ``before_import`` is called with each bucket's number."""

    def __init__(self, plan, weight_map, tp, engines, transport, verify=False):
        self.engines = engines
        self.receivers = [
            BucketReceiver(
                plan,
                rank,
                weight_map.rollout_params(tp, rank % tp),
                engine,
                create_transport(transport),
                (lambda engine=engine: engine.weights) if verify else None,
            )
            for rank, engine in enumerate(engines)
        ]
        self.pool = ThreadPoolExecutor(1)
        self.before_import = lambda index: None

    def begin_update(self, version):
        return self.pool.submit(lambda: [r.begin_update(version) for r in self.receivers])

    def import_bucket(self, index, exported):
        def run():
            self.before_import(index)
            routed = route_shipments(exported.result())
            for rank, receiver in enumerate(self.receivers):
                receiver.import_bucket(index, routed.get(rank, []))

        return self.pool.submit(run)

    def end_update(self, version):
        return self.pool.submit(lambda: [r.end_update(version) for r in self.receivers])


class Setup:
    """A model between a trainer and engines."""

    def __init__(
        self, weight_map, train, tp, replicas, transport="inline", bucket=400, verify=False, dtype=torch.float32
    ):
        self.weight_map, self.train, self.tp, self.replicas, self.dtype = weight_map, train, tp, replicas, dtype
        self.plan = build_plan(weight_map, train, RolloutLayout(tp, 1, replicas), bucket, dtype.itemsize)
        self.source = Source(self.plan, self.trainer(0), transport, verify)
        self.engines = [Engine(w) for w in self.expected(0)]
        self.target = Target(self.plan, weight_map, tp, self.engines, transport, verify)
        self.manager = ShardingManager(self.plan, self.source, self.target)

    def checkpoint(self, step):
        return {n: t + step for n, t in labelled_checkpoint(self.weight_map, self.dtype).items()}

    def trainer(self, step):
        return training_tensors(self.weight_map, self.train, self.checkpoint(step))

    def expected(self, step):
        return rollout_tensors(self.weight_map, self.tp, self.replicas, self.checkpoint(step))

    def assert_engines_hold(self, step):
        for engine, expected in zip(self.engines, self.expected(step), strict=True):
            assert engine.weights.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(engine.weights[name], tensor), name

    def close(self):
        self.source.pool.shutdown()
        self.target.pool.shutdown()
        for transport in self.source.transports:
            transport.close()


@pytest.fixture()
def setup(request):
    made = []

    def make(*args, **options):
        layout = ParallelLayout(2, 2, 2)
        made.append(Setup(*(args or (weight_map_of(), layout, 4, 2)), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@settings(max_examples=15, deadline=None)
@given(cases(), st.sampled_from(["inline", "shared_memory"]), st.booleans())
def test_after_each_sync_the_engines_hold_the_trainers_weights_bit_for_bit(case, transport, verify):
    setup = Setup(*case, transport=transport, verify=verify)
    try:
        for step in (1, 2):
            setup.source.ranks = setup.trainer(step)
            metrics = setup.manager.sync_weights()
            setup.assert_engines_hold(step)
            assert setup.manager.version == step
            assert {(e.version, e.stale) for e in setup.engines} == {(step, False)}
            assert metrics["weight_sync/bytes"] == setup.plan.nbytes
            assert metrics["weight_sync/buckets"] == len(setup.plan.buckets)
            assert metrics["weight_sync/seconds"] > 0
        assert setup.source.held() == 0
    finally:
        setup.close()


def test_bfloat16_through_shared_memory(setup):
    one = setup(weight_map_of(), ParallelLayout(2, 1, 1), 1, 1, transport="shared_memory", dtype=torch.bfloat16)
    one.manager.sync_weights()
    one.assert_engines_hold(0)


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
@pytest.mark.parametrize("side", ["export", "import"])
@pytest.mark.parametrize("at", [0, 3, "last"])
def test_a_failure_in_the_middle_leaves_the_engines_stale_and_a_retry_mends_them(setup, transport, side, at):
    one = setup(transport=transport)
    one.manager.sync_weights()
    one.source.ranks = one.trainer(1)
    last = len(one.plan.buckets) - 1
    bucket = last if at == "last" else at

    def fail(index):
        if index == bucket:
            raise RuntimeError("lost rank")

    if side == "export":
        one.source.fail_at = bucket
    else:
        one.target.before_import = fail
    with pytest.raises(WeightSyncError, match=f"version 2 failed at bucket {bucket + 1} of {last + 1}.*lost rank"):
        one.manager.sync_weights()
    assert one.manager.version == 1
    assert all(engine.stale and engine.version == 1 for engine in one.engines)
    assert one.source.held() == 0

    one.source.fail_at, one.target.before_import = None, lambda index: None
    one.manager.sync_weights()
    one.assert_engines_hold(1)
    assert {(e.version, e.stale) for e in one.engines} == {(2, False)}


def test_a_failing_begin_or_end_is_named(setup):
    one = setup()
    one.engines[3].end_update = lambda version: 1 / 0
    with pytest.raises(WeightSyncError, match="failed at end_update"):
        one.manager.sync_weights()
    assert one.manager.version == 0 and one.engines[3].stale
    one.engines[0].begin_update = lambda version: 1 / 0
    with pytest.raises(WeightSyncError, match="failed at begin_update"):
        one.manager.sync_weights()


def test_an_interrupt_passes_and_frees_what_was_packed(setup):
    one = setup(transport="shared_memory")

    def interrupt(index):
        if index == 1:
            raise KeyboardInterrupt

    one.target.before_import = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.manager.sync_weights()
    assert one.source.held() == 0 and one.engines[0].stale


def test_descriptors_do_not_grow_over_many_syncs(setup):
    one = setup(transport="shared_memory")
    one.manager.sync_weights()
    one.source.held()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one.manager.sync_weights()
    assert one.source.held() == 0
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_next_bucket_is_exported_while_one_is_imported_and_no_further(setup):
    one = setup()
    assert len(one.plan.buckets) > 3
    ready = threading.Event()
    most_ahead = []

    def before_import(index):
        if index + 1 < len(one.plan.buckets):
            # Would time out if the export of the next bucket began only after this import.
            for _ in range(1000):
                if ("export", index + 1) in one.source.log or ready.wait(0.01):
                    break
            assert ("export", index + 1) in one.source.log
        exported = {i for kind, i in one.source.log if kind == "export"}
        released = {i for kind, i in one.source.log if kind == "release"}
        most_ahead.append(len(exported - released))

    one.target.before_import = before_import
    one.manager.sync_weights()
    assert max(most_ahead) == 2


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_verification_names_the_parameter_that_differs(setup, transport):
    one = setup(transport=transport, verify=True)
    victim, write = one.engines[5], Engine.update_weights

    def corrupt(updates):
        write(victim, updates)
        for name, start, _ in updates:
            if name == "model.layers.1.mlp.down_proj.weight":
                victim.weights[name][start] += 1

    victim.update_weights = corrupt
    with pytest.raises(WeightSyncError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' of rollout rank 5 differs"):
        one.manager.sync_weights()
    assert victim.stale


def test_without_verification_such_a_fault_would_pass(setup):
    one = setup(verify=False)
    one.engines[0].update_weights = lambda updates: None
    one.manager.sync_weights()
    assert one.engines[0].weights["model.norm.weight"].sum() == 0
