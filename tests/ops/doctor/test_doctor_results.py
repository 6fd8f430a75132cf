"""Comparison of several machines: versions, hardware, clocks."""

import pytest

from megarl.ops.doctor.node import NodeReport, Status
from megarl.ops.doctor.node.results import ClockOffset, clock_offset, compare_clocks, compare_facts


def report(host, **facts):
    return NodeReport(host, [], facts)


def test_differing_node_is_named():
    nodes = [report(f"n{i}", torch="2.13.0", kernel="6.1") for i in range(5)]
    (same,) = compare_facts(nodes)
    assert same.status is Status.PASS and same.observation.startswith("5 nodes")
    nodes.append(report("n5", torch="2.12.0", kernel="6.2", driver="570.1"))
    results = {result.check: result for result in compare_facts(nodes)}
    assert results["torch"].status is Status.FAIL
    assert results["torch"].observation == "2.12.0 on n5; 2.13.0 on n0, n1, n2 and 2 more"
    assert results["kernel"].status is Status.WARN
    assert results["driver"].observation == "570.1 on n5; none on n0, n1, n2 and 2 more"


def test_clock_offset_from_one_round_trip():
    assert clock_offset(100.0, 103.5, 102.0) == ClockOffset(2.5, 1.0)


@pytest.mark.parametrize(
    ("ahead", "error", "status"),
    [(0.4, 0.001, Status.PASS), (5.0, 0.001, Status.WARN), (45.0, 0.001, Status.FAIL), (5.0, 3.0, Status.PASS)],
)
def test_clock_difference(ahead, error, status):
    result = compare_clocks({"a": ClockOffset(-0.2, error), "b": ClockOffset(ahead - 0.2, error)})
    assert result.status is status
    if status is not Status.PASS:
        assert result.observation.startswith(f"b is ahead of a by {ahead:.1f} s")
