"""Checks of GPUs on recorded output of nvidia-smi; the tests run without a GPU."""

import json
import os
import stat
from pathlib import Path

import pytest

from megarl.base.nvidia_smi import Inventory, parse_inventory, parse_links
from megarl.ops.doctor.node import Needs, Status, check_node
from megarl.ops.doctor.node import gpus as gpu_checks
from megarl.ops.doctor.node.collective import Bandwidth, bandwidth_result, slowest
from megarl.ops.doctor.node.gpus import (
    KernelFacts,
    check_count,
    check_driver,
    check_gpus,
    check_health,
    check_kernels,
    check_links,
    observe,
)

HEALTHY = (Path(__file__).parent / "nvidia_smi.xml").read_text(encoding="utf-8")
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


def health_of(text):
    return {result.check: (result.status, result.observation) for result in check_health(parse_inventory(text))}


def test_healthy_machine():
    inventory = parse_inventory(HEALTHY)
    assert (inventory.driver, inventory.cuda, len(inventory.gpus)) == ("570.86.15", "12.8", 2)
    gpu = inventory.gpus[0]
    assert gpu.name == "NVIDIA H100 80GB HBM3" and gpu.total_bytes == 81559 * 2**20 and gpu.celsius == 41
    assert {status for status, _ in health_of(HEALTHY).values()} == {Status.PASS}
    assert check_count(inventory, Needs(devices=2)).observation == "2 x NVIDIA H100 80GB HBM3, 80 GiB each"


