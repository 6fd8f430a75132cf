import pytest

from megarl.base.errors import ConfigError, ModelError
from megarl.models import parse_model_config
from megarl.rollout import EngineOptions, check_engine_model, create_engine, known_engines, register_engine
from megarl.rollout.registry import ENGINES


def test_an_unknown_engine_lists_the_known_ones(make_folder):
    with pytest.raises(ConfigError, match=r"rollout\.name='vllm' is unknown; .*embedded, sglang"):
        create_engine("vllm", str(make_folder()))


def test_a_registered_user_engine_is_created(monkeypatch):
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))

    @register_engine("mine")
    def make(model_path, options):
        return model_path, options

    assert "mine" in known_engines()
    assert create_engine("mine", "folder", EngineOptions(max_num_seqs=2)) == ("folder", EngineOptions(max_num_seqs=2))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mixtral", "MixtralForCausalLM: it has mixture-of-experts layers"),
        ("deepseek", "experts.* and latent attention"),
    ],
)
def test_an_unsupported_model_is_refused_before_the_engine_is_built(family, why):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    sizes |= {"vocab_size": 9, "max_position_embeddings": 16, "num_experts_per_tok": 2}
    if family == "mixtral":
        raw = sizes | {"architectures": ["MixtralForCausalLM"]}
    else:
        latents = {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
        experts = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 4}
        raw = sizes | latents | experts | {"architectures": ["DeepseekV2ForCausalLM"]}
    with pytest.raises(ModelError, match=why):
        check_engine_model("embedded", parse_model_config(raw), EngineOptions())


def test_a_missing_model_folder_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        create_engine("embedded", str(tmp_path / "nothing"))
