"""Models of an evaluation: folders, checkpoints by path, and errors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.expected_errors import raises

from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import open_source
from megarl.convert.source import HUGGING_FACE, MEGARL
from megarl.trainer.jobs.frozen_policy import find_model
from megarl.trainer.state.checkpoint_store import CheckpointStore

STEP = 30


@pytest.fixture
def run_folder(arithmetic, tmp_path):
    """A run's folder with an actor's checkpoint, saved as a run does."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (20, STEP):
        with store.saving(step) as folder:
            convert(open_source(arithmetic / "model"), folder / "actor", MEGARL, ConversionOptions())
    return tmp_path / "run"


def converted(path, folder, message=pytest.fail):
    model = find_model(str(path))
    target = model.hugging_face_folder(folder)
    model.convert(target, message)
    return target


def weights_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_hugging_face_folder_is_used_directly(arithmetic, tmp_path):
    model = find_model(str(arithmetic / "model"))
    assert (model.source.kind, model.step, model.tokenizer_folder) == (HUGGING_FACE, 0, arithmetic / "model")
    assert converted(arithmetic / "model", tmp_path / "converted") == arithmetic / "model"
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    "path",
    ["", "latest", "checkpoints", "checkpoints/latest", f"checkpoints/global_step_{STEP}",
     f"checkpoints/global_step_{STEP}/actor"],
)  # fmt: skip
def test_all_paths_to_a_checkpoint(run_folder, path):
    model = find_model(str(run_folder / path))
    assert model.source.path == run_folder / "checkpoints" / f"global_step_{STEP}" / "actor"
    assert model.step == STEP and model.config.architecture == "Qwen2ForCausalLM"
    assert (model.tokenizer_folder / "tokenizer_config.json").is_file()


def test_an_older_checkpoint_by_path(run_folder):
    assert find_model(str(run_folder / "checkpoints" / "global_step_20")).step == 20


def test_a_checkpoint_is_converted_once_bit_for_bit(run_folder, arithmetic, tmp_path):
    messages: list[str] = []
    folders = [
        converted(path, tmp_path / "converted", messages.append)
        for path in (run_folder, run_folder, run_folder / "checkpoints" / "global_step_20")
    ]
    assert folders[0] == folders[1] != folders[2]
    assert [" before" in line for line in messages] == [False, True, False]
    expected, found = weights_of(arithmetic / "model"), weights_of(folders[0])
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_an_export_next_to_a_checkpoint_is_used_directly(run_folder, arithmetic, tmp_path):
    export = run_folder / "checkpoints" / f"global_step_{STEP}" / "actor" / "huggingface"
    shutil.copyfile(arithmetic / "model" / "model.safetensors", export / "model.safetensors")
    (run_folder / "checkpoints" / f"global_step_{STEP}" / "manifest.json").unlink()
    assert find_model(str(run_folder)).step == STEP
    assert converted(run_folder, tmp_path / "converted") == export


def make_critic(folder, arithmetic):
    """The model with a scalar head in place of its output layer."""
    from safetensors.torch import save_file

    shutil.copytree(arithmetic / "model", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = weights_of(folder)
    weights.pop("lm_head.weight", None)
    save_file({**weights, "score.weight": torch.ones(1, config["hidden_size"])}, folder / "model.safetensors")
    return folder


def altered(run, arithmetic):
    (largest,) = sorted((run / "checkpoints" / f"global_step_{STEP}" / "actor").glob("*.distcp"))[-1:]
    largest.write_bytes(largest.read_bytes() + b"x")
    return run


def critic_of_a_run(run, arithmetic):
    folder = make_critic(run / "value_model", arithmetic)
    convert(open_source(folder), run / "global_step_9" / "critic", MEGARL, ConversionOptions())
    return run / "global_step_9"


@pytest.mark.parametrize(
    ("break_it", "code", "named"),
    [
        (lambda run, _: run / "nowhere", "convert.no-folder", "nowhere"),
        (lambda run, _: run.parent / "latest", "checkpoint.no-pointer", "latest_checkpointed_iteration.txt"),
        (lambda run, _: run / "checkpoints" / "latest_checkpointed_iteration.txt", "convert.no-folder", "is a file"),
        (altered, "checkpoint.corrupt-file", f"global_step_{STEP}"),
        (critic_of_a_run, "model.critic-as-policy", "global_step_9/critic"),
        (lambda run, arithmetic: make_critic(run / "critic", arithmetic), "model.critic-as-policy", "critic"),
    ],
    ids=["nowhere", "no pointer", "a file", "altered", "checkpoint of a critic", "folder of a critic"],
)
def test_invalid_models_are_errors(break_it, code, named, run_folder, arithmetic):
    path = break_it(run_folder, arithmetic)
    with raises(code, f"actor_rollout_ref.model.path={path}: ", named):
        find_model(str(path))
