"""Accuracy of bfloat16: log-probs, gradients and a training run per layout, and the parts that are float32.

    python benchmarks/precision.py                 about ten minutes on two cores
    python benchmarks/precision.py --steps 10 --only ablations

Everything is compared with float32 by transformers on the same random model. "transformers" is its own bfloat16 model:
no implementation in bfloat16 can be expected to be nearer. A run is policy-gradient steps with fixed advantages; its
columns compare the log-probs after the last step with those of the float32 run.

The second table computes in bfloat16 one part that megarl computes in float32. The third is about steps that are small
compared with the weights, as in reinforcement learning. The last rounds the weights of linear layers to blockwise FP8,
as the embedded engine does with rollout.quantization=fp8.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from machine import benchmark_parser, parse_sizes, processor
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from megarl.base.ports import free_port
from megarl.megatron import (
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    PackedMicroBatch,
    PolicyOutputs,
    init_runtime,
    shutdown_runtime,
)
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.number_formats import dequantize_blocks, quantize_blocks

SHAPE = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05,
         "tie_word_embeddings": False}  # fmt: skip
LAYOUTS = {
    "TP1": (ParallelLayout(), False),
    "TP2": (ParallelLayout(tp=2), False),
    "TP2 with SP": (ParallelLayout(tp=2), True),
    "PP2": (ParallelLayout(pp=2), False),
    "CP2": (ParallelLayout(cp=2), False),
    "DP2": (ParallelLayout(dp=2), False),
    "TP2 PP2": (ParallelLayout(tp=2, pp=2), False),
}
ROWS, PROMPT, RESPONSE, ROWS_PER_MICRO_BATCH = 16, 32, 64, 2
LR, SMALL_LR = 1e-4, 1e-6
BETAS, EPS = (0.9, 0.95), 1e-8


class Data(NamedTuple):
    """Token ids ``[rows, prompt + response]``, and the weight of each response token in the loss."""

    ids: Tensor
    weights: Tensor


class Result(NamedTuple):
    """Of a model: log-probs before and after training ``[tokens]``, and gradients by Hugging Face name."""

    before: Tensor
    gradients: dict[str, Tensor]
    after: Tensor


def make_data() -> Data:
    """Random rows, half with positive and half with negative advantage."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, PROMPT + RESPONSE), generator=generator)
    signs = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)
    return Data(ids, signs[:, None].expand(ROWS, RESPONSE) / (ROWS * RESPONSE))


# ---- transformers


def adam(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0)


def log_probs_of(model: Qwen2ForCausalLM, data: Data) -> Tensor:
    """Log-probs of the response tokens ``[rows, response]``, from float32 logits."""
    logits = model(data.ids).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, data.ids[:, PROMPT:, None]).squeeze(-1)


def backward(model: Qwen2ForCausalLM, data: Data) -> None:
    model.zero_grad()
    (-log_probs_of(model, data) * data.weights).sum().backward()