@pytest.mark.parametrize(
    ("before", "after", "check", "status", "found"),
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
def test_each_fault_is_reported_with_its_gpu(before, after, check, status, found):
    assert before in HEALTHY
    assert health_of(HEALTHY.replace(before, after, 1))[check] == (status, found)


def test_process_on_a_gpu_is_named():
    users = "<processes><process_info><pid>77</pid><process_name>python</process_name></process_info></processes>"
    busy = HEALTHY.replace("<used>5 MiB", "<used>4096 MiB")
    at = busy.rindex("<processes>")
    results = health_of(busy[:at] + users + busy[busy.rindex("</processes>") + len("</processes>") :])
    assert results["GPU memory used by others"] == (Status.FAIL, "GPU 1: 4.0 GiB by 77 python")


def test_throttle_reasons_of_older_drivers():
    older = HEALTHY.replace("clocks_event_reason", "clocks_throttle_reason")
    assert health_of(older)["GPU clocks"][0] is Status.PASS
    hot = older.replace("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", 1)
    assert health_of(hot)["GPU clocks"] == (Status.WARN, "GPU 0: hw_thermal_slowdown at 41 C")


def test_missing_or_mixed_gpus():
    inventory = parse_inventory(HEALTHY)
    lost = check_count(inventory, Needs(devices=8))
    assert lost.status is Status.FAIL and "the run needs 8 per node" in lost.observation
    mixed = check_count(parse_inventory(HEALTHY.replace("H100 80GB HBM3", "A100-SXM4-80GB", 1)), Needs())
    assert mixed.status is Status.WARN


@pytest.mark.parametrize(
    ("torch_cuda", "status"), [("12.8", Status.PASS), ("12.9", Status.WARN), ("13.0", Status.FAIL), (None, Status.FAIL)]
)
def test_driver_supports_torch_cuda(torch_cuda, status):
    assert check_driver(parse_inventory(HEALTHY), torch_cuda).status is status


def test_nvlink_between_gpus():
    links = parse_links(TOPOLOGY)
    assert links[0, 1] == links[1, 0] == "NV18" and links[0, 2] == "SYS" and len(links) == 6
    result = check_links(links)
    assert result.status is Status.WARN and result.observation == "no NVLink: 0-2 SYS, 1-2 NODE"
    complete = check_links({(0, 1): "NV18", (1, 0): "NV18"})
    assert complete.status is Status.PASS and complete.observation == "NVLink between all (NV18)"


def test_without_gpus():
    (result,), inventory = check_gpus(Needs(device="cpu"))
    assert result.status is Status.PASS and inventory is None


def test_driver_without_an_answer(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch' >&2\nexit 18\n", encoding="utf-8"
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (result,), _ = check_gpus(Needs())
    assert result.status is Status.FAIL and "ended with 18: Failed to initialize NVML" in result.observation
    monkeypatch.setenv("PATH", "")
    (result,), _ = check_gpus(Needs(device="cuda"))
    assert result.status is Status.FAIL and "no nvidia-smi" in result.observation


def test_bus_bandwidth_of_a_ring():
    measured = Bandwidth(4, 1000, 0.5, True)
    assert measured.bus == 3000  # each of four links carries 2 * 3 / 4 of the tensor
    worst = slowest([measured, measured._replace(seconds=2.0), measured._replace(correct=False)])
    assert worst.seconds == 2.0 and not worst.correct
    assert bandwidth_result(worst, "gloo", "here").status is Status.FAIL
    assert bandwidth_result(measured, "gloo", "here").status is Status.WARN
    assert bandwidth_result(measured._replace(size=10**9), "gloo", "here").status is Status.PASS


DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def write(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture
def models(tmp_path):
    """A missing folder, a dense model and a mixture of experts."""
    dense = write(tmp_path / "dense", DENSE)
    experts = write(tmp_path / "experts", {**DENSE, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]})
    return str(tmp_path / "missing"), dense, experts


def results_of(monkeypatch, facts, models=()):
    monkeypatch.setattr(gpu_checks, "observe", lambda device: facts)
    return check_kernels(Needs(models=models), 8)


@pytest.mark.release(twin="tests/ops/doctor/test_doctor_gpus.py::test_a_process_with_a_broken_transformer_engine")
def test_a_process_without_compiler_or_transformer_engine(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    facts = observe("cpu")
    assert not facts.usable and facts.import_error == "" and "/nowhere/g++" in facts.fusion_error


def test_a_process_with_a_broken_transformer_engine(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN2at')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    facts = observe("cpu")
    assert (facts.usable, facts.import_error) == (False, "ImportError: undefined symbol: _ZN2at")
    assert "/nowhere/g++" in facts.fusion_error


def test_a_process_that_fails_is_a_failed_check(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(gpu_checks.sys, "executable", "/bin/false")
    (result,) = check_kernels(Needs(), 1)
    assert (
        result.status is Status.FAIL
        and result.observation == "no message"
        and "import megarl.megatron" in result.remedy
    )


def test_all_kernels_work(monkeypatch, models):
    results = results_of(monkeypatch, KernelFacts(True, "", ""), models)
    assert [(result.check, result.status) for result in results] == [
        ("Transformer Engine", Status.PASS),
        ("compiled kernels", Status.PASS),
    ]


def test_missing_transformer_engine_matters_for_experts(monkeypatch, models):
    absent = KernelFacts(False, "", "")
    assert results_of(monkeypatch, absent, models[:2])[0].status is Status.PASS
    warned = results_of(monkeypatch, absent, models)[0]
    assert warned.status is Status.WARN and "experts of its layers one after the other" in warned.observation


def test_errors_are_shown_with_remedies(monkeypatch):
    engine, fusion = results_of(monkeypatch, KernelFacts(False, "OSError: libcublas", "Failed to find C compiler"))
    assert engine.status is fusion.status is Status.WARN
    assert engine.observation == "cannot be imported, torch's layers replace it: OSError: libcublas"
    assert "Failed to find C compiler" in fusion.observation and "python3-dev" in fusion.remedy


@pytest.mark.parametrize(("device", "gpus", "calls"), [("auto", 2, ["cuda"]), ("auto", 0, []), ("cpu", 2, [])])
def test_only_gpus_are_checked(monkeypatch, device, gpus, calls):
    seen: list[str] = []

    def note(device):
        seen.append(device)
        return KernelFacts(True, "", "")

    monkeypatch.setattr(gpu_checks, "observe", note)
    assert bool(check_kernels(Needs(device=device), gpus)) == bool(calls) and seen == calls


def test_the_report_of_a_node_includes_kernels(monkeypatch):
    node = "megarl.ops.doctor.node"
    monkeypatch.setattr(f"{node}.CHECKS", ())
    monkeypatch.setattr(f"{node}._gpus", lambda needs: ([], Inventory("600", "13.0", [object()])))
    monkeypatch.setattr(f"{node}._facts", lambda inventory: {})

    def fail(device):
        raise ValueError("odd")

    monkeypatch.setattr(gpu_checks, "observe", fail)
    (result,) = check_node(Needs()).results
    assert (result.check, result.observation) == ("kernels", "the check itself failed: ValueError: odd")
