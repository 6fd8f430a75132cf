"""Adam over Megatron's distributed optimizer, with clipping, a learning-rate schedule and steps that are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.algorithms import LearningRateSchedule, learning_rate


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(LearningRateSchedule):
    """Adam with decoupled weight decay (none on norms and biases), clipping, and the learning-rate schedule.

    Attributes:
        betas: decay of the two running means.
        eps: added to the denominator.
        weight_decay: decoupled decay of matrices.
        clip_grad: largest global gradient norm; 0 = no clipping.
        use_distributed_optimizer: shard the optimizer's state over data-parallel ranks.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True


class StepResult(NamedTuple):
    """What one optimizer step did; the same on every rank.

    Attributes:
        grad_norm: global norm of the gradient before clipping.
        lr: learning rate that was, or would have been, used.
        skipped: the loss or the gradient was not finite, and neither weights nor schedule moved.
    """

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """Megarl's view of Megatron's optimizer.

    Args:
        chunks: the stage's modules, wrapped for data parallelism.
        options: Adam and the schedule.
        dtype: of the weights; with bfloat16 the optimizer keeps float32 copies.

    Attributes:
        megatron: Megatron's optimizer, for checkpoints.
        steps: optimizer steps taken; the whole state of the schedule.
        skipped_in_a_row: optimizer steps skipped since the last one taken.
    """

    def __init__(self, chunks: Sequence[Any], options: OptimizerOptions, dtype: torch.dtype) -> None:
        self.options = options
        self.steps = 0
        self.skipped_in_a_row = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
        )
        self.megatron: ChainedOptimizer = get_megatron_optimizer(config, list(chunks))

    @property
    def next_lr(self) -> float:
        """Learning rate of the step to come."""
        return learning_rate(self.steps, self.options)

    def zero_grad(self) -> None:
        """Drops the gradients that the last step used."""
        self.megatron.zero_grad()

    def weights_changed(self) -> None:
        """Takes over weights that were set from outside, as after loading a model."""
        self.megatron.reload_model_params()

    def step(self, loss: Tensor) -> StepResult:
        """Clips and applies the gradients.

        The step is skipped on every rank if any rank saw a loss or a gradient that is not finite.

        Args:
            loss: this rank's, a scalar; only whether it is finite matters.
        """
        lr = self.next_lr
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not _finite_on_all_ranks(torch.stack([loss.new_tensor(grad_norm), loss])):
            self.skipped_in_a_row += 1
            return StepResult(grad_norm, lr, True)
        for group in self.megatron.param_groups:
            # Megatron leaves both to a scheduler of its own; the multiplier is 0 for norms and biases.
            group["lr"] = lr
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
        if self.options.clip_grad > 0:
            for part in self.megatron.chained_optimizers:
                if part.get_parameters():
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.options.clip_grad, grad_norm)
        self.megatron.step_with_ready_grads()
        self.steps += 1
        self.skipped_in_a_row = 0
        return StepResult(grad_norm, lr, False)


def _finite_on_all_ranks(values: Tensor) -> bool:
    finite = values.isfinite().all().float()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())
