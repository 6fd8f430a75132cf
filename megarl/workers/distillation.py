"""The loss of on-policy distillation, added to the policy loss of the rewards or in its place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megarl.algorithms import PolicyLossInputs, PolicyLossOptions, clipped_policy_loss, kl_penalty
from megarl.algorithms.kl import forward_kl_topk, unclamped_k3
from megarl.config.schema.distillation import DistillationLossConfig
from megarl.megatron import PackedMicroBatch, PolicyOutputs
from megarl.megatron.layers.logprobs import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_NUMBER
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models import WeightMap
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.workers.base import TokenLosses, TokenLossFunction
from megarl.workers.settings import TeacherHead

TEACHER_LOG_PROB, TEACHER_TOPK = "teacher_log_prob", "teacher_topk_log_probs"
TEACHER_COLUMNS = (TEACHER_LOG_PROB, TEACHER_IDS, TEACHER_TOPK, TEACHER_HIDDEN, TEACHER_NUMBER)
"""Columns that teachers add: the first, the next two with forward_kl_topk, or with the exact KL the fourth, and the
last if there are several teachers."""


def read_teacher_head(head: TeacherHead, student: WeightMap, runtime: Runtime) -> Tensor:
    """Read the rows of the teacher's output layer for this rank's tokens of the student, into host memory.

    A frozen layer needs no transfer between processes: each rank reads its rows from the model folder, once. Rows
    beyond the student's vocabulary are left out; the teacher's distribution is then over the student's tokens.

    Returns:
        ``[padded vocabulary of the student / tp, hidden size of the teacher]``.
    """
    reader, tp = HFReader(head.model_path), runtime.layout.tp
    tokens, padded = student.config.vocab_size, student.padded_vocab(tp)
    shard = WeightMap(reader.config).output_shard(tokens, padded, tp, runtime.layout.coordinate(runtime.rank).tp)
    ((_, rows),) = load_local(reader, [shard], getattr(torch, head.dtype))
    return rows


def distilled_loss(
    config: DistillationLossConfig,
    options: PolicyLossOptions,
    task_loss: TokenLossFunction,
    outputs: PolicyOutputs,
    micro_batch: PackedMicroBatch,
) -> TokenLosses:
    """Add the distillation loss to the policy loss, or replace it without task rewards.

    ``loss = task loss + distillation_loss_coef * distillation loss``; all tensors are packed ``[n]``.
    """
    distillation = distillation_loss(config, options, outputs, micro_batch)
    if not config.use_task_rewards:
        return distillation
    task = task_loss(outputs, micro_batch)
    return TokenLosses(
        task.loss + config.distillation_loss_coef * distillation.loss,
        {**task.loss_metrics, **distillation.loss_metrics},
        {**task.token_means, **distillation.token_means},
        task.sequence_means,
    )


def distillation_loss(
    config: DistillationLossConfig, options: PolicyLossOptions, outputs: PolicyOutputs, micro_batch: PackedMicroBatch
) -> TokenLosses:
    """Compute the loss per token between teacher and student (docs/how_to/distillation.md), and its metrics.

    Args:
        options: of the policy loss; the policy gradient replaces its clip range by that of ``config``.
        micro_batch: has the teacher's columns, and ``old_log_probs`` for the policy gradient.
    """
    divergence, means = _divergence(config, outputs, micro_batch)
    if config.loss_max_clamp is not None:
        divergence = divergence.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    if not config.use_policy_gradient:
        return TokenLosses(divergence, {"distillation/loss": divergence}, means)
    columns, clip = micro_batch.columns, config.clip_ratio
    policy = clipped_policy_loss(
        PolicyLossInputs(
            log_prob=outputs.log_probs,
            old_log_prob=columns["old_log_probs"],
            advantages=-divergence.detach(),
            response_mask=columns["response_mask"],
            lengths=micro_batch.row_lengths,
            options=replace(
                options,
                clip_ratio_low=config.clip_ratio_low or clip,
                clip_ratio_high=config.clip_ratio_high or clip,
            ),
        )
    )
    loss = policy.loss
    if "rollout_is_weights" in columns:
        loss = loss * columns["rollout_is_weights"]
    clipping = {f"distillation/{name}": values for name, values in policy.diagnostics.items()}
    return TokenLosses(loss, {"distillation/loss": loss}, {**means, **clipping})


def _divergence(
    config: DistillationLossConfig, outputs: PolicyOutputs, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence per token ``[n]``, and metrics averaged over the trained tokens."""
    columns = micro_batch.columns
    if config.teacher_topk:
        assert outputs.teacher_ids_log_probs is not None, "requested by the options of the outputs"
        compared = forward_kl_topk(outputs.teacher_ids_log_probs, columns[TEACHER_TOPK], config.log_prob_min_clamp)
        return compared.kl, {
            "distillation/student_mass": compared.student_mass,
            "distillation/teacher_mass": compared.teacher_mass,
        }
    if config.reads_teacher_hidden:
        assert outputs.teacher_kl is not None, "requested by the options of the outputs"
        return outputs.teacher_kl, {}
    teacher = columns[TEACHER_LOG_PROB]
    if config.loss_mode in ("low_var_kl", "k3"):  # loss_max_clamp is the only clamp
        divergence = unclamped_k3(outputs.log_probs - teacher)
    else:
        divergence = kl_penalty(outputs.log_probs, teacher, config.loss_mode)
    return divergence, {"distillation/abs_loss": divergence.abs()}
