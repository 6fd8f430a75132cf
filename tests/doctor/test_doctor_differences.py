"""What several machines have different."""

from __future__ import annotations

import pytest

from megarl.doctor.node import NodeReport, Status
from megarl.doctor.node.differences import ClockOffset, clocks, differences, offset


def report(host: str, **facts: str) -> NodeReport:
    return NodeReport(host, [], facts)


def test_the_odd_one_is_named() -> None:
    nodes = [report(f"n{i}", torch="2.13.0", kernel="6.1") for i in range(5)]
    (same,) = differences(nodes)
    assert same.status is Status.PASS and same.found.startswith("5 nodes")
    nodes.append(report("n5", torch="2.12.0", kernel="6.2", driver="570.1"))
    found = {finding.check: finding for finding in differences(nodes)}
    assert found["torch"].status is Status.FAIL
    assert found["torch"].found == "2.12.0 on n5; 2.13.0 on n0, n1, n2 and 2 more"
    assert found["kernel"].status is Status.WARN
    assert found["driver"].found == "570.1 on n5; none on n0, n1, n2 and 2 more"


def test_offset_of_a_clock_that_is_read_between_two_readings_of_ours() -> None:
    assert offset(100.0, 103.5, 102.0) == ClockOffset(2.5, 1.0)


@pytest.mark.parametrize(
    ("ahead", "within", "status"),
    [(0.4, 0.001, Status.PASS), (5.0, 0.001, Status.WARN), (45.0, 0.001, Status.FAIL), (5.0, 3.0, Status.PASS)],
)
def test_clocks(ahead: float, within: float, status: Status) -> None:
    finding = clocks({"a": ClockOffset(-0.2, within), "b": ClockOffset(ahead - 0.2, within)})
    assert finding.status is status
    if status is not Status.PASS:
        assert finding.found.startswith(f"b is ahead of a by {ahead:.1f} s")
