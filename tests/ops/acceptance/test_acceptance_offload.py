"""The rates of the offload stage belong to copies that take place."""

from __future__ import annotations

from unittest import mock

from megarl.megatron.runtime.memory import HostBuffer
from megarl.ops.acceptance.bench import Bench
from megarl.ops.acceptance.offload import _Case
from megarl.ops.acceptance.results import StageReport


def test_each_measured_offload_copies_the_bytes_of_its_rate(tmp_path):
    """The first offload finds no copy in host memory; the second, which is reported, must copy as much."""
    copied: list[int] = []
    write = HostBuffer.write

    def count(buffer, data):
        copied.append(sum(map(len, data)))
        return write(buffer, data)

    with mock.patch.object(HostBuffer, "write", count):
        _, nbytes = _Case(Bench(StageReport("offload", "tiny"), tmp_path, "cpu", print))._figures
    parts = len(copied) // 2
    assert copied[:parts] == copied[parts:]
    assert sum(copied[parts:]) == nbytes
