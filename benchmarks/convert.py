"""Conversion of a synthetic model against ``cp`` of the same bytes: time, and the converter's peak memory.

``python benchmarks/convert.py [--gigabytes 8] [--rounds 3] [--folder DIR]`` needs four times the model's size on the
disk of ``--folder`` and removes all files at the end. Each round times both directions, each with a ``cp`` of the same
folder, from process start to the fsync of every written file. The model has layers of Llama-3-8B's shape and a
vocabulary of 128,256, in bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from machine import benchmark_parser, parse_sizes, processor

from megarl.models import WeightMap, parse_model_config

TOOL = Path(__file__).resolve().parents[1] / "tools" / "convert_ckpt.py"
BLOCK = os.urandom(16 << 20)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TINY_SHAPE = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "vocab_size": 256}


class Run(NamedTuple):
    """One command: seconds until its bytes are on disk, and peak resident memory in MB."""

    seconds: float
    megabytes: float


def model_bytes(shape: dict[str, Any], layers: int) -> int:
    """Return the size of a model in bfloat16."""
    weights = WeightMap(parse_model_config({**shape, "num_hidden_layers": layers}))
    return sum(2 * math.prod(size) for size in weights.hf_shapes().values())


def write_model(folder: Path, shape: dict[str, Any], layers: int) -> int:
    """Write a model folder of random bytes with one shard per 5 GB; return the size of its largest tensor."""
    raw = {**shape, "num_hidden_layers": layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in WeightMap(parse_model_config(raw)).hf_shapes().items():
        if sum(2 * math.prod(s) for s in shards[-1].values()) + 2 * math.prod(shape) > 5e9:
            shards.append({})
        shards[-1][name] = shape
    placed = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        placed |= dict.fromkeys(shard, file)
        write_shard(folder / file, shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8"
    )
    return max(2 * math.prod(shape) for shard in shards for shape in shard.values())


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * math.prod(shape)]}
        at += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            file.write(BLOCK[:at])
            at -= len(BLOCK)
        file.flush()
        os.fsync(file.fileno())


def timed(command: list[str], written: Path) -> Run:
    """Run a command and flush its output to disk."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    for file in written.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return Run(time.perf_counter() - begin, usage.ru_maxrss / 1024)


def one_round(source: Path, work: Path, workers: list[str], number: int) -> dict[str, tuple[Run, Run]]:
    """Run each direction and its ``cp``, in alternating order."""
    role, copy, back = work / "role", work / "copy", work / "back"
    tool = [sys.executable, str(TOOL)]
    results = {}
    for name, input_folder, output_folder in (("hf-to-megatron", source, role), ("megatron-to-hf", role, back)):
        pair = [
            (["cp", "-r", "--sparse=never", "--reflink=never", str(input_folder), str(copy)], copy),
            ([*tool, name, str(input_folder), str(output_folder), *workers], output_folder),
        ]
        runs = {}
        for command, written in pair if number % 2 == 0 else pair[::-1]:
            os.sync()
            runs[command[0]] = timed(command, written)
            if written in (copy, back):
                shutil.rmtree(written)
        results[name] = (runs[sys.executable], runs["cp"])
    shutil.rmtree(role)
    return results


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="minimum size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--workers", type=int, help="threads of the converter (default: its default)")
    args = parse_sizes(parser, gigabytes=0, rounds=1)
    shape = TINY_SHAPE if args.tiny else SHAPE
    one, two = (model_bytes(shape, layers) for layers in (1, 2))
    layers = 1 + max(0, math.ceil((args.gigabytes * 1e9 - one) / (two - one)))
    size = model_bytes(shape, layers)
    if shutil.disk_usage(args.folder).free < 4.2 * size:
        sys.exit(f"{args.folder} has no room for {4.2 * size / 1e9:.0f} GB")
    workers = ["--workers", str(args.workers)] if args.workers else []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="megarl-convert-") as folder:
        work = Path(folder)
        largest = write_model(work / "model", shape, layers)
        rounds = [one_round(work / "model", work, workers, number) for number in range(args.rounds)]
    print(
        f"{processor()}, {os.cpu_count()} cores; {size / 1e9:.2f} GB, {layers} layers; medians of {args.rounds} rounds"
    )
    print(f"{'':16}{'s':>8}{'cp, s':>8}{'x cp':>8}{'GB/s':>8}{'peak MB':>10}{'limit MB':>10}   x cp of each round")
    limit = 2 * largest / 2**20 + 500
    for name in rounds[0]:
        ours, cps = ([r[name][side] for r in rounds] for side in (0, 1))
        seconds, reference = (statistics.median(run.seconds for run in runs) for runs in (ours, cps))
        ratios = [a.seconds / b.seconds for a, b in zip(ours, cps, strict=True)]
        print(
            f"{name:16}{seconds:8.1f}{reference:8.1f}{statistics.median(ratios):8.2f}{size / 1e9 / seconds:8.2f}"
            f"{max(run.megabytes for run in ours):10.0f}{limit:10.0f}   {' '.join(f'{r:.2f}' for r in ratios)}"
        )


if __name__ == "__main__":
    main()
