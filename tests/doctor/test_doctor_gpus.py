"""What is read out of nvidia-smi, by texts in its own form; there is no GPU where the tests run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megarl.doctor.node import Needs, Status
from megarl.doctor.node.collective import Bandwidth, finding_of, slowest
from megarl.doctor.node.gpus import (
    check_gpus,
    count_finding,
    driver_finding,
    health_findings,
    inventory,
    links,
    links_finding,
)

HEALTHY = (Path(__file__).parent / "nvidia_smi.xml").read_text()
TOPOLOGY = """\
	\x1b[4mGPU0	GPU1	GPU2	NIC0	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV18	SYS	PIX	0-47	0		N/A
GPU1	NV18	 X 	NODE	SYS	0-47	0		N/A
GPU2	SYS	NODE	 X 	SYS	48-95	1		N/A
NIC0	PIX	SYS	SYS	 X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def health(text: str) -> dict[str, tuple[Status, str]]:
    return {finding.check: (finding.status, finding.found) for finding in health_findings(inventory(text))}


def test_a_healthy_machine() -> None:
    there = inventory(HEALTHY)
    assert (there.driver, there.cuda, len(there.gpus)) == ("570.86.15", "12.8", 2)
    gpu = there.gpus[0]
    assert gpu.name == "NVIDIA H100 80GB HBM3" and gpu.total_bytes == 81559 * 2**20 and gpu.celsius == 41
    assert {status for status, _ in health(HEALTHY).values()} == {Status.PASS}
    assert count_finding(there, Needs(devices=2)).found == "2 x NVIDIA H100 80GB HBM3, 80 GiB each"


@pytest.mark.parametrize(
    ("before", "after", "check", "status", "told"),
    [
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "GPU memory", Status.FAIL, "GPU 0: 2 uncorrectable errors"),
        ("row_failure>No", "row_failure>Yes", "GPU memory", Status.FAIL, "GPU 0: row remapping failure"),
        ("row_pending>No", "row_pending>Yes", "GPU memory", Status.WARN, "GPU 0: row remapping pending"),
        ("hw_slowdown>Not Active", "hw_slowdown>Active", "GPU clocks", Status.WARN, "GPU 0: hw_slowdown at 41 C"),
        ("mode>Enabled", "mode>Disabled", "GPU modes", Status.WARN, "GPU 0: persistence mode is off"),
        ("_mig>Disabled", "_mig>Enabled", "GPU modes", Status.FAIL, "GPU 0: MIG is on"),
        ("Default", "Exclusive_Process", "GPU modes", Status.FAIL, "GPU 0: only one process may use it"),
        ("<used>1 MiB", "<used>20480 MiB", "GPU memory used by others", Status.FAIL, "GPU 0: 20.0 GiB"),
    ],
)
def test_each_fault_is_told_of_its_gpu(before: str, after: str, check: str, status: Status, told: str) -> None:
    assert before in HEALTHY
    assert health(HEALTHY.replace(before, after, 1))[check] == (status, told)


def test_who_uses_a_gpu_is_named() -> None:
    users = "<processes><process_info><pid>77</pid><process_name>python</process_name></process_info></processes>"
    busy = HEALTHY.replace("<used>5 MiB", "<used>4096 MiB")
    at = busy.rindex("<processes>")
    told = health(busy[:at] + users + busy[busy.rindex("</processes>") + len("</processes>") :])
    assert told["GPU memory used by others"] == (Status.FAIL, "GPU 1: 4.0 GiB by 77 python")


def test_older_drivers_call_it_throttling() -> None:
    older = HEALTHY.replace("clocks_event_reason", "clocks_throttle_reason")
    assert health(older)["GPU clocks"][0] is Status.PASS
    hot = older.replace("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", 1)
    assert health(hot)["GPU clocks"] == (Status.WARN, "GPU 0: hw_thermal_slowdown at 41 C")


def test_fewer_or_mixed_gpus() -> None:
    there = inventory(HEALTHY)
    lost = count_finding(there, Needs(devices=8))
    assert lost.status is Status.FAIL and "the run needs 8 per node" in lost.found
    mixed = count_finding(inventory(HEALTHY.replace("H100 80GB HBM3", "A100-SXM4-80GB", 1)), Needs())
    assert mixed.status is Status.WARN


@pytest.mark.parametrize(
    ("torch_cuda", "status"), [("12.8", Status.PASS), ("12.9", Status.WARN), ("13.0", Status.FAIL), (None, Status.FAIL)]
)
def test_driver_and_torch(torch_cuda: str | None, status: Status) -> None:
    assert driver_finding(inventory(HEALTHY), torch_cuda).status is status


def test_links_between_gpus() -> None:
    found = links(TOPOLOGY)
    assert found[0, 1] == found[1, 0] == "NV18" and found[0, 2] == "SYS" and len(found) == 6
    finding = links_finding(found)
    assert finding.status is Status.WARN and finding.found == "no NVLink: 0-2 SYS, 1-2 NODE"
    whole = links_finding({(0, 1): "NV18", (1, 0): "NV18"})
    assert whole.status is Status.PASS and whole.found == "NVLink between all (NV18)"


def test_without_gpus() -> None:
    (fine,), there = check_gpus(Needs(device="cpu"))
    assert fine.status is Status.PASS and there is None


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch' >&2\nexit 18\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (finding,), _ = check_gpus(Needs())
    assert finding.status is Status.FAIL and "ended with 18: Failed to initialize NVML" in finding.found
    monkeypatch.setenv("PATH", "")
    (finding,), _ = check_gpus(Needs(device="cuda"))
    assert finding.status is Status.FAIL and "no nvidia-smi" in finding.found


def test_bus_bandwidth_of_a_ring() -> None:
    done = Bandwidth(4, 1000, 0.5, True)
    assert done.bus == 3000  # each of four links carries 2 * 3 / 4 of the tensor
    worst = slowest([done, done._replace(seconds=2.0), done._replace(right=False)])
    assert worst.seconds == 2.0 and not worst.right
    assert finding_of(worst, "gloo", "here").status is Status.FAIL
    assert finding_of(done, "gloo", "here").status is Status.WARN
    assert finding_of(done._replace(size=10**9), "gloo", "here").status is Status.PASS
