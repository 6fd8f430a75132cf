import pytest

from megarl.errors import ConfigError, ModelError
from megarl.rollout import EngineOptions, create_engine, known_engines, register_engine
from megarl.rollout.registry import _FACTORIES


def test_an_unknown_engine_lists_the_known_ones(make_folder):
    with pytest.raises(ConfigError, match="rollout engine 'vllm' is unknown; known ones: embedded"):
        create_engine("vllm", str(make_folder()))


def test_an_engine_of_ones_own(monkeypatch):
    monkeypatch.setattr("megarl.rollout.registry._FACTORIES", dict(_FACTORIES))

    @register_engine("mine")
    def make(model_path, options):
        return model_path, options

    assert "mine" in known_engines()
    assert create_engine("mine", "folder", EngineOptions(max_num_seqs=2)) == ("folder", EngineOptions(max_num_seqs=2))


def test_a_missing_model_folder(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        create_engine("embedded", str(tmp_path / "nothing"))
