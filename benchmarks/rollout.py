"""Generated tokens per second of megarl's engines beside transformers, static and continuous: same run, same lengths.

    python benchmarks/rollout.py                          # with SGLang's rows where it is installed
    python benchmarks/rollout.py --model FOLDER --device cuda --dtype bfloat16 --scale 16

The model and the prompts are the quickstart's, or ``--model``'s with random prompts. Lengths are forced, so that all
generate the same number of tokens: ``quickstart`` gives each prompt the length of its true answer, ``log-normal`` draws
lengths with mean 32, at most 128 (times ``--scale``). Where several answers per prompt are asked for, all get the
prompt that often. megarl's engines and SGLang give log-probs, transformers none. ``sglang, driven directly`` is the
same running SGLang without megarl's adapter: their ratio is what the adapter costs.

Rounds alternate between all; the table shows medians. Machines are noisy: the ratios count, to the static batch size
marked ``best``; the one of CPU seconds, those of SGLang's processes included, is the same comparison without what other
processes on the machine took away. On a CPU each has one thread; SGLang has its front end in one process and the model
in another.
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
from machine import processor
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
    """A workload: prompts as token ids and, one per prompt, how many tokens to generate."""

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
    """The quickstart's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
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
    """Prompts of random tokens, for any model."""
    rng = random.Random(seed)
    drawn = [[rng.randrange(vocabulary) for _ in range(rng.randint(16, 64) * scale)] for _ in range(prompts)]
    repeated = [prompt for prompt in drawn for _ in range(samples)]
    return [Mix(f"log-normal, n={samples}", repeated, log_normal_lengths(len(repeated), scale, seed))]


class Seconds(NamedTuple):
    """What one run took."""

    wall: float
    cpu: float


def processor_seconds() -> float:
    """Of this process and all that it started."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def measure(runners: dict[str, Run], repeats: int) -> dict[str, Seconds]:
    """Medians of each runner; every round runs them all once, after one that does not count."""
    taken: dict[str, list[Seconds]] = {name: [] for name in runners}
    for number in range(repeats + 1):
        for name, run in runners.items():
            wall, cpu = time.perf_counter(), processor_seconds()
            run()
            if number:
                taken[name].append(Seconds(time.perf_counter() - wall, processor_seconds() - cpu))
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
    """megarl's engines with the folder's weights."""
    given = (folder, args.max_num_seqs, args.device, args.dtype)
    made = {"embedded": embedded_engine(*given)}
    if HAS_SGLANG:
        made["sglang"] = sglang_engine(*given)
    else:
        print("SGLang is not installed here: its rows are left out (launch/sglang_cpu.sh makes an environment with it)")
    yield made
    for engine in made.values():
        engine.shutdown()


def compare(args: argparse.Namespace, folder: Path, mixes: list[Mix]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval().to(args.device)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in place of the quickstart's")
    parser.add_argument("--prompts", type=int, default=128, help="what one of the quickstart's two replicas gets")
    parser.add_argument("--samples", type=int, default=2, help="answers per prompt in the n>1 mixes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64, 128, 256], help="of generate")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of the others")
    parser.add_argument("--scale", type=int, default=1, help="multiplies the log-normal lengths")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shape = (args.prompts, args.samples, args.scale, args.seed)
    if args.model:
        config = transformers.AutoConfig.from_pretrained(args.model)
        compare(args, args.model, random_mixes(config.vocab_size, *shape))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(TASK_BUILDER), "--out", folder], check=True, capture_output=True)
        compare(args, Path(folder) / "model", task_mixes(Path(folder), *shape))


if __name__ == "__main__":
    main()
