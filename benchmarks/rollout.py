"""Generated tokens per second of megarl's engines against transformers, static and continuous, in one run.

    python benchmarks/rollout.py                          # with SGLang's rows if it is installed
    python benchmarks/rollout.py --model FOLDER --device cuda --dtype bfloat16 --scale 16

Model and prompts are the quickstart's, or ``--model`` with random prompts. Lengths are forced, so that all engines
generate the same number of tokens: ``quickstart`` gives each prompt the length of its true answer, ``log-normal`` draws
lengths with mean 32, at most 128 (times ``--scale``). With several samples per prompt, all engines get the prompt that
many times. megarl's engines and SGLang return log-probs, transformers does not. ``sglang, driven directly`` is the same
running SGLang without megarl's adapter: the ratio is the cost of the adapter.

Rounds alternate between all engines; the table shows medians. Machines are noisy, so use the ratios to the static batch
size marked ``best``. The ratio of CPU seconds, with SGLang's processes, is unaffected by other processes on the
machine. On a CPU, each engine has one thread; SGLang has its front end in one process and the model in another.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# One thread for every library, those included that read this at import.
os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import pyarrow.parquet as pq
import torch
import transformers
from machine import benchmark_parser, parse_sizes, processor
from rollout_peers import (
    HAS_SGLANG,
    Run,
    continuous_run,
    embedded_engine,
    engine_run,
    generate_run,
    sglang_engine,
    sglang_run,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.rollout import RolloutEngine

STATIC = "transformers generate, batch"
TASK_BUILDER = Path(__file__).resolve().parents[1] / "tools" / "make_arithmetic.py"


@dataclass(frozen=True)
class Mix:
    """A workload: prompts as token ids, and the number of tokens to generate for each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]

    def describe(self) -> str:
        """Counts and lengths."""
        sizes = [len(prompt) for prompt in self.prompts]
        return (
            f"{self.name}: {len(sizes)} sequences, prompts {min(sizes)} to {max(sizes)} tokens, "
            f"answers {min(self.lengths)} to {max(self.lengths)}, mean {statistics.mean(self.lengths):.1f}"
        )


def log_normal_lengths(count: int, scale: int, seed: int) -> list[int]:
    rng, spread = random.Random(seed), 0.8
    drawn = [round(rng.lognormvariate(math.log(32 * scale) - spread**2 / 2, spread)) for _ in range(count)]
    return [min(128 * scale, max(1, length)) for length in drawn]


def task_mixes(task: Path, prompts: int, samples: int, scale: int, seed: int) -> list[Mix]:
    """Return mixes with the quickstart's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(task / "model", trust_remote_code=False)
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()[: prompts * samples]
    encoded = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    answers = [len(tokenizer(row["reward_model"]["ground_truth"])["input_ids"]) + 1 for row in rows]
    log_normal = log_normal_lengths(len(rows), scale, seed)
    repeated = [prompt for prompt in encoded[:prompts] for _ in range(samples)]
    return [
        Mix(f"quickstart, n={samples}", repeated, [n for n in answers[:prompts] for _ in range(samples)]),
        Mix("quickstart, n=1", encoded, answers),
        Mix(f"log-normal, n={samples}", repeated, log_normal),
        Mix("log-normal, n=1", encoded, log_normal),
    ]


def random_mixes(vocabulary: int, prompts: int, samples: int, scale: int, seed: int) -> list[Mix]:
    """Return mixes with prompts of random tokens, for any model."""
    rng = random.Random(seed)
    drawn = [[rng.randrange(vocabulary) for _ in range(rng.randint(16, 64) * scale)] for _ in range(prompts)]
    repeated = [prompt for prompt in drawn for _ in range(samples)]
    return [Mix(f"log-normal, n={samples}", repeated, log_normal_lengths(len(repeated), scale, seed))]


class Seconds(NamedTuple):
    """Wall and processor time of one run."""

    wall: float
    cpu: float


CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The unit in which the kernel counts processor time: a short run may take none."""


