"""Models with experts and latent attention in the real SGLang: loading and updates against transformers.

A replica of two ranks each, which returns its experts (routing replay R3). DeepSeek's attention is computed from
matrices that SGLang derives from ``kv_b_proj``: log-probs after an update show whether they were derived again.
Servers return the same experts, also for responses that a weight sync interrupts.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from sglang_engines import API_KEY
from support.expected_errors import raises
from weight_syncs import rank_params, update

from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.verification import tensor_checksum
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


CASES = [pytest.param(kind, marks=[pytest.mark.sglang] if kind == "DeepseekV3" else []) for kind in MODELS]
"""CI runs one of them, which covers latent attention and experts."""


@pytest.mark.parametrize("kind", CASES)
def test_loading_and_updating_give_the_same_weights_in_sglang(kind, sglang_engines, reference_for, tmp_path):
    sglang_engines.make_room()
    folders = [saved(kind, seed, tmp_path / str(seed)) for seed in (0, 1)]
    engine = create_engine("sglang", str(folders[0]), SGLangOptions(tensor_parallel_size=RANKS, return_routes=True))
    try:
        engine.load_hf(str(folders[0]), version=1)  # by SGLang itself
        assert_serves(engine, folders[0], reference_for(folders[0]), 1)
        update(engine, folders[1], 2, bucket_bytes=20_000)
        assert_serves(engine, folders[1], reference_for(folders[1]), 2)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sets of weights of a Qwen3-MoE."""
    return [saved("Qwen3Moe", seed, tmp_path_factory.mktemp(f"experts-{seed}")) for seed in (0, 1)]


@pytest.fixture(scope="module")
def routing_server(folders):
    """A replica of two ranks behind a server, which returns routes."""
    options = SGLangOptions(mode="http", api_key=API_KEY, tensor_parallel_size=RANKS, return_routes=True)
    engine = create_engine("sglang", str(folders[0]), options)
    yield engine
    engine.shutdown()


@pytest.mark.sglang
def test_routes_over_http_equal_those_in_process_and_transformers(
    routing_server, folders, sglang_engines, reference_for
):
    """Also those that a second client of the running server receives."""
    options = replace(routing_server.options, url=routing_server.url)
    client = create_engine("sglang", str(folders[0]), options)
    for engine in (routing_server, client):
        engine.load_hf(str(folders[0]), version=1)
        assert_serves(engine, folders[0], reference_for(folders[0]), 1)
    over_http = client.generate(REQUESTS)
    client.shutdown()
    sglang_engines.make_room()
    engine = create_engine("sglang", str(folders[0]), SGLangOptions(return_routes=True))
    try:
        engine.load_hf(str(folders[0]))
        for ours, theirs in zip(over_http, engine.generate(REQUESTS), strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.routes.dtype == theirs.routes.dtype and np.array_equal(ours.routes, theirs.routes)
    finally:
        engine.shutdown()


def interrupted(engine, requests):
    """Completions of responses that are aborted in their middle, by request."""
    wait_s = 0.5
    while True:
        engine.submit(requests)
        time.sleep(wait_s)
        engine.abort([request.request_id for request in requests])
        halves = {}
        while len(halves) < len(requests):
            halves |= {half.request_id: half for half in engine.poll(60.0)}
        if all(half.finish_reason == "abort" and half.token_ids for half in halves.values()):
            return halves
        wait_s *= 0.5 if any(half.finish_reason == "length" for half in halves.values()) else 1.5


def test_responses_interrupted_by_a_sync_keep_their_routes_over_http(routing_server, folders, reference_for):
    """Partial rollout: tokens before the sync have the experts of the old weights, and the rest those of the new."""
    engine, params = routing_server, SamplingParams(100, ignore_eos=True)
    engine.load_hf(str(folders[0]), version=1)
    requests = [replace(request, params=params) for request in REQUESTS]
    halves = interrupted(engine, requests)
    update(engine, folders[1], 2, bucket_bytes=20_000)
    whole = engine.generate([replace(request, prior=halves[request.request_id]) for request in requests])
    old, new = (reference_for(folder) for folder in folders)
    for request, completion in zip(requests, whole, strict=True):
        half, ids = halves[request.request_id], [*request.prompt_ids, *completion.token_ids]
        before = len(half.token_ids)
        assert completion.token_ids[:before] == half.token_ids and len(completion.token_ids) == 100
        assert completion.versions == (1,) * before + (2,) * (100 - before)
        first, second = (reference.routes(ids)[request.routes_from : -1] for reference in (old, new))
        computed = len(half.routes)
        assert computed == len(request.prompt_ids) + before - 1 - request.routes_from
        assert not np.array_equal(first[:computed], second[:computed])
        expected = np.concatenate([first[:computed], second[computed:]])
        assert np.array_equal(np.sort(completion.routes, -1), expected)


def test_a_running_server_without_routes_is_refused(folders):
    """Before the run starts, with the option that the server lacks."""
    silent = create_engine("sglang", str(folders[0]), SGLangOptions(mode="http", api_key=API_KEY))
    try:
        with raises("sglang.server-without-routes", silent.url, "--enable-return-routed-experts", "mode=R3", "R2"):
            options = SGLangOptions(url=silent.url, api_key=API_KEY, return_routes=True)
            create_engine("sglang", str(folders[0]), options)
    finally:
        silent.shutdown()
