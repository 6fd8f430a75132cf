"""Selection of kernels, and the call of torch's attention over packed sequences."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from family_cases import MODELS
from tiny_models import model_config

from megarl.megatron import init_runtime, shutdown_runtime
from megarl.megatron.layers import kernels
from megarl.megatron.layers import torch_layers as layers
from megarl.megatron.layers.kernels import PackedFlashKernel, flash_prefix_attention, flash_sink_attention
from megarl.megatron.layers.torch_layers import PackedAttention, PackedSequences
from megarl.megatron.runtime import versions
from megarl.models import ParallelLayout
from megarl.models.functional import sink_attention

DELTA_NETS = MODELS["qwen3_next_dense"]
RUNS = ((3, 4), (1, 5))
ENDS = torch.tensor([0, 4, 8, 12, 17], dtype=torch.int32)


def test_cpu_uses_torch_kernels():
    chosen = kernels.kernels(model_config("llama"), torch.device("cpu"), torch.bfloat16, trains=False)
    assert chosen == {"layers": "torch", "attention": "torch's, length by length"}


@pytest.mark.parametrize(
    ("usable", "experts"), [(True, "Transformer Engine's (grouped)"), (False, "one after the other")]
)
def test_kernel_of_the_experts_is_described(monkeypatch, usable, experts):
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", usable)
    chosen = kernels.kernels(model_config("mixtral"), torch.device("cuda"), torch.bfloat16, trains=True)
    assert list(chosen.items())[2:] == [("experts", experts), ("Adam", "torch's")]


@pytest.mark.parametrize(
    ("usable", "dtype", "expected"),
    [
        (True, torch.bfloat16, ("Transformer Engine", "Transformer Engine's")),
        (True, torch.float32, ("torch", "torch's, length by length")),
        (False, torch.bfloat16, ("torch", "torch's varlen_attn")),
        (False, torch.float32, ("torch", "torch's, length by length")),
    ],
)
def test_gpu_uses_the_best_usable_kernels(monkeypatch, usable, dtype, expected):
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", usable)
    chosen = kernels.kernels(model_config("llama"), torch.device("cuda"), dtype, trains=False)
    assert (chosen["layers"], chosen["attention"]) == expected
    windows = model_config(**MODELS["olmo3"])
    chosen = kernels.kernels(windows, torch.device("cuda"), dtype, trains=False)
    assert chosen["layers"] == expected[0] and chosen["attention"].startswith("torch's")


@pytest.fixture
def kernel_packages(monkeypatch, tmp_path):
    """Packages with the names and functions that megarl looks for."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("chunk_gated_delta_rule = print\n", encoding="utf-8")
    (tmp_path / "causal_conv1d.py").write_text("causal_conv1d_fn = print\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    kernels.installed_kernel.cache_clear()
    yield
    kernels.installed_kernel.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("fla", "causal_conv1d")]:
        del sys.modules[name]


def test_gated_delta_nets_use_torch_without_the_packages():
    for device in ("cpu", "cuda"):
        chosen = kernels.kernels(model_config(**DELTA_NETS), torch.device(device), torch.bfloat16, trains=False)
        assert chosen["gated delta nets"] == "torch's, in chunks"


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.bfloat16, "flash-linear-attention's (convolution: causal-conv1d's)"),
        ("cuda", torch.float32, "torch's, in chunks (convolution: causal-conv1d's)"),
        ("cpu", torch.bfloat16, "torch's, in chunks"),
    ],
)
def test_gated_delta_nets_use_the_packages_on_a_gpu(kernel_packages, device, dtype, expected):
    chosen = kernels.kernels(model_config(**DELTA_NETS), torch.device(device), dtype, trains=False)
    assert chosen["gated delta nets"] == expected


BROKEN = """
import importlib
part = importlib.import_module("transformer_engine.common")
raise {error}
"""
IMPORT_ENGINE = """
import importlib.util, logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
import torch
from megarl.megatron.layers import kernels
from megarl.megatron.runtime import versions
from megarl.megatron.runtime.process_groups import init_runtime
assert importlib.util.find_spec("transformer_engine") is None, "Megatron would find the broken package"
assert not [name for name in sys.modules if name.startswith("transformer_engine.")]
print(kernels.uses_transformer_engine(torch.device("cuda"), torch.bfloat16))
print(versions.transformer_engine_error())
"""


