import json
from pathlib import Path
from typing import Any

import pytest

from megarl.base.errors import ModelError
from megarl.models.hf_folder import all_eos_token_ids, eos_token_ids


@pytest.fixture
def folder(real_model_folder, tmp_path):
    """A function that writes a model config with given end-of-sequence tokens."""
    raw = json.loads((real_model_folder() / "config.json").read_text(encoding="utf-8"))

    def make(eos_token_id: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": eos_token_id}), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("config", "generation", "first", "both"),
    [(2, None, (2,), {2}), (2, [5, 7], (5, 7), {2, 5, 7}), ([1, 2], {}, (1, 2), {1, 2}), (None, 3, (3,), {3})],
)
def test_generation_config_takes_precedence(folder, config, generation, first, both):
    path = folder(config)
    if generation is not None:
        settings = {} if generation == {} else {"eos_token_id": generation}
        (path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert eos_token_ids(path) == first and all_eos_token_ids(path) == both


def test_malformed_generation_config_is_named(folder):
    path = folder(1)
    (path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        eos_token_ids(path)
