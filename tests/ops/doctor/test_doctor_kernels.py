"""The doctor's check of kernels: a real observation of this machine, and results of given observations."""

from __future__ import annotations

import json
import os

import pytest

from megarl.base.nvidia_smi import Inventory
from megarl.ops.doctor.node import Needs, Status, check_node, kernels
from megarl.ops.doctor.node.kernels import KernelFacts, check_kernels, observe

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
    monkeypatch.setattr(kernels, "observe", lambda device: facts)
    return check_kernels(Needs(models=models), 8)


@pytest.mark.release(twin="tests/ops/doctor/test_doctor_kernels.py::test_a_process_with_a_broken_transformer_engine")
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
    monkeypatch.setattr(kernels.sys, "executable", "/bin/false")
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

    monkeypatch.setattr(kernels, "observe", note)
    assert bool(check_kernels(Needs(device=device), gpus)) == bool(calls) and seen == calls


def test_the_report_of_a_node_includes_kernels(monkeypatch):
    node = "megarl.ops.doctor.node"
    monkeypatch.setattr(f"{node}.CHECKS", ())
    monkeypatch.setattr(f"{node}._gpus", lambda needs: ([], Inventory("600", "13.0", [object()])))
    monkeypatch.setattr(f"{node}._facts", lambda inventory: {})

    def fail(device):
        raise ValueError("odd")

    monkeypatch.setattr(kernels, "observe", fail)
    (result,) = check_node(Needs()).results
    assert (result.check, result.observation) == ("kernels", "the check itself failed: ValueError: odd")
