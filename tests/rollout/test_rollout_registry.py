import pytest
from support.expected_errors import raises

from megarl.base.errors import ConfigError
from megarl.models import declaration, parse_model_config, read_model_config, register_family
from megarl.models.model_config import Traits
from megarl.models.registry import FAMILIES
from megarl.rollout import EngineOptions, check_engine_model, create_engine, register_engine
from megarl.rollout.registry import ENGINES


def test_an_unknown_engine_lists_the_known_ones(make_folder):
    with raises("config.unknown-name", "rollout.name='vllm'", "embedded, sglang"):
        create_engine("vllm", str(make_folder()))


def test_a_registered_user_engine_is_created_and_returns_no_routes_or_support(monkeypatch, make_folder):
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))

    @register_engine("mine")
    def make(model_path, options):
        return model_path, options

    assert "mine" in ENGINES
    assert create_engine("mine", "folder", EngineOptions(max_num_seqs=2)) == ("folder", EngineOptions(max_num_seqs=2))
    with pytest.raises(ConfigError) as caught:
        check_engine_model("mine", read_model_config(make_folder("qwen3_moe")), EngineOptions(return_routes=True))
    assert str(caught.value) == (
        "actor_rollout_ref.actor.router_replay.mode=R3 replays routes of the engine, which rollout.name=mine does not "
        "return; set R2 [rollout.routes-unsupported]"
    )
    with raises("rollout.support-unsupported", "actor_rollout_ref.rollout.support.enable=true", "rollout.name=mine"):
        check_engine_model("mine", read_model_config(make_folder("qwen2")), EngineOptions(return_support=True))


class WithSinks:
    """A custom family with a parameter that no engine of megarl computes with."""

    name = "with_sinks"
    layer = (
        declaration.INPUT_NORM,
        declaration.layer_parameter("self_attention.sinks", "self_attn.sinks", {"self_attn.sinks": ("one",)}),
    )

    def traits(self, raw):
        return Traits()


def test_an_unsupported_model_is_refused_before_the_engine_is_built(monkeypatch):
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    register_family("SinksForCausalLM")(WithSinks)
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    sizes |= {"vocab_size": 9, "max_position_embeddings": 16, "architectures": ["SinksForCausalLM"]}
    with raises("engine.unsupported-model", "'embedded'", "SinksForCausalLM", "'self_attention.sinks'", "name=sglang"):
        check_engine_model("embedded", parse_model_config(sizes), EngineOptions())


def test_a_missing_model_folder_is_an_error(tmp_path):
    with raises("model.folder-missing", tmp_path / "nothing"):
        create_engine("embedded", str(tmp_path / "nothing"))
