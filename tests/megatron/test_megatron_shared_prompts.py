"""Shared prompts with the layers of Transformer Engine: Megatron rotates, and the attention takes whole sequences.

Transformer Engine needs a GPU. Here the same layer specification has Megatron's linear layers, and an attention that
reads the boundaries of whole sequences as Transformer Engine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from distributed import Place, ProcessPool
from engine_cases import Setup, engine, policy_loss
from family_cases import MODELS
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_models import TEMPERATURE, Row, policy_reference, rows, save_model
from torch import Tensor, nn

from megarl.megatron import MegatronEngine, OptimizerOptions, OutputOptions, PackedMicroBatch, model
from megarl.megatron.layers import RMSNorm, SharedPromptAttention
from megarl.models import ModelConfig, ParallelLayout


class WholeSequences(nn.Module):
    """Attention over whole sequences with Transformer Engine's arguments; knows neither rotations nor prompts."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and len(query) == packed_seq_params.cu_seqlens_q[-1]
        ends = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, stop in pairwise(ends):
            q, k, v = (heads[start:stop].transpose(0, 1)[None] for heads in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            parts.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


def decoder_spec(
    config: ModelConfig, megatron: TransformerConfig, layers: Iterable[int], *, fused: bool, adapted: bool
) -> TransformerBlockSubmodules:
    """The fused specification's attention among torch's layers."""
    assert fused and not adapted
    plain = model._torch_layer(config)
    parts = plain.submodules.self_attention.submodules
    parts.core_attention = partial(SharedPromptAttention, kernel=WholeSequences)
    return TransformerBlockSubmodules(layer_specs=[plain for _ in layers], layer_norm=RMSNorm)


@contextmanager
def arranged_engine(place: Place, path: Path, setup: Setup) -> Iterator[MegatronEngine]:
    build = model.build_transformer_config
    with (
        mock.patch.object(model, "uses_transformer_engine", lambda device, dtype: True),
        mock.patch.object(model, "build_transformer_config", lambda *args, fused: build(*args, fused=False)),
        mock.patch.object(model, "decoder_spec", decoder_spec),
        engine(place, path, setup) as built,
    ):
        yield built


def step(
    place: Place, path: Path, setup: Setup, batch: list[Row], share: bool, arranged: bool = True
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Log-probs, gradients and computed tokens of a step with all rows in one micro-batch."""
    with (arranged_engine if arranged else engine)(place, path, setup) as built:
        assert built.can_share_prompts
        columns = {"weights": torch.cat([row.weights for row in batch])}
        pairs = [(row.prompt, row.response) for row in batch]
        micro_batches = [PackedMicroBatch.from_rows(pairs, columns, share_prompts=share)]
        (outputs,) = built.forward(micro_batches, OutputOptions(TEMPERATURE))
        built.forward_backward(micro_batches, policy_loss, OutputOptions(TEMPERATURE, with_entropy=True))
        grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
        return outputs.log_probs, grads, micro_batches[0].num_tokens


@pytest.mark.parametrize("family", ["qwen3", "llama_yarn", "deepseek_dense"])
@pytest.mark.parametrize("tp", [1, 2])
def test_shared_prompts_equal_repeated_ones_and_hugging_face(
    pool: ProcessPool, tmp_path: Path, family: str, tp: int
) -> None:
    check(pool, tmp_path, MODELS.get(family, {"family": family}), tp, arranged=True)


@pytest.mark.parametrize(("family", "tp"), [("olmo3", 2), ("gemma3", 2), ("gpt_oss", 1)])
def test_shared_prompts_in_sliding_windows(pool: ProcessPool, tmp_path: Path, family: str, tp: int) -> None:
    check(pool, tmp_path, MODELS[family], tp=tp, arranged=False)


@pytest.mark.parametrize("family", ["qwen3_next_dense", "qwen3_5"])
def test_shared_prompts_in_gated_delta_nets(pool: ProcessPool, tmp_path: Path, family: str) -> None:
    check(pool, tmp_path, MODELS[family], tp=2, arranged=False)


def check(pool: ProcessPool, tmp_path: Path, model: dict[str, Any], tp: int, arranged: bool) -> None:
    reference = save_model(tmp_path, **model)
    batch = [row._replace(prompt=rows()[number % 2].prompt) for number, row in enumerate(rows())]
    setup = Setup(ParallelLayout(tp=tp), sequence_parallel=tp > 1, optimizer=OptimizerOptions())
    repeated, shared = (pool.run(step, tp, tmp_path, setup, batch, share, arranged) for share in (False, True))
    theirs = torch.cat([policy_reference(reference, row)[0].detach() for row in batch])
    for (log_probs, grads, tokens), (plain, plain_grads, plain_tokens) in zip(shared, repeated, strict=True):
        assert tokens < plain_tokens
        assert (log_probs - theirs).abs().max() < 1e-5 and (plain - theirs).abs().max() < 1e-5
        scale = max(grad.abs().max().item() for grad in plain_grads.values())
        for name, grad in plain_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-5 * scale)
