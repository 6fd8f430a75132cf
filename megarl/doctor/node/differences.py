"""What several machines have different, which each by itself cannot see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megarl.doctor.node.finding import Finding, NodeReport, Status

MUST_AGREE = ("python", "torch", "megatron-core", "ray", "transformers", "sglang", "NCCL", "driver", "CUDA", "GPUs")
"""Facts that break a run where they differ: Ray refuses another version of itself or Python, NCCL hangs."""

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0


class ClockOffset(NamedTuple):
    """How far a machine's clock is ahead of ours, and within what that is known; seconds."""

    ahead: float
    within: float


def differences(reports: Sequence[NodeReport]) -> list[Finding]:
    """Facts in which machines differ; one line that says so where they do not."""
    findings = []
    for fact in dict.fromkeys(name for report in reports for name in report.facts):
        hosts: dict[str, list[str]] = defaultdict(list)
        for report in reports:
            hosts[report.facts.get(fact, "none")].append(report.host)
        if len(hosts) > 1:
            found = "; ".join(f"{value} on {_named(where)}" for value, where in sorted(hosts.items()))
            remedy = f"give all nodes the same {fact}"
            findings.append(Finding(fact, Status.FAIL if fact in MUST_AGREE else Status.WARN, found, remedy))
    return findings or [
        Finding("same everywhere", Status.PASS, f"{len(reports)} nodes have the same versions and hardware")
    ]


def clocks(offsets: Mapping[str, ClockOffset]) -> Finding:
    """Whether the machines' clocks agree.

    Args:
        offsets: by host, against one and the same clock.
    """
    low, high = (pick(offsets, key=lambda host: offsets[host].ahead) for pick in (min, max))
    apart = offsets[high].ahead - offsets[low].ahead
    sure = max(apart - offsets[high].within - offsets[low].within, 0.0)
    found = f"at most {apart * 1e3:.1f} ms apart (± {(offsets[high].within + offsets[low].within) * 1e3:.1f} ms)"
    if sure < CLOCK_WARN_S:
        return Finding("clocks", Status.PASS, found)
    remedy = "synchronise them: chronyd or systemd-timesyncd on every node; timelines and checkpoints' times go wrong"
    status = Status.FAIL if sure >= CLOCK_FAIL_S else Status.WARN
    return Finding("clocks", status, f"{high} is ahead of {low} by {apart:.1f} s", remedy)


def offset(sent: float, told: float, received: float) -> ClockOffset:
    """Of a clock that was read between two readings of ours: it is ahead of their middle, give or take half of them."""
    return ClockOffset(told - (sent + received) / 2, (received - sent) / 2)


def _named(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
