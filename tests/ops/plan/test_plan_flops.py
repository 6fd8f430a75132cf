"""FLOPs against torch's counter, PaLM's formula, and counts by hand."""

import numpy as np
import pytest
import torch
import transformers
from planned_jobs import MODELS, megatron, train_config, train_job
from support.expected_errors import raises
from torch.utils.flop_counter import FlopCounterMode

from megarl.config import MegatronConfig, SFTConfig
from megarl.config.build import build
from megarl.models import ParallelLayout, parse_model_config
from megarl.ops.plan.flops import (
    Lengths,
    SequenceStats,
    forward_flops,
    layer_elements,
    lengths_of,
    model_flops,
    rank_elements,
    recomputed_flops,
)
from megarl.ops.plan.job import PlannedRole

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}


def role(model, layout=None, value_head=False, **megatron_keys):
    keys = MegatronConfig(**megatron_keys)
    return PlannedRole("actor", "x", model, layout or ParallelLayout(), keys, value_head, True, ())


def rows(*lengths, outputs=None):
    total = np.array(lengths)
    return SequenceStats(len(lengths), float(total.sum()), float((total**2).sum()), outputs or float(total.sum()))


def test_flops_equal_torchs_counter():
    config = transformers.LlamaConfig(**TINY, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        # Embedded before the model: torch counts the first layer's input gradient only if it is needed.
        hidden = torch.randn(1, 128, 64, requires_grad=True)
        model(inputs_embeds=hidden, use_cache=False).logits.sum().backward()
    parsed = parse_model_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    # torch counts all pairs of tokens, including masked ones
    pairs = rows(128)._replace(squares=2.0 * 128**2)
    ours = model_flops(role(parsed), pairs, updates=True)
    assert ours == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_flops_of_a_dense_model_equal_palms_formula():
    """6 N + 12 L H Q T per token (https://arxiv.org/abs/2204.02311, appendix B), with attention halved by causality."""
    layers, hidden, heads, vocab, tokens = 24, 1024, 16, 50000, 512
    raw = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
           "intermediate_size": 2048, "num_attention_heads": heads, "vocab_size": vocab,
           "max_position_embeddings": 512}  # fmt: skip
    weights = layers * (4 * hidden**2 + 3 * hidden * 2048) + hidden * vocab
    per_token = 6 * weights + 12 * layers * heads * (hidden / heads) * tokens / 2
    assert model_flops(role(parse_model_config(raw)), rows(tokens), updates=True) == tokens * per_token


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-30B-A3B", "gpt-oss-20b"])
def test_flops_per_token_follow_the_active_parameters(name):
    """37B of DeepSeek-V3's 671B and 3.3B of Qwen3's 30.5B are active, by their reports, with embeddings.

    Of the 20.91B of gpt-oss-20b, 3.61B are active without the embedding.
    """
    sizes = {"DeepSeek-V3": (671e9, 37e9), "Qwen3-30B-A3B": (30.5e9, 3.3e9)}
    sizes["gpt-oss-20b"] = (20.91e9, 3.61e9 + 201088 * 2880)
    total, active = sizes[name]
    actor = train_job(name, megatron()).role("actor")
    model = actor.model
    flops = forward_flops(actor, rows(1)._replace(squares=0.0), range(model.num_layers), with_head=True)
    embedding = model.vocab_size * model.hidden_size
    assert flops / 2 + embedding == pytest.approx(active, rel=0.03)
    elements = sum(sum(layer_elements(model, layer)) for layer in range(model.num_layers)) + 2 * embedding
    assert elements == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5"])
def test_elements_of_hybrid_models_are_those_of_transformers(kind):
    """In published sizes (Qwen3-Next-80B-A3B, Qwen3.5-9B); norms and convolutions are not counted."""
    config = getattr(transformers, f"{kind}{'' if kind == 'Qwen3Next' else 'Text'}Config")()
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    parsed = parse_model_config({**config.to_dict(), "architectures": [f"{kind}ForCausalLM"]})
    elements = sum(sum(layer_elements(parsed, layer)) for layer in range(parsed.num_layers))
    theirs = sum(param.numel() for param in model.model.layers.parameters())
    assert elements == pytest.approx(theirs, rel=1e-3)
    halves = [rank_elements(role(parsed, ParallelLayout(pp=2)), stage).total for stage in (0, 1)]
    assert sum(halves) == elements + 2 * parsed.vocab_size * parsed.hidden_size


def test_stages_sum_to_the_model():
    actor = train_job("Llama-3-70B", megatron(8, 4), nodes=16).role("actor")
    stages = [actor.layout.stage_layers(80, stage) for stage in range(4)]
    flops = [forward_flops(actor, rows(100, 50), part, with_head=part is stages[-1]) for part in stages]
    assert sum(flops) == pytest.approx(model_flops(actor, rows(100, 50), updates=False))
    assert sum(rank_elements(actor, stage).total for stage in range(4)) * 8 == pytest.approx(70.55e9, rel=1e-3)


def test_only_response_tokens_need_logits():
    actor = train_job("Llama-3-70B", megatron(8, 4), nodes=16).role("actor")
    few, many = (forward_flops(actor, rows(1000, outputs=n), range(80), with_head=True) for n in (100, 1000))
    assert many - few == 900 * 2 * 8192 * 128256


def test_recomputed_flops():
    model = train_job("Llama-3-70B", megatron(8, 4), nodes=16).role("actor").model
    batch = rows(2048)
    forward = forward_flops(role(model), batch, range(80), with_head=False)
    assert recomputed_flops(role(model), batch, range(80)) == 0
    full = role(model, recompute_granularity="full")
    assert recomputed_flops(full, batch, range(80)) == forward
    first = role(model, recompute_granularity="full", recompute_method="block", recompute_num_layers=8)
    assert recomputed_flops(first, batch, range(80)) == pytest.approx(forward / 10)
    attention = recomputed_flops(role(model, recompute_granularity="selective"), batch, range(80))
    assert attention == pytest.approx(80 * 2 * 8192 * 2048**2)  # half of the pairs, queries with keys and with values
    mlp = recomputed_flops(role(model, recompute_granularity="selective", recompute_modules=["mlp"]), batch, range(80))
    assert mlp == 80 * 2 * 3 * 8192 * 28672 * 2048


def test_lengths_are_at_most_those_of_the_configuration():
    config = train_config("Qwen2.5-7B")
    assert lengths_of(config)[:3] == (1024, 1024, 1024)
    assert lengths_of(config, "200,600.5") == Lengths(200, 600.5, 1024, "--lengths")
    assert lengths_of(config, "2000,2000")[:2] == (1024, 1024)


def test_supervised_jobs_have_one_length():
    values = {"data": {"train_files": ["x"], "max_length": 100}, "model": {"path": str(MODELS / "Qwen2.5-7B")},
              "trainer": {"experiment_name": "planned"}}  # fmt: skip
    config = build(SFTConfig, values)
    assert lengths_of(config)[:3] == (0, 100, 100) and lengths_of(config, "30")[:2] == (0, 30)
    with raises("plan.lengths", "--lengths=10,20", "one number"):
        lengths_of(config, "10,20")


@pytest.mark.parametrize("text", ["600", "200,", "a,b", "200,-1", "200,nan", "0,5", "1,2,3", "mean=600"])
def test_other_texts_are_rejected(text):
    with raises("plan.lengths", f"--lengths={text}"):
        lengths_of(train_config("Qwen2.5-7B"), text)
