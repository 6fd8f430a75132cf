"""Engines under test, and tiny random models with a Hugging Face forward as reference.

The contract suite runs against every engine in ``ENGINES``.
"""

import pytest
import torch
import transformers
from sglang_engines import (
    IN_PROCESS,
    NEED_SGLANG,
    OVER_HTTP,
    TWO_RANKS,
    SGLangEngines,
    engine_of,
    is_for_ci,
    is_for_engine,
)

from megarl.base.packages import is_installed
from megarl.rollout import EngineOptions, create_engine

SGLANG = [IN_PROCESS, OVER_HTTP, TWO_RANKS] if is_installed("sglang") else []
ENGINES = ["embedded", *SGLANG]
collect_ignore = [] if SGLANG else NEED_SGLANG  # SGLang is installed in a separate environment
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
FAMILIES |= {"olmo2": "Olmo2", "olmo3": "Olmo3", "gemma3_text": "Gemma3Text"}
FAMILIES |= {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}
FAMILIES |= {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5Text", "qwen3_5_moe_text": "Qwen3_5MoeText"}
FAMILIES |= {"gpt_oss": "GptOss"}
FAMILIES |= {"glm4_moe": "Glm4Moe", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LATENTS = {
    "num_key_value_heads": 4,
    "head_dim": 4,  # transformers' name of the rotated part
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    **EXPERTS,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 40, "moe_intermediate_size": 24}
FIELDS = {
    "olmo3": WINDOWS
    | {
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 9},
    "qwen3_next": LINEAR | SHARED_EXPERT | {"num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | SHARED_EXPERT | {"num_experts_per_tok": 2},
    "gpt_oss": WINDOWS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": EXPERTS | {"num_experts": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "deepseek_v2": LATENTS
    | {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    },
    "deepseek_v3": LATENTS | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "rope_parameters": YARN},
}
"""Fields of ``config.json`` beyond the common sizes."""
NOISE = {"qwen3_next": 0.1, "qwen3_5_text": 0.1, "qwen3_5_moe_text": 0.1}
"""Queries and keys are normed after a convolution: larger random weights amplify rounding, also in transformers."""
VOCAB, EOS = 50, 7


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """``make_folder(family, tied, seed, noise, **config fields)``: a folder saved by transformers, created once.

    ``noise`` is the standard deviation added to each initial weight.
    """
    created = {}

    def make(family="qwen2", tied=False, seed=0, noise=None, **fields):
        noise = NOISE.get(family, 0.15) if noise is None else noise
        key = (family, tied, seed, noise, repr(sorted(fields.items())))
        if key not in created:
            settings = {
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": VOCAB,
                "max_position_embeddings": 128,
                "tie_word_embeddings": tied,
                "eos_token_id": EOS,
                "pad_token_id": 0,
                "bos_token_id": None,
                **({} if family == "qwen2" else {"head_dim": 16}),
                **FIELDS.get(family, {}),
            }
            prefix = FAMILIES[family]
            torch.manual_seed(seed)
            settings = {name: value for name, value in (settings | fields).items() if value is not None}
            config = getattr(transformers, f"{prefix}Config")(**settings)
            model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
            with torch.no_grad():
                biases = (tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias"))
                for tensor in (*model.parameters(), *biases):
                    tensor.add_(noise * torch.randn_like(tensor))
            created[key] = tmp_path_factory.mktemp(f"{family}-{seed}")
            model.save_pretrained(created[key])
        return created[key]

    return make


class Reference:
    """The same folder in transformers; one whole forward per sequence, no cache, no padding."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def next_logits(self, ids):
        return self.model(torch.tensor([list(ids)])).logits[0, -1].double()

    @torch.no_grad()
    def log_probs(self, prompt, answer, temperature=1.0):
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
        return (logits / temperature).log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]

    @torch.no_grad()
    def routes(self, ids):
        """Sorted experts ``[tokens, expert layers, per token]`` of the model's routers."""
        chosen = {}
        routers = [module for module in self.model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        hooks = [router.register_forward_hook(lambda m, i, o: chosen.update({m: o[2]})) for router in routers]
        self.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return torch.stack([chosen[router] for router in routers], 1).sort(-1).values.numpy()

    def greedy(self, prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.next_logits(ids).argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="session")
def reference_for():
    created = {}

    def make(folder):
        if folder not in created:
            created[folder] = Reference(folder)
        return created[folder]

    return make


@pytest.fixture(params=ENGINES)
def engine_name(request):
    return request.param


def pytest_collection_modifyitems(config, items):
    """Drop redundant cases that would start SGLang once more, and mark the cases for CI.

    Cases with a tokenizer, for which each engine of SGLang starts again, come last.
    """
    items[:] = [item for item in items if is_for_engine(item)]
    items.sort(key=lambda item: engine_of(item) in SGLANG and "folder_with_text" in item.fixturenames)
    for item in items:
        if is_for_ci(item):
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def _engines():
    created = {}
    yield created
    for engine in created.values():
        engine.shutdown()


@pytest.fixture(scope="session")
def sglang_engines():
    engines = SGLangEngines()
    yield engines
    engines.shutdown()


@pytest.fixture
def engine_for(engine_name, _engines, sglang_engines):
    """``engine_for(folder, **options)``: an engine with the folder's weights, started once."""

    def make(folder, **options):
        if engine_name in SGLANG:
            engine = sglang_engines.get(engine_name, folder)
        else:
            key = (engine_name, folder, repr(sorted(options.items())))
            if key not in _engines:
                _engines[key] = create_engine(engine_name, str(folder), EngineOptions(**options))
            engine = _engines[key]
        engine.wake()
        engine.load_hf(str(folder))
        return engine

    return make


@pytest.fixture
def new_engine(engine_name, sglang_engines):
    """``new_engine(folder)``: an unused engine."""
    created = []

    def make(folder):
        if engine_name in SGLANG:
            return sglang_engines.new(engine_name, folder)
        created.append(create_engine(engine_name, str(folder)))
        return created[-1]

    yield make
    for engine in created:
        engine.shutdown()
