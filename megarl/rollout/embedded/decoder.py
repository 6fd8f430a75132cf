"""The model's forward pass, straight from the fused parameters that weight updates write to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig
from megarl.rollout.embedded.attention import Attention
from megarl.rollout.embedded.rotary import RotaryTable


class DecoderLayer:
    """One layer's parameters under short names; views of the live ones, so an update is seen at once."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.input_norm = params[prefix + "input_layernorm.weight"]
        self.qkv = params[prefix + "self_attn.qkv_proj.weight"]
        self.qkv_bias = params[prefix + "self_attn.qkv_proj.bias"] if config.qkv_bias else None
        self.q_norm = params[prefix + "self_attn.q_norm.weight"] if config.qk_norm else None
        self.k_norm = params[prefix + "self_attn.k_norm.weight"] if config.qk_norm else None
        self.output = params[prefix + "self_attn.o_proj.weight"].t()
        self.mlp_norm = params[prefix + "post_attention_layernorm.weight"]
        self.gate_up = params[prefix + "mlp.gate_up_proj.weight"]
        self.down = params[prefix + "mlp.down_proj.weight"].t()


class Decoder:
    """A Qwen2, Qwen3 or Llama model over packed tokens.

    Args:
        config: the model.
        params: parameters under rollout names, all on one device in one dtype; must outlive the decoder.
        max_length: largest position that will occur, plus one.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], max_length: int) -> None:
        self._embedding = params["model.embed_tokens.weight"]
        self._final_norm = params["model.norm.weight"]
        head = self._embedding if config.tie_word_embeddings else params["lm_head.weight"]
        # Without the rows that only pad the vocabulary: they can never be sampled.
        self._head = head[: config.vocab_size]
        self._layers = [DecoderLayer(config, params, layer) for layer in range(config.num_layers)]
        self._rotary = RotaryTable(config, max_length, head.dtype, head.device)
        self._heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        """Last layer's output, before the final norm; the keys and values of all tokens go to ``attention``.

        Args:
            tokens: int64 ``[tokens]``.
            positions: int64 ``[tokens]``.
            attention: where they attend to.
            wanted: tokens whose output is needed; the last layer is computed for no more than these. None = all.

        Returns:
            ``[wanted tokens, hidden_size]``.
        """
        x = self._embedding[tokens]
        angles = self._rotary.at(positions)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(len(x), -1, self._head_dim).split(self._heads, 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            attended = attention(number, self._rotary.rotate(q, angles), self._rotary.rotate(k, angles), v)
            if wanted is not None and layer is self._layers[-1]:
                x, attended = x[wanted], attended[wanted]
            x = torch.addmm(x, attended, layer.output)
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 ``[rows, vocab_size]`` from rows of :meth:`hidden`."""
        return F.linear(self._norm(hidden, self._final_norm), self._head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)