@pytest.mark.parametrize(
    "error",
    [
        "OSError('libcublas.so.13: cannot open')",
        pytest.param(
            "ImportError('undefined symbol: _ZN2at')",
            marks=pytest.mark.release(
                twin="tests/megatron/test_megatron_kernels.py::"
                "test_broken_transformer_engine_is_replaced_and_its_error_logged"
            ),
        ),
    ],
)
def test_broken_transformer_engine_is_replaced_and_its_error_logged(tmp_path, error):
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    for name, text in (("__init__", ""), ("common", ""), ("pytorch/__init__", BROKEN.format(error=error))):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ENGINE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    message = error.partition("(")[0] + ": " + error.split("'")[1]
    assert done.stdout.splitlines() == ["False", message]
    assert f"WARNING Transformer Engine is installed but cannot be imported, torch's layers replace it: {message}" in (
        done.stderr.splitlines()
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformer_engine.pytorch.optimizers.fused_adam", "Transformer Engine's (fused)"),
        ("apex.optimizers.fused_adam", "Apex's (fused)"),
        ("torch.optim.adamw", "torch's"),
    ],
)
def test_adam_kernel_is_named_by_package(module, name):
    assert kernels.adam_kernel(type("FusedAdam", (), {"__module__": module})) == name


def by_sequence(query, key, value, cu_seq_q, *_, scale, **__):
    """Result of torch's packed kernel, by attention that runs on a CPU."""
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (heads[start:stop].transpose(0, 1)[None] for heads in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def varlen_attn_of_torch_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    raise AssertionError("runs on a GPU only")


def varlen_attn_of_torch_2_10(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal=False,
    return_aux=None,
):
    raise AssertionError("runs on a GPU only")


def test_grouped_queries_are_requested_only_from_a_torch_that_takes_the_request():
    assert kernels.with_grouped_queries(varlen_attn_of_torch_2_10) is None
    assert kernels.with_grouped_queries(varlen_attn_of_torch_2_11) is varlen_attn_of_torch_2_11
    installed = kernels.packed_attention()
    if installed is None:
        pytest.skip("this torch has no attention over packed sequences")
    assert installed.keywords == {"enable_gqa": True}


@pytest.mark.parametrize("release", ["installed", "2.11"])
def test_packed_kernel_equals_one_call_per_length(monkeypatch, release):
    real = varlen_attn_of_torch_2_11
    if release == "installed":
        varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no packed attention")
        real = varlen.varlen_attn
    kernel: Callable[..., Any] = mock.create_autospec(real, side_effect=by_sequence)  # refuses other arguments
    query, key, value = (torch.randn(17, heads, 8) for heads in (4, 2, 2))
    turns = torch.randn(17, 1, 4)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ENDS,
        cu_seqlens_kv=ENDS,
        max_seqlen_q=5,
        max_seqlen_kv=5,
        runs=RUNS,
        rotation=(turns.cos(), turns.sin()),
    )
    attention = PackedAttention(mock.Mock(), softmax_scale=0.3)
    expected = attention(query, key, value, None, packed_seq_params=sequences)
    monkeypatch.setattr(layers, "fits_packed_attention", lambda query, value: True)
    monkeypatch.setattr(layers, "packed_attention", lambda: kernels.with_grouped_queries(kernel))
    torch.testing.assert_close(attention(query, key, value, None, packed_seq_params=sequences), expected)
    bound = inspect.signature(real).bind(*kernel.call_args.args, **kernel.call_args.kwargs)
    assert bound.arguments["window_size"] == (-1, 0) and bound.arguments["max_q"] == bound.arguments["max_k"] == 5


@pytest.mark.parametrize(
    ("nope", "value_dim", "attention"),
    [(8, 16, "torch's varlen_attn"), (8, 8, "torch's, length by length"), (312, 320, "torch's, length by length")],
)
def test_attention_is_described_by_the_widths_of_its_heads(monkeypatch, nope, value_dim, attention):
    """Latent attention may have wider keys than values, which torch's packed kernel does not accept."""
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", False)
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": 8, "v_head_dim": value_dim}
    model = model_config(**MODELS["deepseek_v3"] | sizes)
    assert kernels.kernels(model, torch.device("cuda"), torch.bfloat16, trains=False)["attention"] == attention


def test_import_of_packed_attention_imports_what_its_first_call_needs():
    has_dynamo = "print('torch._dynamo' in sys.modules)"
    start = "import sys; from megarl.megatron.layers import kernels"
    code = f"{start}; {has_dynamo}; kernels.packed_attention(); {has_dynamo}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["False", "True"]


def test_heads_without_flash_kernel_use_one_call_per_length():
    on_gpu = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(17, 4, 64))
    assert kernels.fits_packed_attention(on_gpu, on_gpu) == (kernels.packed_attention() is not None)
    for other in ({"is_cuda": False}, {"dtype": torch.float32}, {"shape": (17, 4, 12)}, {"shape": (17, 4, 264)}):
        wrong = mock.Mock(**{"is_cuda": True, "dtype": torch.bfloat16, "shape": (17, 4, 64), **other})
        assert not kernels.fits_packed_attention(wrong, wrong)
    assert not kernels.fits_packed_attention(on_gpu, mock.Mock(shape=(17, 4, 32)))


