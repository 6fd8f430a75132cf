"""Models with experts and latent attention in the real SGLang: loading and updates against transformers.

A replica of two ranks each, which returns its experts (routing replay R3). DeepSeek's attention is computed from
matrices that SGLang derives from ``kv_b_proj``: log-probs after an update show whether they were derived again.
"""

import numpy as np
import pytest
import torch
import transformers
from weight_syncs import rank_params, update

from megarl.models.checksum import tensor_checksum
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout import Request, SamplingParams, create_engine
from megarl.rollout.sglang.options import SGLangOptions

RANKS = 2
REQUESTS = [
    Request(f"r{i}", [3, 1, 4, 1, 5][: i + 1], SamplingParams(6, ignore_eos=True), i, routes_from=i // 2)
    for i in range(4)
]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""SGLang has no other positions for latent attention on a CPU; DeepSeek's own models have these."""
LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_scaling": YARN,
}
V2 = {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
MODELS = {
    "DeepseekV3": LATENTS | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1},
    "DeepseekV2": LATENTS | V2 | {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "Glm4Moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True},
}


def saved(kind, seed, folder):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | MODELS[kind]))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.15 * torch.randn_like(tensor))
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def shards_of(engine, folder):
    reader = HFReader(folder)
    return [dict(load_local(reader, params, torch.float32)) for params in rank_params(engine)]


def assert_serves(engine, folder, reference, version):
    """Log-probs and experts equal transformers', and the ranks hold the weight map's shards of the folder."""
    for request, completion in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        expected = reference.log_probs(request.prompt_ids, completion.token_ids)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)
        assert completion.weight_version == version
        routes = reference.routes([*request.prompt_ids, *completion.token_ids])[request.routes_from : -1]
        assert np.array_equal(np.sort(completion.routes, -1), routes)
    for rank, shard in enumerate(shards_of(engine, folder)):
        assert engine.checksum(rank) == {name: tensor_checksum(tensor) for name, tensor in shard.items()}
        held = engine.weights(rank)
        assert set(held) == set(shard) and all(torch.equal(held[name], shard[name]) for name in shard)


CASES = [pytest.param(kind, marks=[pytest.mark.sglang] if kind == "DeepseekV3" else []) for kind in MODELS]
"""CI runs one of them, which covers latent attention and experts."""


@pytest.mark.parametrize("kind", CASES)
def test_loading_and_updating_give_the_same_weights_in_sglang(kind, _sglang, reference_for, tmp_path):
    _sglang.make_room()
    folders = [saved(kind, seed, tmp_path / str(seed)) for seed in (0, 1)]
    engine = create_engine("sglang", str(folders[0]), SGLangOptions(tensor_parallel_size=RANKS, return_routes=True))
    try:
        engine.load_hf(str(folders[0]), version=1)  # by SGLang itself
        assert_serves(engine, folders[0], reference_for(folders[0]), 1)
        update(engine, folders[1], 2, bucket_bytes=20_000)
        assert_serves(engine, folders[1], reference_for(folders[1]), 2)
    finally:
        engine.shutdown()
