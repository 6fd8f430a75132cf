"""Outputs of a model for the response tokens of a micro-batch: log-probs, entropies, values, pooled hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.layers.context_parallel import MicroBatchPart, gather_outputs
from megarl.megatron.layers.logprobs import (
    REF_HIDDEN,
    SUPPORT,
    TEACHER_HIDDEN,
    TEACHER_IDS,
    TEACHER_NUMBER,
    ReferenceHead,
    TopTokens,
    vocab_parallel_outputs,
    vocab_parallel_top_tokens,
)
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.megatron.runtime.process_groups import Runtime

POOLED = "pooled"
"""Column of a micro-batch: 1 = the mean includes the hidden state of this response token, 0 = it does not."""


@dataclass(frozen=True)
class PolicyOutputs:
    """Outputs of a language model for a micro-batch, ``[response tokens]`` row after row; None if not requested.

    Attributes:
        log_probs: float32, at the requested temperature.
        entropy: entropy of each token's distribution, in nats.
        is_argmax: whether no other token has a higher probability, bool.
        ref_kl: exact KL to the reference's distribution, in nats.
        routes: each row's experts, prompt and response, ``[tokens, expert layers, per token]`` int16.
        teacher_ids_log_probs: log-probs of the teacher's tokens, ``[response tokens, k]``.
        top: the most probable tokens, ``[response tokens, k]``.
        sum_pi_squared: sum of the squared probabilities of each token's distribution, without gradients.
        teacher_kl: exact KL to the teacher's distribution, in nats.
    """

    log_probs: Tensor
    entropy: Tensor | None
    is_argmax: Tensor
    ref_kl: Tensor | None = None
    routes: tuple[Tensor, ...] | None = None
    teacher_ids_log_probs: Tensor | None = None
    top: TopTokens | None = None
    sum_pi_squared: Tensor | None = None
    teacher_kl: Tensor | None = None


@dataclass(frozen=True)
class ValueOutputs:
    """A critic's values of the state before each response token, ``[response tokens]`` float32, row after row."""

    values: Tensor


Outputs = PolicyOutputs | ValueOutputs


class OutputOptions(NamedTuple):
    """Requested outputs of a language model; a critic has no options.

    Attributes:
        ref_head: the reference's output layer, for the exact KL to it; the micro-batches need a column
            :data:`~megarl.megatron.layers.logprobs.REF_HIDDEN`. Used on the last stage.
        record_routes: return the experts of every token; by a pass without gradients.
        at_teacher_ids: compute the log-probs of the tokens in the column
            :data:`~megarl.megatron.layers.logprobs.TEACHER_IDS`.
        top: number of most probable tokens to find per position, without gradients.
        vocab_size: all distributions are over smaller token ids, as for a teacher whose output layer has more tokens
            than the student's; None = the model's vocabulary.
        teacher_heads: the teachers' output layers, for each token's exact KL to its teacher, in place of ``ref_head``;
            by the columns ``TEACHER_HIDDEN`` and, with several teachers, ``TEACHER_NUMBER``.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    ref_head: Tensor | None = None
    record_routes: bool = False
    at_teacher_ids: bool = False
    top: int = 0
    vocab_size: int | None = None
    with_sum_pi_squared: bool = False
    teacher_heads: Sequence[Tensor] = ()


DEFAULT_OUTPUTS = OutputOptions()


def policy_outputs(
    logits: Tensor,
    part: MicroBatchPart,
    micro_batch: PackedMicroBatch,
    options: OutputOptions,
    vocab_size: int,
    runtime: Runtime,
) -> PolicyOutputs:
    """Compute a micro-batch's outputs from this rank's logits; communicates.

    With a column :data:`~megarl.megatron.layers.logprobs.SUPPORT` the distributions are over each token's support.

    Args:
        logits: ``[this rank's response tokens, padded vocabulary / tensor-parallel size]``.
    """
    vocab_size = min(vocab_size, options.vocab_size or vocab_size)
    top = None
    if options.top:
        top = vocab_parallel_top_tokens(
            logits, options.top, vocab_size=vocab_size, temperature=options.temperature, group=runtime.tp_group
        )
    ids = micro_batch.columns[TEACHER_IDS][part.local_indices].long() if options.at_teacher_ids else None
    support = micro_batch.columns.get(SUPPORT)
    local = vocab_parallel_outputs(
        logits,
        part.targets,
        vocab_size=vocab_size,
        temperature=options.temperature,
        with_entropy=options.with_entropy,
        with_sum_pi_squared=options.with_sum_pi_squared,
        reference=_reference(part, micro_batch, options),
        ids=ids,
        support=None if support is None else support[part.local_indices].long(),
        group=runtime.tp_group,
        overwrite_logits=True,  # the schedule keeps no logits, and nothing else reads them
    )

    def whole(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_outputs(values, part, runtime.cp_group)

    kl = whole(local.ref_kl)
    return PolicyOutputs(
        gather_outputs(local.log_probs, part, runtime.cp_group),
        whole(local.entropy),
        gather_outputs(local.is_argmax.float(), part, runtime.cp_group) > 0,
        kl if options.ref_head is not None else None,
        teacher_ids_log_probs=whole(local.ids_log_probs),
        top=None if top is None else TopTokens(*(gather_outputs(values, part, runtime.cp_group) for values in top)),
        sum_pi_squared=whole(local.sum_pi_squared),
        teacher_kl=kl if options.teacher_heads else None,
    )


def _reference(part: MicroBatchPart, micro_batch: PackedMicroBatch, options: OutputOptions) -> ReferenceHead | None:
    """The reference's or the teachers' distributions for this rank's tokens."""

    def local(column: str) -> Tensor:
        return micro_batch.columns[column][part.local_indices]

    if options.ref_head is not None:
        return ReferenceHead(local(REF_HIDDEN), [options.ref_head])
    if not options.teacher_heads:
        return None
    numbers = local(TEACHER_NUMBER) if len(options.teacher_heads) > 1 else None
    return ReferenceHead(local(TEACHER_HIDDEN), options.teacher_heads, numbers)


def mean_of_rows(
    hidden: Tensor, part: MicroBatchPart, micro_batch: PackedMicroBatch, group: dist.ProcessGroup
) -> Tensor:
    """Average the hidden states of tokens marked by :data:`POOLED`, row by row; communicates.

    Args:
        hidden: ``[this rank's response tokens, hidden]``.

    Returns:
        ``[rows, hidden]`` float32, the same on every rank of the group; zeros for a row without marked tokens.
    """
    marked = micro_batch.columns[POOLED].float()
    lengths = micro_batch.row_lengths
    rows = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths, output_size=len(marked))
    counts = marked.new_zeros(len(lengths)).index_add(0, rows, marked)
    sums = marked.new_zeros(len(lengths), hidden.shape[1])
    sums.index_add_(0, rows[part.local_indices], hidden.float() * marked[part.local_indices, None])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums / counts.clamp(min=1)[:, None]
