import subprocess
import sys

import pytest
import torch
from plan_cases import ListedPlan
from resharding_cases import labelled_checkpoint, training_tensors, weight_map_of
from support.expected_errors import raises

from megarl.models import ParallelLayout
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import Bucket, TransferOp, build_plan
from megarl.sharding.receiver import BucketReceiver, route_messages
from megarl.sharding.sender import BucketSender, message_layout
from megarl.sharding.transports.interface import PeerTransports, TransportOptions

CPU = torch.device("cpu")


class Engine:
    peak_bytes = 0

    def __init__(self):
        self.calls, self.weights = [], {}

    def begin(self, version):
        self.calls.append("begin")

    def write(self, updates):
        for name, start, values in updates:
            self.calls.append(name)
            self.weights[name, start] = values.clone()

    def end(self, version):
        self.calls.append("end")


OP = TransferOp(0, "src", 1, "dst", (1, 0), (0, 2), (2, 3))
BUCKET = Bucket((OP, OP._replace(src_rank=2), OP._replace(dst_rank=0)), 0)
PARAMS = {"src": torch.arange(12.0).reshape(4, 3)}


def sender_of(plan, rank=0, params=PARAMS, dtype=torch.float32, transport="inline"):
    return BucketSender(
        plan,
        rank,
        lambda: params,
        PeerTransports(dict.fromkeys(range(2), transport), TransportOptions(CPU)),
        dtype,
        CPU,
    )


def values_of(message, ops, dtype=torch.float32, float32_params=frozenset()):
    data = torch.from_numpy(message.handle.data)
    layout = message_layout(ops, dtype, float32_params)
    return dict(zip(layout.ops, layout.views(data), strict=True))


def test_a_rank_exports_its_messages_by_receiver():
    exports = {rank: sender_of(ListedPlan((BUCKET,)), rank).export_bucket(0) for rank in range(3)}
    assert {rank: set(export) for rank, export in exports.items()} == {0: {0, 1}, 1: set(), 2: {1}}
    messages = [message for export in exports.values() for message in export.values()]
    assert [[s.src_rank for s in group] for group in route_messages(messages, [0, 1])] == [[0], [0, 2]]
    with raises("sync.wrong-rank", "rollout ranks [1]", "rank 0"):
        route_messages(messages, [1])
    assert torch.equal(values_of(exports[2][1], [BUCKET.ops[1]])[BUCKET.ops[1]], PARAMS["src"][1:3])


@pytest.mark.parametrize(
    ("params", "code", "named"),
    [
        ({}, "sync.parameter-missing", ["rank 0", "'src'"]),
        ({"src": torch.zeros(2, 3)}, "sync.parameter-shape", ["'src'", "rank 0", [2, 3]]),
    ],
)
def test_parameters_that_do_not_fit_the_plan_are_refused_and_buffers_are_freed(params, code, named):
    sender = sender_of(ListedPlan((BUCKET,)), params=params)
    with raises(code, *named):
        sender.export_bucket(0)
    assert not sender.pools["host"]._lent


@pytest.mark.parametrize("completed", [True, False])
def test_a_bucket_is_packed_into_the_memory_of_the_one_before_the_last(completed):
    sender = sender_of(ListedPlan((BUCKET,) * 4))
    for _ in range(2):
        places = [sender.export_bucket(index)[1].handle.data.ctypes.data for index in range(4)]
        assert len(set(places)) == 2 and places[:2] == places[2:]
        peak = sender.close(completed).peak_bytes
        assert peak == sender.pools["host"].peak_bytes == 2 * sender.pools["host"].size
        assert not sender.pools["host"]._lent


def test_a_transfer_is_finished_before_its_memory_is_reused(monkeypatch):
    """As gloo and NCCL need it, whose sends only start in an export."""
    sender, finished = sender_of(ListedPlan((BUCKET,) * 4)), []
    monkeypatch.setattr(sender.peers.transports["inline"], "finish", lambda handle: finished.append(id(handle)))
    sent = []
    for index in range(4):
        sent.append([id(message.handle) for message in sender.export_bucket(index).values()])
        assert finished == [handle for bucket in sent[: max(0, index - 1)] for handle in bucket]
    sender.close(completed=True)
    assert finished == [handle for bucket in sent for handle in bucket]


