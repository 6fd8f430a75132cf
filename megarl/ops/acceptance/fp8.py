"""FP8 matrix products of the device, which megarl does not train with: their error and their gain over bfloat16."""

from __future__ import annotations

import importlib

import torch

from megarl.ops.acceptance.bench import Bench, UnsupportedError, needs_package, within
from megarl.ops.acceptance.results import Result, Verdict

CAPABILITY = (8, 9)  # smallest compute capability with FP8 products (Ada)
ERROR_LIMIT = 0.05  # relative error of a product of normal numbers: e4m3 has three bits of mantissa
SIZE = 8192


def run(bench: Bench) -> None:
    """Measure torch's scaled product, and a layer of Transformer Engine."""

    def product() -> Result:
        _require_fp8(bench)
        a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        one = torch.ones((), device="cuda")
        left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        exact, mine = (a @ b).float(), multiply().float()
        error = float((mine - exact).norm() / exact.norm())
        seconds, plain = bench.seconds(multiply), bench.seconds(lambda: a @ b)
        flops = 2 * SIZE**3
        note = f"{flops / seconds / 1e12:.0f} TFLOP/s, {plain / seconds:.2f} times bfloat16"
        return within(error, ERROR_LIMIT, "relative error", note)

    def layer() -> Result:
        _require_fp8(bench)
        needs_package("transformer-engine")
        te = importlib.import_module("transformer_engine.pytorch")

        linear = te.Linear(4096, 4096, bias=False, params_dtype=torch.bfloat16).cuda()
        inputs = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)

        def compute(enabled: bool) -> torch.Tensor:
            with torch.no_grad(), te.fp8_autocast(enabled=enabled):
                output: torch.Tensor = linear(inputs)
                return output

        exact, mine = compute(False).float(), compute(True).float()
        error = float((mine - exact).norm() / exact.norm())
        ratio = bench.seconds(lambda: compute(False)) / bench.seconds(lambda: compute(True))
        return within(error, ERROR_LIMIT, "relative error", f"{ratio:.2f} times bfloat16")

    bench.check("torch's scaled product", product)
    bench.check("linear layer of Transformer Engine", layer)
    bench.check("training", lambda: Result("", Verdict.INFO, note="megarl trains in bfloat16 or float32"))


def _require_fp8(bench: Bench) -> None:
    if bench.device.type == "cpu":
        raise UnsupportedError("FP8 needs a GPU")
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        raise UnsupportedError(f"compute capability {capability}, FP8 needs {CAPABILITY}")
