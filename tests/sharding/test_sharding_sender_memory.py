"""Extra memory of a sync as the kernel counts it, in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

SENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from resharding_cases import weight_map_of
import torch
from megarl.models import ParallelLayout
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.sharding.transports.interface import PeerTransports, TransportOptions
from megarl.sharding.sender import BucketSender

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

layout, bucket = ParallelLayout(), int(sys.argv[2])
weight_map = weight_map_of("Qwen2MoeForCausalLM", layers=4, hidden=512, ffn=1024, heads=8, head_dim=64, vocab=8192)
plan = build_plan(weight_map, layout, RolloutLayout(2), bucket, 2)
params = {p.name: torch.ones(p.shape) for p in weight_map.megatron_params(layout, 0)}
peers = PeerTransports({0: "inline", 1: "inline"}, TransportOptions(torch.device("cpu")))
sender = BucketSender(plan, 0, lambda: params, peers, torch.bfloat16, torch.device("cpu"))

def sync():
    for index in range(len(plan.buckets)):
        sender.export_bucket(index)
    return sender.close(True).peak_bytes

torch.ones(3, 5)[:, 1:].bfloat16()  # what a first copy loads
before = peak()
reported = sync()
print(plan.nbytes, len(plan.buckets), peak() - before, reported)
"""
SLACK = 3 * 2**20
"""Memory of Python, the allocator and lazily loaded code."""


@pytest.mark.parametrize("megabytes", [4, 8])
def test_a_sender_needs_at_most_two_buckets(megabytes):
    bucket = megabytes * 2**20
    arguments = [sys.executable, "-c", SENDER, str(Path(__file__).parent), str(bucket)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    nbytes, buckets, used, reported = map(int, done.stdout.split())
    assert nbytes > 60e6 and buckets >= nbytes / (2 * bucket)
    assert bucket < reported <= 2 * bucket + 2 * 64
    assert used <= reported + SLACK
