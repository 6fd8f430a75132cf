"""``megarl doctor logprobs`` on dumps with one built-in fault each."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vision_models import save_vision_model

from megarl.cli import main
from megarl.ops.doctor.logprobs import ReferenceModel

Models = tuple[Path, Any, Any]


@pytest.fixture
def diagnose(models, tmp_path, capsys):
    """Run ``megarl doctor logprobs`` on a dump; return the report."""

    def run(dump):
        (tmp_path / "4.npz").write_bytes(dump.encoded())
        assert main(["doctor", "logprobs", str(tmp_path / "4.jsonl"), "--model", str(models[0])]) == 0
        return capsys.readouterr().out

    return run


def verdict(report):
    return report.split("verdict: ")[1].strip()


def test_engine_and_actor_agree(diagnose, healthy):
    report = diagnose(healthy)
    assert verdict(report) == "none: engine and actor agree"
    assert "step 4, 4 rows, 19 generated tokens, temperature 0.7, weight version 3" in report
    assert "the text of every response encodes to the sampled ids" in report


@pytest.mark.parametrize(("engine", "name"), [(True, "the engine"), (False, "the actor")])
def test_wrong_weights_of_one_side(
    diagnose,
    computed_by,
    models,
    engine,
    name,
):
    assert verdict(diagnose(computed_by(models[2], engine=engine))).startswith(
        f"weights: {name} computed with other weights"
    )


def test_engine_weights_one_update_behind(diagnose, computed_by, models):
    """A missed weight sync causes a small difference that exceeds rounding."""
    behind = copy.deepcopy(models[1])
    with torch.no_grad():
        for param in behind.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    assert verdict(diagnose(computed_by(behind))).startswith("weights: the engine")


def test_model_folder_of_another_step(diagnose, computed_by, models):
    actor = computed_by(models[2], engine=False)
    both = replace(actor, rollout_log_probs=actor.old_log_probs)
    assert "neither side computed with this folder's weights" in verdict(diagnose(both))


@pytest.mark.parametrize("temperature", [1.0, 0.35])
def test_wrong_engine_temperature(diagnose, computed_by, models, temperature):
    cause = verdict(diagnose(computed_by(models[1], temperature)))
    assert cause.startswith("temperature: the engine's log-probs are at temperature ") and cause.endswith(
        "the run's is 0.7"
    )
    assert float(cause.split(" temperature ")[1].split(",")[0]) == pytest.approx(temperature, rel=0.01)


def test_dtype_of_the_engine(diagnose, computed_by, models):
    """The rounding pattern identifies the dtype, regardless of the dump's metadata."""
    rounded = copy.deepcopy(models[1]).to(torch.bfloat16)
    assert verdict(diagnose(computed_by(rounded))).startswith("dtype: the engine computes in bfloat16")


def with_noise(rows, seed):
    """Add noise of the size of rounding, without a pattern."""
    draw = np.random.default_rng(seed)
    return [(row + 4e-3 * draw.standard_normal(len(row))).astype(np.float32) for row in rows]


def test_different_kernels(diagnose, healthy):
    noisy = replace(healthy, rollout_log_probs=with_noise(healthy.rollout_log_probs, 5))
    assert verdict(diagnose(noisy)).startswith("kernels: the engine has the right weights and temperature and rounds")


def test_rounding_of_an_engine_in_bfloat16(diagnose, healthy):
    """Rounding of real kernels differs from transformers'; in bfloat16 on both sides it explains the difference."""
    noisy = replace(
        healthy,
        rollout_log_probs=with_noise(healthy.rollout_log_probs, 5),
        metadata=replace(healthy.metadata, engine_dtype="bfloat16"),
    )
    assert verdict(diagnose(noisy)).startswith("dtype: the engine computes in bfloat16")
    both = replace(
        noisy,
        old_log_probs=with_noise(healthy.old_log_probs, 6),
        metadata=replace(noisy.metadata, actor_dtype="bfloat16"),
    )
    assert verdict(diagnose(both)) == "kernels: both sides compute in bfloat16 and round differently"


def test_different_causes_of_engine_and_actor(diagnose, computed_by, models):
    engine, actor = computed_by(models[1], 1.4), computed_by(models[2], engine=False)
    first, second = verdict(diagnose(replace(engine, old_log_probs=actor.old_log_probs))).split("; ")
    assert first.startswith("temperature: the engine") and second.startswith("weights: the actor")


def test_retokenization_difference_is_reported(diagnose, healthy):
    """Tokens 0 and 1 were sampled in sequence; their text encodes to token 66."""
    responses = [row.copy() for row in healthy.responses]
    responses[1][:2] = [0, 1]
    assert "the text of 1 of 4 responses encodes to different ids" in diagnose(replace(healthy, responses=responses))


def test_unreadable_dumps_and_models_are_refused(models, healthy, tmp_path, capsys):
    def error_of(*arguments):
        assert main(["doctor", "logprobs", *arguments]) == 1
        return capsys.readouterr().err

    assert error_of(str(tmp_path), "--model", str(models[0])).endswith("[doctor.no-rollout-dump]\n")
    (tmp_path / "1.npz").write_text("no zip", encoding="utf-8")
    assert error_of(str(tmp_path / "1.npz"), "--model", str(models[0])).endswith("[data.not-rollout-dump]\n")
    (tmp_path / "2.npz").write_bytes(healthy.encoded())
    assert error_of(str(tmp_path / "2.npz"), "--model", str(tmp_path)).endswith("[doctor.model-not-loaded]\n")
    responses = [row + 1000 for row in healthy.responses]
    (tmp_path / "3.npz").write_bytes(replace(healthy, responses=responses).encoded())
    text = error_of(str(tmp_path / "3.npz"), "--model", str(models[0]))
    assert f"row 0 of the dump has token {responses[0].max()}; " in text
    assert text.endswith("[doctor.dump-of-other-model]\n")


def test_rows_with_images_are_left_out(diagnose, models, healthy, tmp_path, capsys):
    prompts = [row.astype(np.int64) for row in healthy.prompts]
    prompts[0][1] = -5
    report = diagnose(replace(healthy, prompts=prompts))
    assert verdict(report) == "none: engine and actor agree" and "step 4, 3 rows" in report
    (tmp_path / "1.npz").write_bytes(replace(healthy, prompts=[row - 1000 for row in prompts]).encoded())
    assert main(["doctor", "logprobs", str(tmp_path / "1.npz"), "--model", str(models[0])]) == 1
    assert capsys.readouterr().err.endswith("[doctor.rows-with-images]\n")


def test_a_model_with_images_is_compared_on_text(tmp_path):
    model = save_vision_model(tmp_path)
    loaded = ReferenceModel(tmp_path, torch.float32).model
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_folder_reports_all_steps_with_limited_rows(models, healthy, tmp_path, capsys):
    for step in (10, 9):
        dump = replace(healthy, metadata=replace(healthy.metadata, step=step))
        (tmp_path / f"{step}.npz").write_bytes(dump.encoded())
    assert main(["doctor", "logprobs", str(tmp_path), "--model", str(models[0]), "--rows", "2"]) == 0
    report = capsys.readouterr().out
    assert report.index("step 9, 2 rows") < report.index("step 10, 2 rows")
