"""The model of one pipeline stage: Megatron's decoder over packed sequences, with an output only where it counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.layers import PackedSequences, ValueHead
from megarl.megatron.packed import PackedMicroBatch
from megarl.megatron.rotary import inverse_frequencies, rotation_table
from megarl.megatron.runtime import Runtime
from megarl.megatron.spec import decoder_spec, uses_transformer_engine
from megarl.megatron.transformer_config import build_transformer_config
from megarl.models import ModelConfig, WeightMap


class PackedModel(GPTModel):
    """A GPT model whose forward takes a packed micro-batch.

    The output layer, the largest matrix of a small model, runs at the positions that predict a response token only.
    """

    def forward(self, micro_batch: PackedMicroBatch, sequences: PackedSequences) -> Tensor:
        """Output of this stage.

        Args:
            micro_batch: padded to a multiple of the tensor-parallel size under sequence parallelism.
            sequences: the same micro-batch as the layers see it.

        Returns:
            Before the last stage hidden states ``[tokens (of this rank), 1, hidden]``. On the last stage values
            ``[response tokens]``, or logits ``[response tokens, padded vocabulary / tensor-parallel size]``.
        """
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=micro_batch.tokens[None], position_ids=None)
        rotary = None
        if self.position_embedding_type == "rope":
            rotary = self.rotary_pos_emb(sequences.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=sequences
        )
        return self._output(hidden, micro_batch.predictors) if self.post_process else hidden

    def _output(self, hidden: Tensor, predictors: Tensor) -> Tensor:
        is_value = isinstance(self.output_layer, ValueHead)
        if self.config.sequence_parallel:
            # Each rank's logits give a part of the gradient (to be summed); values give all of it on every rank.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not is_value, group=self.pg_collection.tp
            )
        chosen = hidden[:, 0].index_select(0, predictors)
        if is_value:
            return self.output_layer(chosen)
        tied = self.share_embeddings_and_output_weights
        return linear_with_grad_accumulation_and_async_allreduce(
            chosen,
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            None,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=self.config.tensor_model_parallel_size > 1 and not self.config.sequence_parallel,
            sequence_parallel=False,
            tp_group=self.pg_collection.tp,
        )


@dataclass(frozen=True)
class StageModel:
    """A pipeline stage's model, and how to present a micro-batch to it.

    Attributes:
        module: the model.
        frequencies: rotary frequencies, on the device.
    """

    module: PackedModel
    frequencies: Tensor

    def sequences(self, micro_batch: PackedMicroBatch) -> PackedSequences:
        """What the layers need to know about ``micro_batch``; computed once, used by all of them."""
        device, dtype = self.frequencies.device, self.module.config.params_dtype
        ends = torch.tensor((0, *micro_batch.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(micro_batch.lengths)
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            runs=micro_batch.runs(),
            rotation=rotation_table(micro_batch.positions(), self.frequencies, dtype),
        )


def build_model(
    model: ModelConfig, runtime: Runtime, dtype: torch.dtype, *, sequence_parallel: bool, value_head: bool
) -> StageModel:
    """Builds this rank's stage, with weights allocated and not yet set.

    Args:
        model: the model.
        runtime: this rank's place in the layout.
        dtype: of weights and activations.
        sequence_parallel: split activations by sequence too.
        value_head: a scalar head (a critic) in place of the output layer.
    """
    layout = runtime.layout
    fused = uses_transformer_engine(runtime.device, dtype)
    config = build_transformer_config(model, layout, dtype, sequence_parallel=sequence_parallel, fused=fused)
    module = PackedModel(
        config,
        transformer_layer_spec=decoder_spec(config, fused),
        vocab_size=WeightMap(model).padded_vocab(layout.tp),
        max_sequence_length=model.max_position_embeddings,
        pre_process=runtime.is_first_stage,
        post_process=runtime.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings and not value_head,
        # The torch layers take their rotation from the micro-batch, once, instead of sequence by sequence.
        position_embedding_type="rope" if fused else "none",
        rotary_base=int(model.rope_theta),
    )
    frequencies = inverse_frequencies(model).to(runtime.device)
    if fused:
        module.rotary_pos_emb.inv_freq = frequencies
    if value_head and runtime.is_last_stage:
        module.output_layer = ValueHead(config, runtime.device)
    return StageModel(module, frequencies)
