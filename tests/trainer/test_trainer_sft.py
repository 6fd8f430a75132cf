"""Supervised fine-tuning in real processes: what is saved, and that a continued run is the one that was not stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import SFTConfig
from megarl.convert.command import main as convert
from megarl.errors import CheckpointError
from megarl.tracking import read_metrics
from megarl.trainer.run_state import checkpoint_store, find_resume
from megarl.trainer.sft import run
from megarl.trainer.stopping import Stop

STEPS = 5  # the checkpoint is in the first epoch of three steps, its end in the second
CLOCK = ("timing_", "perf/", "checkpoint/")


def rows(folder: Path) -> list[dict[str, float]]:
    """Of every step, what two equal runs share."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_run_that_is_continued_ends_as_one_that_was_not_stopped(
    sft_config: Callable[..., SFTConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str, **trainer: object) -> SFTConfig:
        common = {
            "data.train_batch_size": 40,
            "optim.lr": 1e-3,
            "optim.lr_warmup_steps": 2,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": 2,
            "trainer.max_ckpt_to_keep": 2,
            "trainer.checkpoint.async_save": True,
            "trainer.default_local_dir": str(tmp_path / name / "checkpoints"),
            "trainer.hf_export_dir": str(tmp_path / name / "hf"),
        }
        return sft_config({**common, **{f"trainer.{key}": value for key, value in trainer.items()}})

    def finish(name: str, **trainer: object) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        run(config(name, **trainer), tmp_path / name)
        return tmp_path / name

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = finish("whole")
    store = checkpoint_store(config("whole"))
    assert store.steps() == [4, STEPS]  # the last one whatever its number, and of the others the newest
    assert find_resume(config("whole", resume_mode="disable")) is None
    with pytest.raises(CheckpointError, match="resume_mode=must, but there is no checkpoint"):
        find_resume(config("cut", resume_mode="must"))

    # A run that is asked to end after its first step, and one that goes on from there.
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "begin", lambda stop: stop.request("SIGTERM"))
        cut = finish("cut")
    assert [row["step"] for row in rows(cut)] == [1] and not (cut / "hf").exists()
    saved = cut / "checkpoints" / "global_step_1"
    shutil.copytree(saved, tmp_path / "elsewhere" / "global_step_1")
    path = tmp_path / "elsewhere" / "global_step_1"
    resumed = finish("resumed", resume_mode="resume_path", resume_from_path=str(path))
    assert rows(resumed) == rows(whole) and len(rows(whole)) == STEPS
    first, second = (load_file(folder / "hf" / "model.safetensors") for folder in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    assert convert(["verify", str(whole / "hf"), str(whole / "checkpoints")]) == 0