def test_weights_are_sent_in_the_engine_dtype_except_float32_parameters():
    bias = TransferOp(0, "bias", 1, "router.bias", (1,), (0,), (3,))
    ops = (OP, bias, OP._replace(src_start=(0, 1), shape=(3, 1)))
    params = {"src": torch.arange(12.0).reshape(4, 3) / 7, "bias": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    kept = frozenset(["router.bias", "bias"])
    sender = sender_of(ListedPlan((Bucket(ops, 0),), kept), params=params, dtype=torch.bfloat16)
    message = sender.export_bucket(0)[1]
    assert len(message.handle.data) == 6 * 2 + 3 * 4 + 3 * 2
    values = values_of(message, ops, torch.bfloat16, kept)
    assert torch.equal(values[bias], params["bias"][1:])
    assert torch.equal(values[OP], params["src"][1:3].bfloat16())
    assert torch.equal(values[ops[2]], params["src"][0:3, 1:2].bfloat16())


# ---- receiving


@pytest.fixture
def way():
    """A plan with one training rank, its sender, and a receiver with an open update."""
    weight_map, layout = weight_map_of(), ParallelLayout()
    plan = build_plan(weight_map, layout, RolloutLayout(), 400, 4)
    params = training_tensors(weight_map, layout, labelled_checkpoint(weight_map, torch.float32))[0]
    sender = BucketSender(
        plan, 0, lambda: params, PeerTransports({0: "inline"}, TransportOptions(CPU)), torch.float32, CPU
    )
    receiver = BucketReceiver(plan, 0, Engine(), PeerTransports({0: "inline"}, TransportOptions(CPU)), torch.float32)
    receiver.begin(1)
    return plan, sender, receiver


def test_missing_extra_and_short_messages_are_refused(way):
    _, sender, receiver = way
    (message,) = sender.export_bucket(0).values()
    for wrong in ([], [message, message], [message._replace(src_rank=7)]):
        with raises("sync.senders-differ", "rollout rank 0", sorted(each.src_rank for each in wrong), [0]):
            receiver.import_bucket(0, wrong)
    size = len(message.handle.data)
    short = message._replace(handle=message.handle._replace(data=message.handle.data[4:]))
    with raises("sync.message-size", f"{size - 4} bytes", f"the plan has {size}"):
        receiver.import_bucket(0, [short])


def test_memory_of_a_receiver_includes_messages_that_carry_their_bytes(way):
    _, sender, receiver = way
    messages = list(sender.export_bucket(0).values())
    receiver.import_bucket(0, messages)
    assert receiver.close(completed=True).peak_bytes == sum(len(message.handle.data) for message in messages) > 0


def test_receive_buffers_return_to_the_gpu_before_the_kv_cache_wakes(way, monkeypatch):
    calls = []
    monkeypatch.setattr("megarl.sharding.receiver.return_cached_memory", lambda: calls.append("returned"))
    way[2].close(completed=True)
    assert calls == ["returned"]


def test_an_update_ends_only_after_every_bucket_in_order(way):
    plan, sender, receiver = way
    count, calls = len(plan.buckets), receiver._weights.calls

    def exported(index):
        sender.close(completed=False)  # frees the buffers of wrong buckets
        return list(sender.export_bucket(index).values())

    receiver.import_bucket(0, exported(0))
    for wrong in (0, 2):
        with raises("sync.bucket-order", f"bucket {wrong}, expected 1"):
            receiver.import_bucket(wrong, exported(wrong))
    with raises("sync.incomplete", f"1 of {count} weight buckets", "version 1"):
        receiver.end(1)
    assert "end" not in calls
    receiver.begin(1)
    for index in range(count):
        receiver.import_bucket(index, exported(index))
    receiver.end(1)
    assert calls[-1] == "end"


def test_importing_the_plan_needs_no_torch():
    code = "import sys, megarl.sharding; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
