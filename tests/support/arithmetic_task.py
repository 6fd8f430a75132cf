"""A small quickstart task, and configuration keys shared by its runs."""

from __future__ import annotations

from pathlib import Path

RUN = {"trainer.experiment_name": "test", "trainer.n_gpus_per_node": 1, "trainer.device": "cpu"}
"""Overrides: one CPU device of this machine."""


def make_task(folder: Path, *options: str) -> Path:
    """Write model, tokenizer and data into a folder; return the folder.

    In this process: importing torch and transformers would cost another one 2.5 s.

    Args:
        folder: created if absent.
        options: options of ``tools/make_arithmetic.py``.
    """
    import make_arithmetic
    import torch

    with torch.random.fork_rng(devices=()):  # the tool seeds torch
        make_arithmetic.main(["--out", str(folder), "--hidden", "32", *options])
    return folder
