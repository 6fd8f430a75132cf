import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.models import read_model_config
from megarl.models.rope import inverse_frequencies
from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_llama3_frequencies_equal_transformers(make_folder):
    folder = make_folder("llama", head_dim=64, rope_parameters=LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(folder), "cpu")
    ours = inverse_frequencies(read_model_config(folder))
    assert ours == pytest.approx(expected, rel=1e-6)
    plain = inverse_frequencies(read_model_config(make_folder("llama", head_dim=64)))
    ratio = plain / ours
    # All three regimes occur: kept, interpolated, divided.
    assert (ratio < 1.0001).any()
    assert (ratio > 7.999).any()
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


def test_llama3_log_probs_equal_transformers(make_folder, reference_for):
    folder = make_folder("llama", rope_parameters=LLAMA3)
    engine = create_engine("embedded", str(folder), EngineOptions())
    engine.load_hf(str(folder))
    prompt = list(range(40))
    answer = engine.generate([Request("r", prompt, SamplingParams(20, ignore_eos=True), 0)])[0]
    expected = reference_for(folder).log_probs(prompt, answer.token_ids)
    assert torch.tensor(answer.log_probs).double() == pytest.approx(expected, abs=1e-5)


DIRECT_QUERIES = {"q_lora_rank": None, "noise": 0.05}
"""Without the norm on a latent of queries, larger random weights amplify rounding: also in transformers."""


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("olmo2", {}),
        ("olmo3", {}),
        ("gemma3_text", {"tied": True}),
        ("gpt_oss", {}),
        ("mixtral", {}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_next", {}),
        ("qwen3_next", {"num_experts": 0, "layer_types": ["full_attention", "linear_attention"]}),
        ("qwen3_5_text", {"num_hidden_layers": 4, "layer_types": None, "tied": True}),
        ("qwen3_5_moe_text", {}),
        ("deepseek_v2", DIRECT_QUERIES),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "rope_interleave": False}),
    ],
)
def test_all_parts_of_layers_equal_transformers(make_folder, reference_for, family, fields):
    """Prompts shorter and longer than the window, with and without a shared prefix, in refilled slots."""
    folder = make_folder(family, **fields)
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=3))
    engine.load_hf(str(folder))
    start = list(range(10, 34))
    prompts = [[1], [2, 3, 4], list(range(40)), *([*start, tail] for tail in range(4)), [5] * 7]
    requests = [Request(f"r{i}", p, SamplingParams(5 + 4 * i, ignore_eos=True), i) for i, p in enumerate(prompts)]
    reference = reference_for(folder)
    for request, answer in zip(requests, engine.generate(requests), strict=True):
        expected = reference.log_probs(request.prompt_ids, answer.token_ids)
        assert torch.tensor(answer.log_probs).double() == pytest.approx(expected, abs=1e-5)
