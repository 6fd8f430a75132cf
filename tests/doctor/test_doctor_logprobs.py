"""Each fault is built on purpose, and named by the doctor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.cli import main
from megarl.data.rollout_dump import RolloutDump

Models = tuple[Path, Any, Any]


@pytest.fixture
def ask(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[RolloutDump], str]:
    """The report of ``megarl doctor logprobs`` on a dump."""

    def run(dump: RolloutDump) -> str:
        dump.save(tmp_path / "4.npz")
        assert main(["doctor", "logprobs", str(tmp_path / "4.jsonl"), "--model", str(models[0])]) == 0
        return capsys.readouterr().out

    return run


def verdict(report: str) -> str:
    return report.split("verdict: ")[1].strip()


def test_both_agree(ask: Callable[[RolloutDump], str], healthy: RolloutDump) -> None:
    report = ask(healthy)
    assert verdict(report) == "none: engine and actor agree"
    assert "step 4, 4 rows, 19 generated tokens, temperature 0.7, weight version 3" in report
    assert "every answer's text encodes to the ids" in report


@pytest.mark.parametrize(("engine", "name"), [(True, "the engine"), (False, "the actor")])
def test_weights(
    ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models, engine: bool, name: str
) -> None:
    assert verdict(ask(said_by(models[2], engine=engine))).startswith(f"weights: {name} computed with other weights")


def test_weights_one_update_behind(
    ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models
) -> None:
    """An engine that missed a sync differs by little, and by more than rounding."""
    behind = copy.deepcopy(models[1])
    with torch.no_grad():
        for param in behind.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    assert verdict(ask(said_by(behind))).startswith("weights: the engine")


def test_the_folder_is_not_the_steps(
    ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models
) -> None:
    actor = said_by(models[2], engine=False)
    both = replace(actor, rollout_log_probs=actor.old_log_probs)
    assert "neither side computed with this folder's weights" in verdict(ask(both))


@pytest.mark.parametrize("temperature", [1.0, 0.35])
def test_temperature(
    ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models, temperature: float
) -> None:
    told = verdict(ask(said_by(models[1], temperature)))
    assert told.startswith("temperature: the engine's log-probs are those at ") and told.endswith("the run's is 0.7")
    assert float(told.split(" at ")[1].split(",")[0]) == pytest.approx(temperature, rel=0.01)


def test_dtype(ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models) -> None:
    """Told by its pattern, whatever the dump says of the format."""
    rounded = copy.deepcopy(models[1]).to(torch.bfloat16)
    assert verdict(ask(said_by(rounded))).startswith("dtype: the engine computes in bfloat16")


def with_noise(rows: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Without a pattern, and as small as rounding."""
    draw = np.random.default_rng(seed)
    return [(row + 4e-3 * draw.standard_normal(len(row))).astype(np.float32) for row in rows]


def test_kernels(ask: Callable[[RolloutDump], str], healthy: RolloutDump) -> None:
    noisy = replace(healthy, rollout_log_probs=with_noise(healthy.rollout_log_probs, 5))
    assert verdict(ask(noisy)).startswith("kernels: the engine has the right weights and temperature and rounds")


def test_rounding_of_an_engine_that_is_said_to_round(ask: Callable[[RolloutDump], str], healthy: RolloutDump) -> None:
    """Real kernels share little of transformers' rounding errors; with both sides in bfloat16 these are why."""
    noisy = replace(
        healthy,
        rollout_log_probs=with_noise(healthy.rollout_log_probs, 5),
        facts=replace(healthy.facts, engine_dtype="bfloat16"),
    )
    assert verdict(ask(noisy)).startswith("dtype: the engine computes in bfloat16")
    both = replace(
        noisy,
        old_log_probs=with_noise(healthy.old_log_probs, 6),
        facts=replace(noisy.facts, actor_dtype="bfloat16"),
    )
    assert verdict(ask(both)) == "kernels: both sides compute in bfloat16, and each rounds in its own way"


def test_each_side_has_its_own_cause(
    ask: Callable[[RolloutDump], str], said_by: Callable[..., RolloutDump], models: Models
) -> None:
    engine, actor = said_by(models[1], 1.4), said_by(models[2], engine=False)
    first, second = verdict(ask(replace(engine, old_log_probs=actor.old_log_probs))).split("; ")
    assert first.startswith("temperature: the engine") and second.startswith("weights: the actor")


def test_tokenization_is_told(ask: Callable[[RolloutDump], str], healthy: RolloutDump) -> None:
    """0 and 1 were sampled one after the other; their text is token 66."""
    responses = [row.copy() for row in healthy.responses]
    responses[1][:2] = [0, 1]
    assert "the text of 1 of 4 answers encodes to other ids" in ask(replace(healthy, responses=responses))


def test_what_cannot_be_read_is_refused(
    models: Models, healthy: RolloutDump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["doctor", "logprobs", *arguments]) == 1
        return capsys.readouterr().err

    assert "calculate_log_probs=true" in refused(str(tmp_path), "--model", str(models[0]))
    (tmp_path / "1.npz").write_text("no zip")
    assert "is not a rollout dump" in refused(str(tmp_path / "1.npz"), "--model", str(models[0]))
    healthy.save(tmp_path / "2.npz")
    assert "no language model can be loaded" in refused(str(tmp_path / "2.npz"), "--model", str(tmp_path))
    responses = [row + 1000 for row in healthy.responses]
    replace(healthy, responses=responses).save(tmp_path / "3.npz")
    assert f"row 0 of the dump has token {responses[0].max()}; " in refused(
        str(tmp_path / "3.npz"), "--model", str(models[0])
    )


def test_folders_give_all_their_steps_and_rows_can_be_limited(
    models: Models, healthy: RolloutDump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 9):
        replace(healthy, facts=replace(healthy.facts, step=step)).save(tmp_path / f"{step}.npz")
    assert main(["doctor", "logprobs", str(tmp_path), "--model", str(models[0]), "--rows", "2"]) == 0
    report = capsys.readouterr().out
    assert report.index("step 9, 2 rows") < report.index("step 10, 2 rows")
