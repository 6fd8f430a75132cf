"""Generated tokens per second of the embedded engine and of transformers' ``generate``: same run, one thread each.

    python benchmarks/rollout_engine.py

The model and the prompts are the quickstart's. Lengths are forced, so both sides generate the same number of tokens:
``quickstart`` gives each prompt the length of its true answer, ``log-normal`` draws lengths with mean 32, at most 128.
Where several answers per prompt are asked for, both sides get the prompt that often. ``generate`` is measured at
several batch sizes, in the order of the data, without log-probs, which the engine always returns. Rounds alternate
between all contestants; the table shows medians. Machines are noisy: the ratios count, to the static batch size marked
``best``; the one of CPU seconds is the same comparison without what other processes on the machine took away.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# One thread for every library, those included that read this at import.
os.environ["OMP_NUM_THREADS"] = "1"

import pyarrow.parquet as pq
import torch
import transformers
from machine import processor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine

OURS = "embedded"
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


class ForcedLengths(StoppingCriteria):
    """Ends each row of a batch after its own number of tokens."""

    def __init__(self, lengths: torch.Tensor, prompt_width: int) -> None:
        self.lengths, self.prompt_width = lengths, prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Which rows are done."""
        return self.lengths <= input_ids.shape[1] - self.prompt_width


def transformers_runner(model: torch.nn.Module, mix: Mix, batch_size: int) -> Callable[[], None]:
    def run_batch(prompts: Sequence[list[int]], lengths: torch.Tensor) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=int(lengths.max()),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([ForcedLengths(lengths, width)]),
        )
        assert out.shape[1] == width + int(lengths.max())

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(mix.prompts), batch_size):
            chosen = slice(start, start + batch_size)
            run_batch(mix.prompts[chosen], torch.tensor(mix.lengths[chosen]))

    return run


def engine_runner(folder: Path, mix: Mix, max_num_seqs: int) -> Callable[[], None]:
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=max_num_seqs))
    engine.load_hf(str(folder))
    requests = [
        Request(str(i), prompt, SamplingParams(length, ignore_eos=True), i)
        for i, (prompt, length) in enumerate(zip(mix.prompts, mix.lengths, strict=True))
    ]

    def run() -> None:
        completions = engine.generate(requests)
        assert [len(c.token_ids) for c in completions] == mix.lengths

    return run


def build_mixes(task: Path, prompts: int, samples: int, seed: int) -> list[Mix]:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()[: prompts * samples]
    encoded = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    answers = [len(tokenizer(row["reward_model"]["ground_truth"])["input_ids"]) + 1 for row in rows]
    rng = random.Random(seed)
    spread = 0.8
    log_normal = [round(rng.lognormvariate(math.log(32) - spread**2 / 2, spread)) for _ in rows]
    log_normal = [min(128, max(1, length)) for length in log_normal]
    repeated = [prompt for prompt in encoded[:prompts] for _ in range(samples)]
    return [
        Mix(f"quickstart, n={samples}", repeated, [n for n in answers[:prompts] for _ in range(samples)]),
        Mix("quickstart, n=1", encoded, answers),
        Mix(f"log-normal, n={samples}", repeated, log_normal),
        Mix("log-normal, n=1", encoded, log_normal),
    ]


class Seconds(NamedTuple):
    """What one run took."""

    wall: float
    cpu: float


def measure(runners: dict[str, Callable[[], None]], repeats: int) -> dict[str, Seconds]:
    """Medians of each runner; every round runs them all once."""
    taken: dict[str, list[Seconds]] = {name: [] for name in runners}
    for run in runners.values():
        run()
    for _ in range(repeats):
        for name, run in runners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            taken[name].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Seconds(*map(statistics.median, zip(*runs, strict=True))) for name, runs in taken.items()}


def report(mix: Mix, seconds: dict[str, Seconds]) -> None:
    best = min([name for name in seconds if name != OURS], key=lambda name: seconds[name])
    print(f"\n{mix.describe()}")
    print(f"{'engine':<36}{'tokens/s':>10}{'ratio':>8}{'CPU ratio':>11}")
    for name, taken in seconds.items():
        rate, wall, cpu = sum(mix.lengths) / taken.wall, seconds[best].wall / taken.wall, seconds[best].cpu / taken.cpu
        mark = "  best" if name == best else ""
        print(f"{name:<36}{rate:>10,.0f}{wall:>8.2f}{cpu:>11.2f}{mark}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="what one of the quickstart's two replicas gets")
    parser.add_argument(
        "--samples", type=int, default=2, help="answers per prompt in the n>1 mixes; the quickstart has 2"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64, 128, 256], help="of generate")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of the embedded engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        subprocess.run([sys.executable, str(TASK_BUILDER), "--out", folder], check=True, capture_output=True)
        model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32).eval()
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{processor()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}")
        print(f"{type(model).__name__}, {parameters / 1e6:.2f} M parameters, float32, medians of {args.repeats}")
        for mix in build_mixes(task, args.prompts, args.samples, args.seed):
            runners = {OURS: engine_runner(task / "model", mix, args.max_num_seqs)}
            for size in args.batch_sizes:
                runners[f"transformers generate, batch {size}"] = transformers_runner(model, mix, size)
            report(mix, measure(runners, args.repeats))


if __name__ == "__main__":
    main()
