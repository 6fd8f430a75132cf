"""Time that training is blocked by a checkpoint: synchronous and background save.

    python benchmarks/checkpoint.py [--hidden 512] [--layers 8] [--folder .]

One process holds a Qwen2 model in float32 with Adam's state. Each round saves twice: synchronously, and in the
background during optimizer steps. Blocked time is the wait of the step after the save: the whole synchronous save, or
the copy to host memory plus the completion of the background save. A step during the background save is compared with
an undisturbed one. Rounds alternate, and each figure is a median. The first round, which allocates the memory of the
copy, is shown separately.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read by libraries at their import

import torch
from machine import benchmark_parser, parse_sizes, processor

from megarl.megatron import MegatronEngine, MegatronOptions, OptimizerOptions, PackedMicroBatch, init_runtime
from megarl.megatron.checkpoint.pending_save import HostSnapshot
from megarl.megatron.checkpoint.sharded import begin_save
from megarl.models import ParallelLayout, parse_model_config

VOCAB, TOKENS = 1000, 128


def built_engine(hidden: int, layers: int, device: str) -> MegatronEngine:
    """Build an engine with random weights."""
    config = parse_model_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": VOCAB,
            "max_position_embeddings": 1024,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
    )
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    layout = ParallelLayout()
    runtime = init_runtime(layout, 0, 1, "127.0.0.1", port, device=device)
    options = MegatronOptions(dtype=torch.float32, optimizer=OptimizerOptions(lr=1e-4, total_steps=1000))
    engine = MegatronEngine(config, layout, runtime, options)
    with torch.no_grad():
        for param in engine.weights.named().values():
            param.normal_(std=0.02)
    return engine


def step(engine: MegatronEngine) -> None:
    """Run one optimizer step."""
    row = (torch.randint(VOCAB, (TOKENS // 2,)), torch.randint(VOCAB, (TOKENS // 2,)))
    engine.forward_backward(
        [PackedMicroBatch.from_rows([row])], lambda outputs, _: (-outputs.log_probs.sum() / TOKENS, {})
    )
    engine.optimizer_step()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def one_round(engine: MegatronEngine, snapshot: HostSnapshot, folder: Path) -> dict[str, float]:
    """Return the seconds of both kinds of save."""
    alone = statistics.median(timed(lambda: step(engine)) for _ in range(3))
    at_once = timed(lambda: begin_save(engine, folder / "once").finish())
    started = time.perf_counter()
    pending = begin_save(engine, folder / "background", snapshot=snapshot)
    copy = time.perf_counter() - started
    background = []
    while not pending.is_written:
        background.append(timed(lambda: step(engine)))
    started = time.perf_counter()
    written = pending.finish()
    blocked = copy + time.perf_counter() - started
    size = sum(entry.size for entry in written.entries.values())
    for path in folder.iterdir():
        shutil.rmtree(path)
    return {
        "GiB": size / 2**30,
        "blocked, at once": at_once,
        "blocked, background": blocked,
        "writing, background": written.seconds,
        "step alone": alone,
        "step background": statistics.median(background) if background else alone,
    }


def main() -> None:
    """Print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the measured disk")
    args = parse_sizes(parser, hidden=64, layers=2, rounds=1, folder=None)
    engine = built_engine(args.hidden, args.layers, args.device)
    snapshot = HostSnapshot(engine.runtime.device)
    step(engine)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rounds = [one_round(engine, snapshot, Path(folder)) for _ in range(args.rounds + 1)]
    print(f"{processor()}, {args.device}, one process\n")
    print(f"{'seconds':<18}{'first':>8}{'median':>8}")
    medians = {name: statistics.median(round_seconds[name] for round_seconds in rounds[1:]) for name in rounds[0]}
    for name, value in medians.items():
        print(f"{name:<18}{rounds[0][name]:>8.3f}{value:>8.3f}")
    print(f"\nblocked background / at once: {medians['blocked, background'] / medians['blocked, at once']:.3f}")
    print(f"step background / alone:      {medians['step background'] / medians['step alone']:.2f}")


if __name__ == "__main__":
    main()