def by_transformers(path: Path, data: Data, dtype: torch.dtype, steps: int) -> Result:
    """Results of transformers; the optimizer has float32 weights, as in mixed precision."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    with torch.no_grad():
        before = log_probs_of(model, data).flatten()
    gradients = {}
    masters = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    optimizer = adam(list(masters.values()), LR)
    for step in range(steps):
        backward(model, data)
        for name, param in model.named_parameters():
            assert param.grad is not None
            masters[name].grad = param.grad.float()
        if step == 0:
            gradients = {name: master.grad.clone() for name, master in masters.items()}
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    with torch.no_grad():
        return Result(before, gradients, log_probs_of(model, data).flatten())


# ---- megarl


def loss(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -(outputs.log_probs * micro_batch.columns["weights"]).sum(), {}


def micro_batches(data: Data, rank: int = 0, ranks: int = 1) -> list[PackedMicroBatch]:
    batches = []
    for start in range(rank * ROWS_PER_MICRO_BATCH, ROWS, ranks * ROWS_PER_MICRO_BATCH):
        rows = range(start, start + ROWS_PER_MICRO_BATCH)
        pairs = [(data.ids[row, :PROMPT], data.ids[row, PROMPT:]) for row in rows]
        batches.append(PackedMicroBatch.from_rows(pairs, {"weights": torch.cat([data.weights[row] for row in rows])}))
    return batches


def run_rank(rank: int, name: str, path: Path, data: Data, port: int, steps: int, folder: Path) -> None:
    """Train on one rank, and save its part of the results."""
    torch.set_num_threads(1)
    layout, sequence_parallel = LAYOUTS[name]
    runtime = init_runtime(layout, rank, layout.world_size, "127.0.0.1", port, device="cpu", timeout_s=300)
    # With sharded optimizer states a rank has the sum of a part of the gradients only.
    optimizer = OptimizerOptions(
        lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=1e9, use_distributed_optimizer=False
    )
    options = MegatronOptions(dtype=torch.bfloat16, sequence_parallel=sequence_parallel, optimizer=optimizer)
    engine = MegatronEngine(read_model_config(path), layout, runtime, options)
    engine.load_hf(path)
    mine = micro_batches(data, runtime.coordinate.dp, layout.dp)

    def log_probs() -> Tensor | None:
        outputs = engine.forward(micro_batches(data))
        return None if outputs is None else torch.cat([output.log_probs for output in outputs])

    before, gradients = log_probs(), {}
    for step in range(steps):
        engine.forward_backward(mine, loss)
        if step == 0:
            named = engine.weights.parameters()
            gradients = {name: param.main_grad.float().clone() for name, param in named.items()}
        engine.optimizer_step()
    torch.save((before, gradients, log_probs()), folder / f"{rank}.pt")
    shutdown_runtime()


def by_megarl(name: str, path: Path, data: Data, steps: int) -> Result:
    """Results of a layout, each rank in a process."""
    layout, _ = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, path, data, free_port(), steps, Path(folder))
        mp.spawn(run_rank, arguments, nprocs=layout.world_size)
        ranks = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(layout.world_size)]
    before, _, after = next(rank for rank in reversed(ranks) if rank[0] is not None)
    return Result(before, hf_tensors(path, layout, [gradients for _, gradients, _ in ranks]), after)


def hf_tensors(path: Path, layout: ParallelLayout, ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by their Hugging Face names, from the shards of all ranks."""
    weight_map = WeightMap(read_model_config(path), False)
    whole = {name: torch.zeros(shape) for name, shape in weight_map.hf_shapes().items()}
    for rank, tensors in enumerate(ranks):
        for param in weight_map.megatron_params(layout, rank):
            for piece in param.pieces:
                source = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))
                target = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
                whole[piece.hf_name][target] = tensors[param.name][source]
    return whole


# ---- tables


def difference(ours: Tensor, exact: Tensor) -> str:
    """Mean and largest absolute difference."""
    error = (ours - exact).abs()
    return f"{error.mean():9.2e} {error.max():9.2e}"