class FusionCase(NamedTuple):
    """Effect of a missing compiler on rank 1, on each rank: results of a compiled function, and the warnings."""

    results: list[float]
    warnings: list[str]


def fusions_without_compiler(place):
    warnings: list[str] = []
    error = "no C compiler" if place.rank == 1 else ""
    dynamo = importlib.import_module("torch._dynamo")
    runtime = init_runtime(ParallelLayout(dp=2), place.rank, 2, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    unused = dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "attention_output_gate"), False)
    plain, *fused = (mock.Mock(**unused | changed) for changed in ({}, *({name: True} for name in unused)))
    compiled = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: mock.Mock(side_effect=RuntimeError("no C")))
    try:
        with (
            mock.patch.object(kernels, "fusion_error", return_value=error),
            mock.patch.object(kernels.logger, "warning", lambda text, *args: warnings.append(text % args)),
        ):
            kernels.check_fusions(fused[0], runtime.device)  # a CPU: nothing to compile
            kernels.check_fusions(plain, torch.device("cuda"))
            before = dynamo.config.disable
            for config in fused:
                kernels.check_fusions(config, torch.device("cuda"))
        return FusionCase([float(before), float(dynamo.config.disable), compiled(torch.ones(())).item()], warnings)
    finally:
        dynamo.config.disable = False
        shutdown_runtime()


def test_fused_functions_run_uncompiled_on_all_ranks_if_one_lacks_a_compiler(pool):
    text = "torch cannot compile, so fused operations run one by one (`megarl doctor`); rank 1: no C compiler"
    assert pool.run(fusions_without_compiler, 2) == [
        FusionCase([0.0, 1.0, 2.0], [text] * 3),
        FusionCase([0.0, 1.0, 2.0], []),
    ]


@pytest.mark.parametrize(
    ("has_cuda", "missing", "copies"), [(True, [], False), (True, ["ninja"], True), (False, [], True)]
)
def test_recomputed_norms_copy_where_no_extension_can_be_built(monkeypatch, has_cuda, missing, copies):
    extension, random = object(), importlib.import_module("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(random, "_get_share_storage", lambda: extension, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(versions, "missing_extension_tools", lambda: missing)
    versions.patch_megatron_gaps()
    share = random._get_share_storage()
    assert (share is not extension) == copies
    if copies:
        emptied, recomputed = torch.ones(6), torch.arange(6.0)
        view = emptied.view(2, 3)
        emptied.untyped_storage().resize_(0)
        share(emptied, recomputed)
        assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        recomputed.fill_(9)
        assert emptied.sum() == 15  # a copy


class FlashKernelOfTheCpu(PackedFlashKernel):
    """Torch's flash kernel of a CPU, for one sequence with as many keys as queries."""

    def __init__(self):
        pass

    def forward(self, query, key, value):
        heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
        output, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=0.3)
        return output[0].transpose(0, 1), totals[0]

    def backward(self, grad, *saved):
        *parts, totals = saved
        heads = [part.transpose(0, 1)[None] for part in (grad, *parts)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, totals[None], 0.0, True, scale=0.3
        )
        query, key, value = (part[0].transpose(0, 1) for part in grads)
        return query, key, value


def test_a_flash_kernel_without_sinks_gives_exact_gradients_with_them():
    torch.manual_seed(0)
    tensors = [torch.randn(70, 3, 16, requires_grad=True) for _ in range(3)]
    sinks, seed = torch.randn(3, requires_grad=True), torch.randn(70, 3, 16)
    ours = flash_sink_attention(*tensors, sinks, FlashKernelOfTheCpu())
    query, key, value = (part.transpose(0, 1)[None] for part in tensors)
    expected = sink_attention(query, key, value, sinks, 0.3)[0].transpose(0, 1)
    torch.testing.assert_close(ours, expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(out, [*tensors, sinks], seed) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_torch_accepts_the_arguments_of_its_kernels_on_a_gpu(window):
    """Shapes and dtypes only, which torch computes without a GPU."""
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(17, heads, 64, **options) for heads in (4, 2, 2))
    sinks, ends = torch.randn(4, **options), torch.zeros(4, device="meta", dtype=torch.int32)
    output = flash_sink_attention(query, key, value, sinks, PackedFlashKernel(ends, ends, (8, 8), 0.3, window))
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
    grads = torch.autograd.grad(output.sum(), (query, key, value, sinks))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (query, key, value, sinks)]
    query = torch.randn(3, 4, 5, 64, **options)
    key, value = (torch.randn(3, 2, 9, 64, **options) for _ in range(2))
    assert flash_prefix_attention(query, key, value, sinks, 0.3, window).shape == query.shape
