"""The CPU bridge works, and a Megatron release with further CUDA calls is detected."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megarl.megatron.runtime import cuda_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")

# Parts of Megatron that training runs through.
ON_OUR_WAY = [
    "parallel_state.py",
    "distributed",
    "models/common/embeddings",
    "models/common/language_module",
    "models/gpt/gpt_model.py",
    "optimizer",
    "pipeline_parallel/p2p_communication.py",
    "pipeline_parallel/schedules.py",
    "tensor_parallel",
    "transformer/attention.py",
    "transformer/mlp.py",
    "transformer/module.py",
    "transformer/moe/experts.py",
    "transformer/moe/moe_layer.py",
    "transformer/moe/shared_experts.py",
    "transformer/moe/token_dispatcher.py",
    "transformer/transformer_block.py",
    "transformer/transformer_layer.py",
    "transformer/utils.py",
]
# Named there, but only by features that are off, or where nothing is computed.
OFF_OUR_WAY = {
    "BFloat16Tensor",
    "CUDAGraph",
    "Event",
    "FloatTensor",
    "HalfTensor",
    "OutOfMemoryError",
    "Stream",
    "_lazy_call",
    "_lazy_init",
    "amp",
    "default_generators",
    "default_stream",
    "device",
    "empty_cache",
    "get_device_capability",
    "get_device_properties",
    "graph",
    "is_current_stream_capturing",
    "random",
}


@pytest.fixture(scope="module", autouse=True)
def shim():
    cuda_on_cpu.install()


def test_device_cuda_is_cpu_inside_the_scope_only():
    with cuda_on_cpu.active():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").device.type == "cpu"
        assert torch.zeros(2).to(torch.device("cuda")).device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).cuda().device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_seeds_are_not_stored_for_absent_accelerators():
    """Without the bridge torch keeps each with a stack, for an initialization that never comes."""
    accelerators = [getattr(torch, name) for name in cuda_on_cpu.ABSENT_ACCELERATORS if hasattr(torch, name)]
    stored = [len(accelerator._queued_calls) for accelerator in accelerators]
    torch.manual_seed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    assert stored and stored == [len(accelerator._queued_calls) for accelerator in accelerators]


def test_tensor_types_are_cuda_inside_the_scope_only():
    with cuda_on_cpu.active():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1, dtype=torch.int64).type() == "torch.LongTensor"
        assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_scope_nests_and_belongs_to_a_thread():
    seen: list[str] = []

    def elsewhere():
        seen.append(torch.zeros(1).type())
        with cuda_on_cpu.active():
            seen.append(torch.zeros(1).type())

    with cuda_on_cpu.active():
        with cuda_on_cpu.active():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert seen == ["torch.FloatTensor", "torch.cuda.FloatTensor"]


def test_cuda_random_states_are_the_cpu_states():
    with cuda_on_cpu.active():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_every_cuda_call_of_megatron_is_replaced():
    """If this fails after an upgrade: replace the call in ``cuda_on_cpu.install``, or add it to ``OFF_OUR_WAY``."""
    uncovered: dict[str, set[str]] = {}
    for file in megatron_files():
        for name in cuda_names(ast.parse(file.read_text(encoding="utf-8"))):
            if name not in OFF_OUR_WAY and name not in cuda_on_cpu.REPLACED:
                uncovered.setdefault(name, set()).add(file.name)
    assert not uncovered


def test_scan_finds_cuda_calls():
    code = "import torch\nfrom torch.cuda import Stream as S\ntorch.cuda.synchronize()\nx = torch.cuda.nvtx.range_push"
    assert cuda_names(ast.parse(code)) == {"Stream", "synchronize", "nvtx"}
    assert len(megatron_files()) > 40


def test_importing_megatron_does_not_load_the_compiler():
    code = "import sys, megarl.megatron, torch; print('torch._inductor.compile_fx' in sys.modules, torch.compile)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("False <function compile at")
    assert "Warning" not in answer.stderr


def test_missing_function_raises(monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(cuda_on_cpu, "_installed", False)
    monkeypatch.delattr(random, "_set_cuda_rng_state")
    with pytest.raises(AttributeError, match="_set_cuda_rng_state no longer exists"):
        cuda_on_cpu.install()


def megatron_files():
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    files = []
    for entry in ON_OUR_WAY:
        path = root / entry
        assert path.exists(), f"megatron.core/{entry} has moved"
        files += [path] if path.is_file() else sorted(path.glob("*.py"))
    return files


def cuda_names(tree):
    """Names ``x`` of ``torch.cuda.x`` and ``from torch.cuda import x``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
            names.add(node.attr)
    return names
