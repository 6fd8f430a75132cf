"""A small vision task: pictures of squares to count, with a Qwen2.5-VL and its tokenizer."""

from __future__ import annotations

from pathlib import Path


def make_squares_task(folder: Path, *options: str) -> Path:
    """Write model, tokenizer and data into a folder, in this process; return the folder.

    Args:
        options: options of ``tools/make_squares.py``; random weights by default.
    """
    import make_squares
    import torch

    with torch.random.fork_rng(devices=()):  # the tool seeds torch
        sizes = ("--num-train", "12", "--num-test", "4", "--hidden", "32", "--warm-up", "0")
        make_squares.main(["--out", str(folder), *sizes, *options])
    return folder
