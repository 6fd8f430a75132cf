"""``megarl doctor logprobs`` on dumps with one built-in fault each."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.vision_models import END, IMAGE, START, png, save_vision_model

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, with_placeholders
from megarl.cli import main
from megarl.data.rollout_dump import DumpMetadata, RolloutDump
from megarl.ops.doctor.dump_images import DumpImages
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


def test_log_probs_over_the_sampled_support(diagnose, healthy, models):
    """Each token was sampled from three: the log-probs are those of the softmax over them."""
    support, over_support = [], []
    for prompt, response, mask in zip(healthy.prompts, healthy.responses, healthy.generated, strict=True):
        ids = np.concatenate([prompt, response])
        sets = (response[:, None] + np.arange(3)) % models[1].config.vocab_size
        with torch.no_grad():
            logits = (
                models[1](torch.tensor(ids[None])).logits[0, len(prompt) - 1 : -1].double()
                / healthy.metadata.temperature
            )
        inside = logits.gather(1, torch.tensor(sets)).log_softmax(-1)[:, 0].numpy().astype(np.float32)
        over_support.append(np.where(mask, inside, 0).astype(np.float32))
        support.append(np.where(mask[:, None], sets, -1).astype(np.int32))
    dump = replace(healthy, support=support, rollout_log_probs=over_support, old_log_probs=over_support)
    assert verdict(diagnose(dump)).startswith("none")
    assert "neither side computed with this folder's weights" in verdict(diagnose(replace(dump, support=None)))


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
    (token,) = Image(b"", 1, 1, key=7).token_ids
    prompts[0][1] = token
    report = diagnose(replace(healthy, prompts=prompts))
    assert verdict(report) == "none: engine and actor agree" and "step 4, 3 rows" in report
    assert "1 row with images left out" in report
    (tmp_path / "1.npz").write_bytes(replace(healthy, prompts=[np.array([token])] * 4).encoded())
    assert main(["doctor", "logprobs", str(tmp_path / "1.npz"), "--model", str(models[0])]) == 1
    assert capsys.readouterr().err.endswith("[doctor.rows-with-images]\n")


def test_a_model_with_images_is_compared_on_text(tmp_path):
    model = save_vision_model(tmp_path)
    loaded = ReferenceModel(tmp_path, torch.float32).model
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.fixture(scope="module")
def run_with_images(tmp_path_factory):
    """Folders of a model and of a run, the dump of its step, and the file with the images of its rows."""
    folder = tmp_path_factory.mktemp("run")
    model = save_vision_model(folder / "model")
    processor = ImageProcessor(str(folder / "model"), {"max_pixels": 28 * 28 * 12})
    files = [png(140, 84), png(56, 112, 1), png(84, 84, 2)]
    images = [processor.read(file, "") for file in files]
    first, second, third = ([START, *image.token_ids, END] for image in images)
    prompts = [[1, *first, 5, *second, 6], [9, 8, 7], [2, *first, 4], [3, *third]]
    responses, log_probs = [[7, 9, 11], [4, 5], [8, 6, 3, 2], [5]], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([with_placeholders([*prompt, *response], IMAGE)])
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
        if spans := image_spans(prompt):
            shown = [image for span in spans for image in images if image.key == span.key]
            inputs["pixel_values"] = torch.cat([torch.from_numpy(processor.patches(image)) for image in shown])
            inputs["image_grid_thw"] = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in shown])
        with torch.no_grad():
            logits = (model(**inputs).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        log_probs.append(logits.gather(1, torch.tensor(response)[:, None])[:, 0].numpy())
    generated = [np.ones(len(row), dtype=bool) for row in responses]
    arrays = [[np.array(row) for row in rows] for rows in (prompts, responses)]
    metadata = DumpMetadata(4, 0.7, "embedded", "float32", "float32")
    dump = RolloutDump(metadata, *arrays, generated, log_probs, log_probs, np.full(4, 3))
    (folder / "4.npz").write_bytes(dump.encoded())
    rows = [
        {"prompt": [{"role": "user", "content": "<image>" * len(shown)}], "images": [{"bytes": file} for file in shown]}
        for shown in (files[2:], files[:2])
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    data = {"train_files": [str(folder / "train.parquet")], "prompt_key": "prompt", "image_key": "images"}
    config = {"data": data | {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 12}}}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_images_are_read_from_the_data_files_of_the_run(run_with_images, capsys):
    command = ["doctor", "logprobs", str(run_with_images), "--model", str(run_with_images / "model")]
    assert main([*command, "--run", str(run_with_images)]) == 0
    report = capsys.readouterr().out
    assert verdict(report) == "none: engine and actor agree"
    assert "4 rows, 10 generated tokens" in report and "left out" not in report
    assert main(command) == 0
    assert "1 rows, 2 generated tokens" in (report := capsys.readouterr().out)
    assert "3 rows with images left out" in report


def test_rows_that_transformers_cannot_read_are_left_out(run_with_images):
    """An image is in no data file; a response has the token that stands for an image."""
    folder = run_with_images
    dump = RolloutDump.load(folder / "4.npz")
    dump.responses[2][1] = IMAGE
    images = DumpImages.of(dump, str(folder / "model"), str(folder))
    missing = replace(images, files={key: images.files[key] for key in list(images.files)[:1]})
    assert [images.can_read(dump, row) for row in range(4)] == [True, True, False, True]
    assert [missing.can_read(dump, row) for row in range(4)] == [False, True, False, True]


def test_a_folder_without_a_run_is_refused(run_with_images, tmp_path, capsys):
    command = ["doctor", "logprobs", str(run_with_images), "--model", str(run_with_images / "model")]
    assert main([*command, "--run", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("[doctor.no-run]\n")


def test_folder_reports_all_steps_with_limited_rows(models, healthy, tmp_path, capsys):
    for step in (10, 9):
        dump = replace(healthy, metadata=replace(healthy.metadata, step=step))
        (tmp_path / f"{step}.npz").write_bytes(dump.encoded())
    assert main(["doctor", "logprobs", str(tmp_path), "--model", str(models[0]), "--rows", "2"]) == 0
    report = capsys.readouterr().out
    assert report.index("step 9, 2 rows") < report.index("step 10, 2 rows")
