"""State of the driver: JSON round trip, and rejection of another model."""

import json
import math
import os

import numpy as np
import pytest
import torch
from support.expected_errors import raises

import megarl
from megarl.trainer.state.trainer_state import ARRAY_FILE, STATE_FILE, TrainerState

MODEL = {"actor": {"family": "qwen2", "hidden_size": 64, "rope_scaling": None}, "critic": {"hidden_size": 32}}


def state(**changes):
    fields = {"step": 7, "epoch": 1, "kl_controller": {"value": 0.1}, "dataloader": {}, "model": MODEL}
    return TrainerState(**{**fields, **changes})


def tagged(kind, **content):
    return {"generator": {"__megarl__": kind, **content}}


def same(first, second):
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and np.array_equal(first, second)
    return first == second or (math.isnan(first) and math.isnan(second))


def test_state_round_trip(tmp_path):
    loader = {
        "position": 3,
        "generator": torch.Generator().manual_seed(5).get_state(),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(0.1, dtype=torch.bfloat16),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "mask": torch.tensor([True, False]),
        "random": ("MT19937", np.arange(4, dtype=np.uint32), 2),
        "floats": [0.1, 1 / 3, 1e-320, float("inf"), float("nan"), -0.0],
        "raw": b"\x00\xff",
        "by_worker": {0: {"a": None}, 1: {"b": True}},
        "tagged": {"__megarl__": "user's own"},
    }
    saved = state(dataloader=loader)
    saved.write(tmp_path)
    restored = TrainerState.read(tmp_path)
    assert same(restored.dataloader, loader)
    assert (restored.step, restored.epoch, restored.kl_controller) == (7, 1, {"value": 0.1})
    assert restored.megarl_version == megarl.__version__
    assert json.loads((tmp_path / STATE_FILE).read_text(encoding="utf-8"))["step"] == 7


def test_large_arrays_are_in_a_file_of_their_own(tmp_path):
    random = np.random.default_rng(0)
    samples = [
        {"routes": random.integers(0, 99, (9000 + number, 4, 2), dtype=np.int16), "log_probs": random.random(9000)}
        for number in range(3)
    ]
    saved = state(
        rollout={"samples": samples, "weights": torch.ones(50_000, dtype=torch.bfloat16), "raw": bytes(90_000)}
    )
    saved.write(tmp_path)
    assert (tmp_path / STATE_FILE).stat().st_size < 10_000
    assert (tmp_path / ARRAY_FILE).stat().st_size == sum(
        sample["routes"].nbytes + sample["log_probs"].nbytes for sample in samples
    ) + 100_000 + 90_000
    assert same(TrainerState.read(tmp_path).rollout, saved.rollout)
    size = (tmp_path / ARRAY_FILE).stat().st_size
    os.truncate(tmp_path / ARRAY_FILE, size - 1)
    with raises("checkpoint.malformed-state", "rollout", ARRAY_FILE, f"byte {size}"):
        TrainerState.read(tmp_path)


def test_states_of_the_first_format_are_read(tmp_path):
    """That format had all arrays in the JSON file."""
    state(dataloader={"generator": np.arange(4, dtype=np.uint32)}).write(tmp_path)
    document = json.loads((tmp_path / STATE_FILE).read_text(encoding="utf-8"))
    (tmp_path / STATE_FILE).write_text(json.dumps({**document, "format": 1}), encoding="utf-8")
    assert not (tmp_path / ARRAY_FILE).exists()
    assert TrainerState.read(tmp_path).dataloader["generator"].tolist() == [0, 1, 2, 3]


def test_numpy_scalars_become_plain_numbers(tmp_path):
    state(kl_controller={"value": np.float32(0.5), "n": np.int64(3)}).write(tmp_path)
    assert same(TrainerState.read(tmp_path).kl_controller, {"value": 0.5, "n": 3})


def test_unsupported_types_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"dataloader\.a\[1\] is a set"):
        state(dataloader={"a": [1, {2}]}).write(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": "7"}, "step='7'"),
        ({"step": True}, "step=True"),
        ({"step": -1}, "step=-1"),
        ({"epoch": 1.5}, "epoch=1.5"),
        ({"model": []}, "model=[]"),
        ({"dataloader": tagged("bytes", begin=0, bytes=9)}, "No such file"),
        ({"dataloader": {"g": {"__megarl__": "tensor", "dtype": "load", "shape": [1], "data": ""}}}, "dataloader"),
        ({"dataloader": {"g": {"__megarl__": "tensor", "dtype": "int64", "shape": [2], "data": "AA=="}}}, "dataloader"),
        (
            {"dataloader": {"g": {"__megarl__": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}}},
            "dataloader",
        ),
        ({"dataloader": {"g": {"__megarl__": "code"}}}, "dataloader"),
        ({"kl_controller": tagged("bytes", data="%")}, "kl_controller"),
    ],
)
def test_malformed_fields_are_named(change, named, tmp_path):
    state().write(tmp_path)
    document = json.loads((tmp_path / STATE_FILE).read_text(encoding="utf-8"))
    (tmp_path / STATE_FILE).write_text(json.dumps({**document, **change}), encoding="utf-8")
    with raises("checkpoint.malformed-state", f"{tmp_path / STATE_FILE}: {next(iter(change))}", named):
        TrainerState.read(tmp_path)


@pytest.mark.parametrize("name", ["step", "epoch", "kl_controller", "dataloader", "model", "megarl_version"])
def test_missing_fields_are_named(name, tmp_path):
    state().write(tmp_path)
    document = json.loads((tmp_path / STATE_FILE).read_text(encoding="utf-8"))
    del document[name]
    (tmp_path / STATE_FILE).write_text(json.dumps(document), encoding="utf-8")
    with raises("checkpoint.malformed-state", f"{STATE_FILE}: {name} "):
        TrainerState.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "checkpoint.unreadable-file") for text in ("", "{")),
        *((text, "checkpoint.other-format") for text in ("null", "[1]", '"format"', '{"format": 3}')),
    ],
)
def test_other_json_is_an_error(text, code, tmp_path):
    (tmp_path / STATE_FILE).write_text(text, encoding="utf-8")
    with raises(code, tmp_path / STATE_FILE):
        TrainerState.read(tmp_path)


def test_missing_file(tmp_path):
    with raises("checkpoint.no-trainer-state", tmp_path / STATE_FILE):
        TrainerState.read(tmp_path)


def test_another_model_is_rejected_with_differing_fields():
    saved = state()
    saved.check_model(MODEL)
    other = {"actor": {**MODEL["actor"], "hidden_size": 128}, "critic": {"hidden_size": 32, "family": "llama"}}
    with raises("resume.other-model") as caught:
        saved.check_model(other)
    assert str(caught.value) == (
        "the checkpoint is of another model: actor.hidden_size: 64 in the checkpoint, 128 in this run; "
        "critic.family: 'absent' in the checkpoint, 'llama' in this run [resume.other-model]"
    )


def test_a_missing_role_is_another_model():
    with raises("resume.other-model", "critic.hidden_size: 32 in the checkpoint, 'absent' in this run"):
        state().check_model({"actor": MODEL["actor"]})
