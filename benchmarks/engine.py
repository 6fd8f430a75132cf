"""Tokens per second of the Megatron engine against plain transformers: same model, lengths and run.

    python benchmarks/engine.py                        one CPU thread, float32
    python benchmarks/engine.py --device cuda          bfloat16; model FLOPs utilization and peak memory

On a CPU, both sides compute the log-probs of every token, once without gradients and once with a backward pass. The
engine gets packed micro-batches. ``transformers`` gets rectangles padded to their longest row, in the order of the
data, at batch sizes of padded training. Ratios compare with the fastest of these. Only real tokens count.

Two rows are for reference. "batch 1" computes every sequence alone, without padding. Its distance to the engine is due
to the speed of the layers and to short matrix products. "sorted" pads rows of similar length together, which changes
the order of the training data.

"CPU ratio" compares processor time, which other processes on the machine do not affect. MFU is model FLOPs (6 per
parameter and token for forward and backward, 2 for forward, plus attention) over the matrix-product speed of the same
run, both by processor time.

A further table has a conversation of six turns that ends in eight branches, which leave it after different turns. It
compares a micro-batch that computes their common turns once with one that computes every branch from its beginning.

On a CUDA device only the engine is measured, on micro-batches of 8,192 packed tokens of dense models with 0.5 and 1.5
billion parameters. Neither Ray nor Transformer Engine is needed; the implementation of the layers is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from machine import benchmark_parser, parse_sizes, processor
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.data import plan_micro_batches
from megarl.megatron import (
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    PackedMicroBatch,
    PolicyOutputs,
    init_runtime,
    shutdown_runtime,
)
from megarl.models import ParallelLayout, read_model_config

LAYOUT = ParallelLayout()
OURS = "megarl, packed"
SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": False},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """Token ids of each sequence, and a name."""

    name: str
    rows: list[Tensor]

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(map(len, self.rows))

    def describe(self) -> str:
        """Return counts and lengths."""
        lengths = [len(row) for row in self.rows]
        return (
            f"{self.name}: {len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {self.tokens:,} in all"
        )


def build_mixes(count: int, vocab: int, seed: int) -> list[Mix]:
    """Build a mix of equal lengths and one of log-normal lengths (median 96, sigma 1, at most 1,024)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mixed = [min(1024, max(4, round(96 * rng.lognormvariate(0, 1)))) for _ in range(count)]
    return [
        Mix("equal lengths", [torch.randint(0, vocab, (256,)) for _ in range(count // 2)]),
        Mix("log-normal lengths", [torch.randint(0, vocab, (length,)) for length in mixed]),
    ]


def build_branches(vocab: int, seed: int, *, branches: int = 8, turns: int = 6, turn: int = 96) -> list[Tensor]:
    """Build branches of one conversation: a prompt and turns of equal length; branch ``n`` leaves it at turn ``n``."""
    generator = torch.Generator().manual_seed(seed)
    stem = torch.randint(0, vocab, (turn * (turns + 1),), generator=generator)
    leaves = [turn * (1 + number % turns) for number in range(branches)]
    return [
        torch.cat([stem[:leaf], torch.randint(0, vocab, (len(stem) - leaf,), generator=generator)]) for leaf in leaves
    ]


# ---- engines


def negative_log_likelihood(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict]:
    """Return the sum over tokens."""
    return -outputs.log_probs.sum(), {}


def pack(mix: Mix, max_tokens: int) -> list[PackedMicroBatch]:
    """Pack sequences; every token except the first is predicted."""
    groups = plan_micro_batches([len(row) for row in mix.rows], max_tokens=max_tokens)
    return [PackedMicroBatch.from_rows([(mix.rows[i][:1], mix.rows[i][1:]) for i in group]) for group in groups]


def engine_runner(engine: MegatronEngine, batches: Sequence[PackedMicroBatch], train: bool) -> Callable[[], object]:
    if train:
        return lambda: engine.forward_backward(batches, negative_log_likelihood)
    return lambda: engine.forward(batches)


def transformers_runner(model: Qwen2ForCausalLM, mix: Mix, size: int, ordered: bool, train: bool) -> Callable[[], None]:
    rows = sorted(mix.rows, key=len) if ordered else mix.rows
    batches = [padded(rows[start : start + size]) for start in range(0, len(rows), size)]

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            for ids, mask in batches:
                logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
                chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
                if train:
                    (-(chosen * mask[:, 1:]).sum()).backward()

    return run


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


# ---- measurement


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of this device's matrix product, the best of several sizes."""
    best = 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        runs = [timed(lambda a=a, b=b: a @ b, device) for _ in range(8)]
        best = max(best, *(2 * size**3 / (run.cpu if device.type == "cpu" else run.wall) for run in runs))
    return best


class Seconds(NamedTuple):
    """Wall and processor time of one run; on a CUDA device, ``cpu`` is meaningless."""

    wall: float
    cpu: float


def timed(run: Callable[[], object], device: torch.device) -> Seconds:
    """Return the seconds of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def medians(runners: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Seconds]:
    """Return the medians of each runner; each round runs all of them once, and the first round does not count."""
    taken: dict[str, list[Seconds]] = {name: [] for name in runners}
    for _ in range(repeats + 1):
        for name, run in runners.items():
            taken[name].append(timed(run, device))
    return {name: Seconds(*map(statistics.median, zip(*runs[1:], strict=True))) for name, runs in taken.items()}


def model_flops(shape: dict, lengths: Sequence[int], train: bool) -> float:
    """Return the model FLOPs: two per weight and token plus causal attention, three times that with backward."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv = hidden // heads * shape["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    attention = 2 * shape["num_hidden_layers"] * hidden * sum(length**2 for length in lengths)
    return (3 if train else 1) * (2 * weights * sum(lengths) + attention)


@contextmanager
def built_engine(shape: dict, device: str, dtype: torch.dtype, folder: Path) -> Iterator[MegatronEngine]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runtime = init_runtime(LAYOUT, 0, 1, "127.0.0.1", port, device=device)
    try:
        options = MegatronOptions(dtype=dtype, optimizer=OptimizerOptions(lr=1e-6))
        engine = MegatronEngine(read_model_config(folder), LAYOUT, runtime, options)
        engine.load_hf(folder)
        yield engine
    finally:
        shutdown_runtime()


def random_model(shape: dict, folder: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(max_position_embeddings=32768, **shape)).to(dtype)
    model.save_pretrained(folder)
    return model


# ---- reports


def on_cpu(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device, shape = torch.device("cpu"), SHAPES["small"]
    peak = matmul_flops(device, torch.float32)
    with tempfile.TemporaryDirectory() as name:
        model = random_model(shape, Path(name), torch.float32)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{processor()}, one thread, torch {torch.__version__}: matrix product {peak / 1e9:.0f} GFLOP/s")
        print(f"Qwen2, {parameters / 1e6:.1f} M parameters, float32, medians of {args.repeats}")
        with built_engine(shape, "cpu", torch.float32, Path(name)) as engine:
            for mix in build_mixes(args.sequences, shape["vocab_size"], args.seed):
                for train in (False, True):
                    report_cpu(engine, model, shape, mix, train, peak, args)
            report_branches(engine, build_branches(shape["vocab_size"], args.seed, turn=args.turn), args)


def report_branches(engine: MegatronEngine, rows: Sequence[Tensor], args: argparse.Namespace) -> None:
    """Print computed tokens and seconds of branches whose common turns are computed once, and of whole branches."""
    pairs = [(row[: args.turn], row[args.turn :]) for row in rows]
    batches = {
        "each branch whole": [PackedMicroBatch.from_rows(pairs)],
        "common turns once": [PackedMicroBatch.from_rows(pairs, share_prompts=True)],
    }
    planned = timed(lambda: PackedMicroBatch.from_rows(pairs, share_prompts=True), torch.device("cpu"))
    print(f"\n{len(rows)} branches of a conversation, {len(rows[0])} tokens each; packed in {1e3 * planned.cpu:.1f} ms")
    print(f"{'':<36}{'computed':>10}{'log-probs s':>14}{'and backward s':>16}")
    taken = [
        medians({n: engine_runner(engine, b, train) for n, b in batches.items()}, args.repeats, torch.device("cpu"))
        for train in (False, True)
    ]
    for name, (batch,) in batches.items():
        print(f"{name:<36}{batch.num_tokens:>10,}{taken[0][name].cpu:>14.2f}{taken[1][name].cpu:>16.2f}", flush=True)


def report_cpu(
    engine: MegatronEngine,
    model: Qwen2ForCausalLM,
    shape: dict,
    mix: Mix,
    train: bool,
    peak: float,
    args: argparse.Namespace,
) -> None:
    """Print one table: the engine, and transformers at each batch size."""
    runners = {OURS: engine_runner(engine, pack(mix, args.max_tokens), train)}
    for size in args.batch_sizes:
        runners[f"transformers, batch {size}"] = transformers_runner(model, mix, size, False, train)
    padded_names = list(runners)[1:]
    middle = args.batch_sizes[len(args.batch_sizes) // 2]
    runners[f"transformers, sorted, batch {middle}"] = transformers_runner(model, mix, middle, True, train)
    runners["transformers, batch 1, no padding"] = transformers_runner(model, mix, 1, False, train)
    taken = medians(runners, args.repeats, torch.device("cpu"))
    wall = min(taken[name].wall for name in padded_names)
    cpu = min(taken[name].cpu for name in padded_names)
    work = model_flops(shape, [len(row) for row in mix.rows], train)
    print(f"\n{'forward and backward' if train else 'log-probs'}, {mix.describe()}")
    print(f"{'':<36}{'tokens/s':>10}{'ratio':>8}{'CPU ratio':>11}{'MFU':>7}")
    for name, seconds in taken.items():
        ratios = f"{wall / seconds.wall:>8.2f}{cpu / seconds.cpu:>11.2f}{work / seconds.cpu / peak:>7.0%}"
        print(f"{name:<36}{mix.tokens / seconds.wall:>10,.0f}{ratios}", flush=True)


def on_cuda(args: argparse.Namespace) -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    torch.cuda.set_device(device)
    peak = matmul_flops(device, dtype)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: matrix product {peak / 1e12:.0f} TFLOP/s")
    print(f"{'model':<8}{'lengths':<22}{'what':<12}{'tokens/s':>11}{'TFLOP/s':>10}{'MFU':>7}{'peak GB':>9}")
    for size in args.sizes:
        shape = SHAPES[size]
        with tempfile.TemporaryDirectory() as name:
            random_model(shape, Path(name), dtype)
            with built_engine(shape, "cuda", dtype, Path(name)) as engine:
                for lengths in ([1024] * 8, [4096, 2048, 1024, 512, 256, 128, 64, 64]):
                    report_cuda(engine, size, lengths, peak, args)


def report_cuda(
    engine: MegatronEngine, size: str, lengths: Sequence[int], peak: float, args: argparse.Namespace
) -> None:
    """Print two lines: log-probs, and a step with forward, backward and optimizer."""
    shape, device = SHAPES[size], torch.device("cuda", 0)
    mix = Mix("", [torch.randint(0, shape["vocab_size"], (length,)) for length in lengths])
    batches = pack(mix, sum(lengths)) * args.micro_batches

    def step() -> None:
        engine.forward_backward(batches, negative_log_likelihood)
        engine.optimizer_step()

    for what, run, train in (("log-probs", engine_runner(engine, batches, False), False), ("step", step, True)):
        torch.cuda.reset_peak_memory_stats(device)
        time_s = medians({what: run}, args.repeats, device)[what].wall
        work = args.micro_batches * model_flops(shape, lengths, train)
        described = f"{len(lengths)} of {min(lengths)}-{max(lengths)}"
        print(
            f"{size:<8}{described:<22}{what:<12}{args.micro_batches * sum(lengths) / time_s:>11,.0f}"
            f"{work / time_s / 1e12:>10.0f}{work / time_s / peak:>7.0%}"
            f"{torch.cuda.max_memory_allocated(device) / 2**30:>9.1f}",
            flush=True,
        )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sequences", type=int, default=48, help="on a CPU: sequences of the mixed lengths")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8, 16], help="of transformers")
    parser.add_argument("--max-tokens", type=int, default=2048, help="on a CPU: tokens of a packed micro-batch")
    parser.add_argument("--turn", type=int, default=96, help="on a CPU: tokens of a turn of the branched conversation")
    parser.add_argument("--sizes", nargs="+", choices=("0.5b", "1.5b"), default=["0.5b", "1.5b"], help="on CUDA")
    parser.add_argument("--micro-batches", type=int, default=4, help="on CUDA: micro-batches of 8,192 tokens per step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parse_sizes(parser, sequences=2, batch_sizes=[2], max_tokens=256, repeats=1, turn=8)
    on_cuda(args) if args.device == "cuda" else on_cpu(args)


if __name__ == "__main__":
    main()
