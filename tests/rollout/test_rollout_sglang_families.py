"""OLMo 2 and 3, OLMoE and Gemma 3 in the real SGLang: loading and updates against transformers."""

import pytest
import torch
import transformers
from weight_syncs import rank_params, update

from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.verification import tensor_checksum
from megarl.rollout import Request, SamplingParams, create_engine
from megarl.rollout.sglang.options import SGLangOptions

REQUESTS = [Request(f"r{i}", [3, 1, 4, 1, 5] * (2 * i + 1), SamplingParams(8, ignore_eos=True), i) for i in range(4)]
"""Up to 43 tokens, more than the window."""
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": None,
}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32, "beta_slow": 1}
POSITIONS = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
MODELS = {
    "Olmo2": ({"num_key_value_heads": 2}, 2),
    "Olmo3": (WINDOW | {"rope_parameters": POSITIONS}, 1),
    "Gemma3Text": (WINDOW | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, 1),
    "Olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, 1),
}
"""Fields of ``config.json`` beyond the common ones, and ranks of the replica."""
CASES = [pytest.param(kind, marks=[pytest.mark.sglang] if kind == "Olmo3" else []) for kind in MODELS]
"""CI runs one of them, whose rotary embeddings SGLang does not read by itself."""


def saved(kind, seed, folder):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | MODELS[kind][0]))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def assert_serves(engine, folder, reference, version):
    """Log-probs equal transformers', and the ranks hold the weight map's shards of the folder."""
    for request, completion in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        expected = reference.log_probs(request.prompt_ids, completion.token_ids)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)
        assert completion.weight_version == version
    for rank, params in enumerate(rank_params(engine)):
        shard = dict(load_local(HFReader(folder), params, torch.float32))
        assert engine.checksum(rank) == {name: tensor_checksum(tensor) for name, tensor in shard.items()}


@pytest.mark.parametrize("kind", CASES)
def test_loading_and_updating_give_the_same_log_probs_in_sglang(kind, sglang_engines, reference_for, tmp_path):
    sglang_engines.make_room()
    folders = [saved(kind, seed, tmp_path / str(seed)) for seed in (0, 1)]
    options = SGLangOptions(tensor_parallel_size=MODELS[kind][1], dtype="float32")
    engine = create_engine("sglang", str(folders[0]), options)
    try:
        engine.load_hf(str(folders[0]), version=1)
        assert_serves(engine, folders[0], reference_for(folders[0]), 1)
        update(engine, folders[1], 2, bucket_bytes=20_000)
        assert_serves(engine, folders[1], reference_for(folders[1]), 2)
    finally:
        engine.shutdown()
