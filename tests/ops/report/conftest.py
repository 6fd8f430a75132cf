"""Folders of runs with known numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import MakeRun, default_rows, sample

from megarl.tracking.jsonl_files import MetricsFile
from megarl.tracking.sample_files import write_samples


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run's folder: ten steps, two validations, three answers each."""

    def make(
        name: str = "run",
        rows: Sequence[Mapping[str, float]] | None = None,
        samples: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        lr: float = 1e-6,
        finished: bool = True,
        facts: bool = True,
    ) -> Path:
        folder = tmp_path / name
        metrics = MetricsFile(folder / "metrics.jsonl")
        for number, row in enumerate(default_rows() if rows is None else rows):
            metrics.append(int(row.get("step", number)), {key: value for key, value in row.items() if key != "step"})
        chosen = {step: [sample(n, step) for n in range(3)] for step in (1, 10)} if samples is None else samples
        for step, answers in chosen.items():
            write_samples(folder / "samples" / "train" / f"{step}.jsonl", answers)
        config = {"trainer": {"experiment_name": "exp", "total_training_steps": 10}, "optim": {"lr": lr, "on": True}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        if facts:
            change = {"key": "optim.lr", "value": lr, "default": 1e-3, "origin": "command line"}
            record = {
                "job": "train",
                "config_name": "ppo",
                "overrides": [f"optim.lr={lr}", "trainer.note='a b'"],
                "started": "2026-01-02T03:04:05+00:00",
                "versions": {"torch": "2.13.0"},
                "git": {"megarl": {"commit": "abc123", "branch": "main", "changed": ["a.py"]}},
                "machine": {"cpus": 2},
                "differences": [change],
            }
            (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
        if finished:
            (folder / "summary.json").write_text(
                json.dumps({"steps": 10, "hf_dir": "/out/<hf>", "wall_seconds": 100}), encoding="utf-8"
            )
        return folder

    return make