def processor_seconds() -> float:
    """Return the processor time of this process and its children."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def measure(runners: dict[str, Run], repeats: int) -> dict[str, Seconds]:
    """Return medians of each runner; every round runs all of them once, after one warm-up round."""
    taken: dict[str, list[Seconds]] = {name: [] for name in runners}
    for number in range(repeats + 1):
        for name, run in runners.items():
            wall, cpu = time.perf_counter(), processor_seconds()
            run()
            if number:
                taken[name].append(Seconds(time.perf_counter() - wall, max(processor_seconds() - cpu, CLOCK_TICK_S)))
    return {name: Seconds(*map(statistics.median, zip(*runs, strict=True))) for name, runs in taken.items()}


def report(mix: Mix, seconds: dict[str, Seconds]) -> None:
    best = min([name for name in seconds if name.startswith(STATIC)], key=lambda name: seconds[name])
    print(f"\n{mix.describe()}")
    print(f"{'engine':<36}{'tokens/s':>10}{'ratio':>8}{'CPU ratio':>11}")
    for name, taken in seconds.items():
        rate, wall, cpu = sum(mix.lengths) / taken.wall, seconds[best].wall / taken.wall, seconds[best].cpu / taken.cpu
        mark = "  best" if name == best else ""
        print(f"{name:<36}{rate:>10,.0f}{wall:>8.2f}{cpu:>11.2f}{mark}", flush=True)
    if "sglang" in seconds:
        share = seconds["sglang, driven directly"].wall / seconds["sglang"].wall
        print(f"sglang behind megarl's contract: {share:.2f} of the tokens/s of SGLang driven directly")


@contextmanager
def engines(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, RolloutEngine]]:
    """Build megarl's engines with the folder's weights."""
    arguments = (folder, args.max_num_seqs, args.device, args.dtype)
    result = {"embedded": embedded_engine(*arguments)}
    if HAS_SGLANG:
        result["sglang"] = sglang_engine(*arguments)
    else:
        print("SGLang is not installed: its rows are skipped (launch/sglang_cpu.sh creates an environment with it)")
    yield result
    for engine in result.values():
        engine.shutdown()


def compare(args: argparse.Namespace, folder: Path, mixes: list[Mix]) -> None:
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), trust_remote_code=False)
        .eval()
        .to(args.device)
    )
    parameters = sum(p.numel() for p in model.parameters())
    where = processor() + ", one thread" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{type(model).__name__}, {parameters / 1e6:.2f} M parameters, {args.dtype}, medians of {args.repeats}")
    with engines(args, folder) as ours:
        for mix in mixes:
            runners = {name: engine_run(engine, mix.prompts, mix.lengths) for name, engine in ours.items()}
            if "sglang" in ours:
                runners["sglang, driven directly"] = sglang_run(ours["sglang"], mix.prompts, mix.lengths)
            for size in args.batch_sizes:
                runners[f"{STATIC} {size}"] = generate_run(model, mix.prompts, mix.lengths, size)
            like = next(model.parameters())
            with continuous_run(folder, mix.prompts, mix.lengths, args.max_num_seqs, like) as run:
                runners["transformers continuous batching"] = run
                report(mix, measure(runners, args.repeats))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: the quickstart's model)")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of one of the quickstart's two replicas")
    parser.add_argument("--samples", type=int, default=2, help="samples per prompt in the n>1 mixes")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[16, 64, 128, 256], help="batch sizes of generate"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="maximum running sequences of the other engines")
    parser.add_argument("--scale", type=int, default=1, help="multiplies the log-normal lengths")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parse_sizes(parser, prompts=2, samples=2, batch_sizes=[2], max_num_seqs=4, repeats=1)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shape = (args.prompts, args.samples, args.scale, args.seed)
    if args.model:
        config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=False)
        compare(args, args.model, random_mixes(config.vocab_size, *shape))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(TASK_BUILDER), "--out", folder], check=True, capture_output=True)
        mixes = task_mixes(Path(folder), *shape)
        compare(args, Path(folder) / "model", mixes[:1] if args.tiny else mixes)


if __name__ == "__main__":
    main()
