"""TRL's side of ``grpo_step.py``, for an interpreter with TRL; megarl is not needed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import trl
from grpo_workload import (
    EOS,
    LEARNING_RATE,
    MARK,
    MIXES,
    PAD,
    PROMPT_TOKENS,
    SAMPLES,
    Mix,
    Taken,
    clock,
    distinct_words,
    mix_of,
    prompt_ids,
)
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)


def run_peer(folder: Path, mix: Mix, steps: int, batch_size: int) -> None:
    """Train with TRL's ``GRPOTrainer``, one step per line of standard input."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    prompts = [" ".join(f"w{i}" for i in ids) for step in range(steps) for ids in prompt_ids(step, mix.prompts)]
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=mix.rows // world // batch_size,
        num_generations=SAMPLES,
        max_completion_length=mix.longest,
        max_steps=steps,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False),
        args=config,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False),
        reward_funcs=lambda completions, **_: [distinct_words(text) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    )
    watch = PeerWatch(trainer, mix)
    trainer.add_callback(StepCallback(watch))
    if watch.rank == 0:
        names = ("trl", "accelerate", "transformers", "torch")
        send_line({"versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)})
    trainer.train()


class PeerWatch:
    """Forces lengths in a ``GRPOTrainer`` and measures the times of its steps."""

    def __init__(self, trainer: Any, mix: Mix) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.mix, self.number = mix, -1
        self.seconds: dict[str, float] = defaultdict(float)
        model = trainer.model
        model.generate = self._timed("generate", self._forced(model.generate))
        trainer._generate_and_score_completions = self._timed("prepare", trainer._generate_and_score_completions)

    def begin(self) -> None:
        """Wait for the next input line."""
        if self.rank == 0 and not sys.stdin.readline():
            os._exit(0)
        self._meet()
        self.number += 1
        self.seconds.clear()
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Write the times of the step."""
        step, cpu = time.perf_counter() - self.start, self._sum(time.process_time() - self.cpu)
        generate, update = self.seconds["generate"], step - self.seconds["prepare"]
        if self.rank == 0:
            send_line(Taken(generate, update, step, cpu)._asdict())

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with clock(self.seconds, name):
                return function(*args, **kwargs)

        return timed

    def _forced(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``generate`` with forced lengths."""

        def forced(*args: Any, **kwargs: Any) -> Any:
            share = self.mix.rows // self.world
            lengths = self.mix.lengths(self.number)[self.rank * share : (self.rank + 1) * share]
            rule = EndAt(lengths if self.mix.name != "equal" else [self.mix.longest + 1] * share)
            output = generate(*args, **kwargs, logits_processor=LogitsProcessorList([rule]))
            answers = output[:, PROMPT_TOKENS:]
            assert (answers != PAD).sum(-1).tolist() == lengths, "an answer has another length than was drawn"
            return output

        return forced

    def _meet(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _sum(self, value: float) -> float:
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()


class EndAt(LogitsProcessor):
    """Ends each row after its number of tokens, not earlier; padding never comes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` with forbidden tokens at minus infinity."""
        last = self.lengths == input_ids.shape[1] - PROMPT_TOKENS + 1
        scores[:, [PAD, EOS]] = float("-inf")
        scores[last] = float("-inf")
        scores[last, EOS] = 0
        return scores


class StepCallback(TrainerCallback):
    """Notifies the watch at the start and end of steps."""

    def __init__(self, watch: PeerWatch) -> None:
        self.watch = watch

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """See the base class."""
        self.watch.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """See the base class."""
        self.watch.end()


def send_line(answer: Mapping[str, Any]) -> None:
    """Write a line for the other process."""
    print(MARK + json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the model")
    parser.add_argument("--lengths", choices=list(MIXES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="rows of a micro-batch, per process")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    run_peer(args.folder, mix_of(args.lengths, args.tiny), args.steps, args.batch_size)


if __name__ == "__main__":
    main()
