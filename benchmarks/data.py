"""Cost of a large data set: time to the first batch, memory, and rows per second in random order.

Creates rows in verl's schema in a temporary folder, as parquet and as JSONL, and reads each file in separate processes:
once with an empty cache (cold) and once with a full one (warm), with prompt lengths for ``filter_overlong_prompts``.
For comparison, pyarrow, pandas and Hugging Face ``datasets`` read the whole file into memory, and rows are taken in the
same random order. Times count from process start, with imports.

    python benchmarks/data.py --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import benchmark_parser, parse_sizes, processor

ROOT = Path(__file__).resolve().parents[1]
BATCH, TAKEN, SEED = 1024, 20_000, 1
KINDS = ("cold", "warm", "pyarrow", "pandas", "datasets")
FILLER = "Think about it step by step and write the answer down. " * 4


def make(folder: Path, rows: int) -> None:
    """Write the same rows as parquet and as JSONL."""
    size = 10_000
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as lines:
        writer = None
        for start in range(0, rows, size):
            part = [row(number) for number in range(start, min(start + size, rows))]
            table = pa.Table.from_pylist(part)
            writer = writer or pq.ParquetWriter(folder / "rows.parquet", table.schema)
            writer.write_table(table)
            lines.writelines(json.dumps(entry) + "\n" for entry in part)
        writer.close()


def row(number: int) -> dict:
    """Return a question that differs from all others."""
    a, b = number, number * 7919 % 1_000_003
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? {FILLER[: 40 + number % 160]}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": number},
    }


def memory() -> dict[str, int]:
    """Return this process's memory in MiB: current private and mapped memory, and the peak of both."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    names = {"own_mib": "RssAnon", "mapped_mib": "RssFile", "peak_mib": "VmHWM"}
    return {name: int(status[key].split()[0]) >> 10 for name, key in names.items()}


def megarl_loader(path: str, cache: str) -> dict:
    """Read with megarl's data set and loader, as a run builds them."""
    sys.path.insert(0, str(ROOT))
    from megarl.data import RLHFDataset, StatefulLoader
    from tools.make_arithmetic import build_tokenizer

    imported = time.time()
    dataset = RLHFDataset(path, build_tokenizer(), 512, filter_overlong_prompts=True, cache_dir=cache)
    loader = StatefulLoader(dataset, BATCH, dataset.collate, SEED)
    opened = time.time()
    next(iter(loader))
    first = time.time()
    result = speed(lambda at: dataset.source[at], len(dataset))
    return {"imported": imported, "opened": opened, "first": first, **result}


def peer(kind: str, path: str) -> dict:
    """Read a file with another library; its first row counts as the first batch."""
    if kind == "pyarrow":
        table = pq.read_table(path)
        result = {"opened": time.time(), **speed(lambda at: table.slice(at, 1).to_pylist()[0], len(table))}
    elif kind == "pandas":
        import pandas

        frame = pandas.read_parquet(path)
        result = {"opened": time.time(), **speed(lambda at: frame.iloc[at].to_dict(), len(frame))}
    else:
        import datasets

        rows = datasets.load_dataset("parquet", data_files=path, cache_dir=f"{path}.hf")["train"]
        result = {"opened": time.time(), **speed(lambda at: rows[at], len(rows))}
    return result


def speed(take, rows: int) -> dict:
    """Return rows per second in random order, and memory afterwards."""
    order = np.random.default_rng(SEED).integers(0, rows, TAKEN).tolist()
    start = time.perf_counter()
    for at in order:
        take(at)
    return {"rows_per_s": round(TAKEN / (time.perf_counter() - start)), **memory()}


def measure(kind: str, path: Path, cache: Path) -> None:
    """Start a process that reads a file, and print its result."""
    command = [sys.executable, __file__, "--child", kind, str(path), str(cache)]
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    start = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result = json.loads(done.stdout.splitlines()[-1])
    for name in ("imported", "opened", "first"):
        if name in result:
            result[f"{name}_s"] = round(result.pop(name) - start, 1)
    print(json.dumps({"kind": kind, "file": path.name, **result}), flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parse_sizes(parser, rows=BATCH)
    if options.child:
        kind, path, cache = options.child
        print(json.dumps(megarl_loader(path, cache) if kind in ("cold", "warm") else peer(kind, path)))
        return
    print(json.dumps({"processor": processor(), "cores": os.cpu_count(), "rows": options.rows, "batch": BATCH}))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder, options.rows)
        sizes = {path.name: path.stat().st_size >> 20 for path in folder.glob("rows.*")}
        print(json.dumps({"mib": sizes}), flush=True)
        for kind in KINDS[:3] if options.tiny else KINDS:
            measure(kind, folder / "rows.parquet", folder / "cache")
        for kind in KINDS[:1] if options.tiny else KINDS[:2]:
            measure(kind, folder / "rows.jsonl", folder / "cache")
        print(json.dumps({"cache_mib": sum(file.stat().st_size for file in (folder / "cache").rglob("*")) >> 20}))


if __name__ == "__main__":
    main()