def relative(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of the exact ones."""
    error = sum((ours[name] - tensor).square().sum() for name, tensor in exact.items())
    return float((error / sum(tensor.square().sum() for tensor in exact.values())) ** 0.5)


def print_layouts(path: Path, data: Data, steps: int, layouts: Sequence[str]) -> None:
    """Print a row per layout."""
    exact = by_transformers(path, data, torch.float32, steps)
    moved = (exact.after - exact.before).abs().mean()
    print(f"Distance to float32; {steps} steps move the log-probs by {moved:.2e} on average")
    print(f"{'bfloat16':26s}{'log-probs: mean, max':>22s}{'gradients':>12s}{'after training: mean, max':>28s}")
    rows: dict[str, Callable[[], Result]] = {
        "transformers": partial(by_transformers, path, data, torch.bfloat16, steps),
        **{f"megarl, {name}": partial(by_megarl, name, path, data, steps) for name in layouts},
    }
    for name, run in rows.items():
        ours = run()
        numbers = f"{difference(ours.before, exact.before):>22s}{relative(ours.gradients, exact.gradients):12.2e}"
        print(f"{name:26s}{numbers}{difference(ours.after, exact.after):>28s}", flush=True)


def print_outputs(path: Path, data: Data) -> None:
    """Print the error of log-probs with output layer or log-softmax in bfloat16, from the same hidden states."""
    exact = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    half = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=False)
    with torch.no_grad():
        wanted = log_probs_of(exact, data)
        hidden = half.model(data.ids).last_hidden_state[:, PROMPT - 1 : -1]
        weight, ids = half.lm_head.weight, data.ids[:, PROMPT:, None]
        logits = hidden @ weight.T
        single = hidden.float() @ weight.float().T

        def log_probs(values: Tensor) -> Tensor:
            return values.log_softmax(-1).gather(-1, ids).squeeze(-1).float()

        print("\nLog-probs from the same bfloat16 hidden states, distance to float32: mean, max")
        print(f"{'float32 output layer and log-softmax':46s}{difference(log_probs(single), wanted):>22s}")
        print(f"{'bfloat16 output layer, float32 log-softmax':46s}{difference(log_probs(logits.float()), wanted):>22s}")
        print(f"{'bfloat16 output layer and log-softmax':46s}{difference(log_probs(logits), wanted):>22s}")


def print_reduction(path: Path, data: Data, parts: int = 64) -> None:
    """Print the error of a sum of gradients in bfloat16, each of them in bfloat16."""
    half: Any = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=False)
    sums: dict[torch.dtype, dict[str, Tensor]] = {torch.float32: {}, torch.bfloat16: {}}
    generator = torch.Generator().manual_seed(2)
    for _ in range(parts):
        ids = torch.randint(0, SHAPE["vocab_size"], (1, PROMPT + RESPONSE), generator=generator)
        backward(half, Data(ids, torch.full((1, RESPONSE), 1.0 / RESPONSE)))
        for dtype, total in sums.items():
            for name, param in half.named_parameters():
                total[name] = total.get(name, torch.zeros_like(param, dtype=dtype)) + param.grad.to(dtype)
    rounded = {name: total.float() for name, total in sums[torch.bfloat16].items()}
    print(f"\nSum of {parts} gradients in bfloat16 instead of float32: relative error", end=" ")
    print(f"{relative(rounded, sums[torch.float32]):.2e}")


def print_weights(path: Path, data: Data, steps: int) -> None:
    """Print the movement of bfloat16 weights with and without float32 copies, at a small learning rate."""
    print(
        f"\n{steps} steps with learning rate {SMALL_LR:g}: log-probs move by (mean), weights that differ from the start"
    )
    for name, dtype, with_copies in (
        ("float32 weights", torch.float32, False),
        ("bfloat16 weights, float32 copies", torch.bfloat16, True),
        ("bfloat16 weights alone", torch.bfloat16, False),
    ):
        model = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        parameters = list(model.parameters())
        start = [param.detach().clone() for param in parameters]
        copies = [param.detach().float().clone() for param in parameters] if with_copies else parameters
        optimizer = adam(copies, SMALL_LR)
        with torch.no_grad():
            before = log_probs_of(model, data)
        for _ in range(steps):
            backward(model, data)
            for copy, param in zip(copies, parameters, strict=True):
                copy.grad = param.grad if param.grad is None else param.grad.to(copy.dtype)
            optimizer.step()
            if with_copies:
                with torch.no_grad():
                    for copy, param in zip(copies, parameters, strict=True):
                        param.copy_(copy)
        changed = sum(int((param != old).sum()) for param, old in zip(parameters, start, strict=True))
        with torch.no_grad():
            moved = (log_probs_of(model, data) - before).abs().mean()
        print(f"{name:46s}{moved:12.2e}{changed / sum(param.numel() for param in parameters):10.1%}")


def print_fp8(path: Path, data: Data) -> None:
    """Print the error of log-probs with linear layers in blockwise FP8, by the dtype of everything else."""
    exact = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    print("\nLinear layers in blockwise FP8, distance to float32: mean, max of log-probs")
    with torch.no_grad():
        wanted = log_probs_of(exact, data)
        for dtype in (torch.float32, torch.bfloat16):
            model = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
            print(f"{f'{dtype}'[6:]:46s}{difference(log_probs_of(model, data), wanted):>22s}")
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    dequantize_blocks(quantize_blocks(module.weight), module.weight)
            name = f"{dtype}"[6:] + ", linear layers in FP8"
            print(f"{name:46s}{difference(log_probs_of(model, data), wanted):>22s}")


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--only", choices=("layouts", "ablations"), help="one part")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parse_sizes(parser, steps=1, layouts=list(LAYOUTS)[:1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    data = make_data()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(path)
        print(f"{processor()}, torch {torch.__version__}; {SHAPE['num_hidden_layers']} layers, {ROWS} rows")
        if options.only != "ablations":
            print_layouts(path, data, options.steps, options.layouts)
        if options.only != "layouts":
            print_outputs(path, data)
            print_reduction(path, data)
            print_weights(path, data, options.steps)
            print_fp8(path, data)


if __name__ == "__main__":
    main()
