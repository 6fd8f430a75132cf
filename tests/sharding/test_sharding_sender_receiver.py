import pytest
import torch
from resharding_cases import labelled_checkpoint, training_tensors, weight_map_of

from megarl.errors import WeightSyncError
from megarl.models import ParallelLayout
from megarl.sharding import Bucket, Move, ReshardPlan, RolloutLayout, build_plan
from megarl.sharding.receiver import BucketReceiver, apply_bucket, route_shipments
from megarl.sharding.sender import BucketSender, export_bucket
from megarl.sharding.transport import create_transport


class Engine:
    def __init__(self):
        self.calls = []

    def begin_update(self, version):
        self.calls.append("begin")

    def update_weights(self, updates):
        self.calls += [name for name, _, _ in updates]

    def end_update(self, version):
        self.calls.append("end")


MOVE = Move(0, "src", 1, "dst", (1, 0), (0, 2), (2, 3))
BUCKET = Bucket((MOVE, MOVE._replace(src_rank=2), MOVE._replace(dst_rank=0)), 0)
PARAMS = {"src": torch.arange(12.0).reshape(4, 3)}


@pytest.fixture()
def transport():
    transport = create_transport("shared_memory")
    yield transport
    transport.close()


def shipments_to_1(transport, verify=False):
    return [export_bucket(BUCKET, rank, PARAMS, transport, verify)[1] for rank in (0, 2)]


def test_a_rank_exports_what_it_sends_and_to_whom(transport):
    assert {rank: set(export_bucket(BUCKET, rank, PARAMS, transport)) for rank in range(3)} == {
        0: {0, 1},
        1: set(),
        2: {1},
    }


def test_updates_carry_name_offset_and_values(transport):
    updates = []
    apply_bucket(BUCKET, 1, shipments_to_1(transport), updates.extend, transport)
    assert [(name, start) for name, start, _ in updates] == [("dst", (0, 2)), ("dst", (0, 2))]
    assert all(torch.equal(values, PARAMS["src"][1:3]) for _, _, values in updates)


@pytest.mark.parametrize(
    "params,message",
    [
        ({}, "rank 0 has no parameter 'src'"),
        ({"src": torch.zeros(2, 3)}, r"'src' of training rank 0 has shape \[2, 3\]"),
    ],
)
def test_parameters_that_the_plan_does_not_fit_are_refused(transport, params, message):
    with pytest.raises(WeightSyncError, match=message):
        export_bucket(BUCKET, 0, params, transport)


def test_a_failed_export_frees_what_it_had_packed(transport):
    bucket = Bucket((MOVE, MOVE._replace(dst_rank=0, src_param="missing")), 0)
    with pytest.raises(WeightSyncError):
        export_bucket(bucket, 0, PARAMS, transport)
    assert not transport._segments


def test_a_second_export_of_a_bucket_frees_the_first(transport):
    sender = BucketSender(ReshardPlan((BUCKET,)), 0, lambda: PARAMS, transport)
    sender.export_bucket(0)
    sender.export_bucket(0)
    assert len(transport._segments) == 2  # one per destination
    sender.release_bucket(0)
    sender.release_bucket(0)
    assert not transport._segments


def test_missing_extra_and_short_shipments_are_refused(transport):
    first, second = shipments_to_1(transport)
    for wrong in ([first], [], [first, first], [first, second, second._replace(src_rank=7)]):
        with pytest.raises(WeightSyncError, match="rollout rank 1 received shipments of training ranks"):
            apply_bucket(BUCKET, 1, wrong, lambda updates: None, transport)
    short = first._replace(payload=transport.pack([torch.zeros(5)]))
    with pytest.raises(WeightSyncError, match="5 elements, the plan says 6"):
        apply_bucket(BUCKET, 1, [short, second], lambda updates: None, transport)


def test_verification_on_one_side_only_is_refused(transport):
    with pytest.raises(WeightSyncError, match="at both sides or at neither"):
        apply_bucket(BUCKET, 1, shipments_to_1(transport), lambda u: None, transport, read_back=dict)


def test_weights_are_sent_in_the_dtype_asked_for_and_verified_in_it(transport):
    bucket = Bucket((MOVE,), 0)
    values = {"src": torch.arange(12.0).reshape(4, 3) / 7}
    engine = {"dst": torch.zeros(4, 6, dtype=torch.bfloat16)}

    def update(updates):
        for name, _, tensor in updates:
            engine[name][0:2, 2:5] = tensor

    sent = export_bucket(bucket, 0, values, transport, verify=True, dtype=torch.bfloat16)
    assert sent[1].payload.nbytes == 12
    apply_bucket(bucket, 1, [sent[1]], update, transport, read_back=lambda: engine)
    assert torch.equal(engine["dst"][0:2, 2:5], values["src"][1:3].bfloat16())
    sent = export_bucket(bucket, 0, values, transport, verify=True)
    with pytest.raises(WeightSyncError, match=r"'dst' of rollout rank 1 is torch\.bfloat16 and was sent as"):
        apply_bucket(bucket, 1, [sent[1]], update, transport, read_back=lambda: engine)


def test_shipments_are_regrouped_by_destination(transport):
    routed = route_shipments(export_bucket(BUCKET, rank, PARAMS, transport) for rank in range(3))
    assert {dst: [s.src_rank for s in group] for dst, group in routed.items()} == {0: [0], 1: [0, 2]}


def test_an_update_ends_only_after_every_bucket_in_order():
    weight_map, transport, engine = weight_map_of(), create_transport("inline"), Engine()
    plan = build_plan(weight_map, ParallelLayout(), RolloutLayout(), 400, 4)
    trainer = training_tensors(weight_map, ParallelLayout(), labelled_checkpoint(weight_map, torch.float32))[0]
    receiver = BucketReceiver(plan, 0, weight_map.rollout_params(1, 0), engine, transport)
    exports = [[export_bucket(bucket, 0, trainer, transport)[0]] for bucket in plan.buckets]
    receiver.begin_update(1)
    receiver.import_bucket(0, exports[0])
    for wrong in (0, 2):
        with pytest.raises(WeightSyncError, match=f"received bucket {wrong}, expected 1"):
            receiver.import_bucket(wrong, exports[wrong])
    with pytest.raises(WeightSyncError, match=f"received 1 of {len(exports)} weight buckets; version 1 is incomplete"):
        receiver.end_update(1)
    assert "end" not in engine.calls
    receiver.begin_update(1)
    for index, shipments in enumerate(exports):
        receiver.import_bucket(index, shipments)
    receiver.end_update(1)
    assert engine.calls[-1] == "end"


def test_a_receiver_refuses_a_plan_that_does_not_cover_it():
    plan = build_plan(weight_map_of(layers=2), ParallelLayout(), RolloutLayout(), 400, 4)
    with pytest.raises(WeightSyncError, match=r"model\.layers\.2"):
        BucketReceiver(plan, 0, weight_map_of(layers=3).rollout_params(1, 0), Engine(), create_transport("inline"))


def test_importing_the_plan_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, megarl.sharding; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
