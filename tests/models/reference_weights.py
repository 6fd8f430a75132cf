"""Independent references for the weight map's tests: whole-tensor reshapes in numpy, written without pieces."""

import numpy as np

from megarl.models import ModelConfig, ParallelLayout, parse_model_config

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def tiny_config(
    family="qwen2", *, layers=2, hidden=12, ffn=16, heads=4, groups=2, head_dim=2, vocab=37, tied=False
) -> ModelConfig:
    raw = {
        "architectures": [ARCHITECTURES[family]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    return parse_model_config(raw)


def labelled_checkpoint(shapes, dtype=np.int64) -> dict[str, np.ndarray]:
    """Tensors with distinct nonzero elements."""
    tensors, label = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(label, label + size).astype(dtype).reshape(shape)
        label += size
    return tensors


def assemble(param, checkpoint) -> np.ndarray:
    """A local parameter from its pieces; elements outside all pieces are zero."""
    local = np.zeros(param.shape, dtype=next(iter(checkpoint.values())).dtype)
    for piece in param.pieces:
        source = checkpoint[piece.hf_name][tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))]
        local[tuple(slice(a, a + n) for a, n in zip(piece.at, source.shape, strict=True))] = source
    return local


def pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


def _divide(array: np.ndarray, parts: int, part: int, axis: int = 0) -> np.ndarray:
    return np.split(array, parts, axis=axis)[part]


def megatron_reference(hf, config: ModelConfig, layout: ParallelLayout, rank: int, padded: int, value_head=False):
    """One training rank's parameters: complete Megatron tensors, then divided as in Megatron's layers."""
    tp = rank % layout.tp
    stage = rank // (layout.tp * layout.dp)
    per_stage = config.num_layers // layout.pp
    local = {}

    def column(array):
        return _divide(array, layout.tp, tp)

    def qkv(layer, kind):
        q, k, v = (hf[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        groups = config.num_key_value_heads
        grouped = [x.reshape(groups, -1, config.head_dim, *x.shape[1:]) for x in (q, k, v)]
        return column(np.concatenate(grouped, axis=1).reshape(-1, *q.shape[1:]))

    if stage == 0:
        local["embedding.word_embeddings.weight"] = column(pad_rows(hf["model.embed_tokens.weight"], padded))
    for layer in range(stage * per_stage, (stage + 1) * per_stage):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        local[ours + "input_layernorm.weight"] = hf[theirs + "input_layernorm.weight"]
        local[ours + "pre_mlp_layernorm.weight"] = hf[theirs + "post_attention_layernorm.weight"]
        local[ours + "self_attention.linear_qkv.weight"] = qkv(layer, "weight")
        if config.qkv_bias:
            local[ours + "self_attention.linear_qkv.bias"] = qkv(layer, "bias")
        if config.qk_norm:
            local[ours + "self_attention.q_layernorm.weight"] = hf[theirs + "self_attn.q_norm.weight"]
            local[ours + "self_attention.k_layernorm.weight"] = hf[theirs + "self_attn.k_norm.weight"]
        output = hf[theirs + "self_attn.o_proj.weight"]
        local[ours + "self_attention.linear_proj.weight"] = _divide(output, layout.tp, tp, axis=1)
        gate, up = hf[theirs + "mlp.gate_proj.weight"], hf[theirs + "mlp.up_proj.weight"]
        local[ours + "mlp.linear_fc1.weight"] = np.concatenate([column(gate), column(up)])
        local[ours + "mlp.linear_fc2.weight"] = _divide(hf[theirs + "mlp.down_proj.weight"], layout.tp, tp, axis=1)
    if stage == layout.pp - 1:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if value_head:
            local["output_layer.weight"] = hf["score.weight"]
        elif not config.tie_word_embeddings:
            local["output_layer.weight"] = column(pad_rows(hf["lm_head.weight"], padded))
        elif layout.pp > 1:
            local["output_layer.weight"] = column(pad_rows(hf["model.embed_tokens.weight"], padded))
    return local


def rollout_reference(hf, config: ModelConfig, tp: int, tp_rank: int):
    """One engine rank's parameters, fused as SGLang fuses them."""
    padded = -(-config.vocab_size // tp) * tp
    local = {}
    for name, tensor in hf.items():
        if "_proj." in name:
            axis = 1 if "o_proj" in name or "down_proj" in name else 0
            tensor = _divide(tensor, tp, tp_rank, axis=axis)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            live = max(0, min(config.vocab_size - tp_rank * padded // tp, padded // tp))
            tensor = _divide(pad_rows(tensor, padded), tp, tp_rank)[:live]
        local[name] = tensor
    for layer in range(config.num_layers):
        base = f"model.layers.{layer}."
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [local.pop(f"{base}self_attn.{x}_proj.{kind}") for x in "qkv"]
            local[f"{base}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
        parts = [local.pop(f"{base}mlp.{x}_proj.weight") for x in ("gate", "up")]
        local[f"{base}mlp.gate_up_proj.weight"] = np.concatenate(parts)
    return local
