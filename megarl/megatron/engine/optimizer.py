"""Adam on Megatron's distributed optimizer: clipping, learning-rate schedule, skipped steps, and its state for
checkpoints.

The state functions below depend on the optimizer layout of a Megatron release; nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megarl.algorithms import LearningRateSchedule, learning_rate
from megarl.base.errors import CheckpointError
from megarl.megatron.layers.images import VISION

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""Float32 weights that the optimizer keeps in addition to half-precision ones."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(LearningRateSchedule):
    """Adam with decoupled weight decay (none on norms and biases), clipping, and the learning-rate schedule.

    Attributes:
        clip_grad: largest global gradient norm; 0 = no clipping.
        vision_lr_factor: factor on the learning rate of a trained vision tower.
        use_distributed_optimizer: shard the optimizer's state over data-parallel ranks.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    vision_lr_factor: float = 1.0
    use_distributed_optimizer: bool = True


class StepResult(NamedTuple):
    """Result of one optimizer step; the same on every rank.

    Attributes:
        grad_norm: global norm of the gradient before clipping.
        skipped: the loss or the gradient was not finite; neither weights nor schedule changed.
    """

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """Wrapper of Megatron's optimizer; ``steps``, the optimizer steps, is the schedule's whole state."""

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
        groups = None
        if options.vision_lr_factor != 1:
            factor = {ParamKey(attr=VISION): {"lr_mult": options.vision_lr_factor}}
            groups = get_standard_config_overrides(config) | factor
        self.megatron: ChainedOptimizer = get_megatron_optimizer(
            config, list(chunks), groups, use_gloo_process_groups=False
        )
        for inner in self.inner_optimizers():
            if any(param.is_cuda for group in inner.param_groups for param in group["params"]):
                use_fused_kernels(inner)

    def inner_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """List the optimizers of this rank's tensors; a stage may lack some of Megatron's."""
        for part in self.megatron.chained_optimizers:
            if getattr(part, "optimizer", None) is not None:
                yield part.optimizer

    @property
    def next_lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.steps, self.options)

    def step(self, loss: Tensor) -> StepResult:
        """Clip and apply the gradients; skip the step on every rank if any rank's loss or gradient is not finite."""
        lr = self.next_lr
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        is_finite = torch.stack([loss.new_tensor(grad_norm), loss]).isfinite().all().float()
        dist.all_reduce(is_finite, dist.ReduceOp.MIN)
        if not is_finite.item():
            self.skipped_in_a_row += 1
            return StepResult(grad_norm, lr, True)
        for group in self.megatron.param_groups:
            # Megatron's scheduler would set both; the second multiplier is 0 for norms and biases.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
        if self.options.clip_grad > 0:
            for part in self.megatron.chained_optimizers:
                if part.get_parameters():
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.options.clip_grad, grad_norm)
        self.megatron.step_with_ready_grads()
        self.steps += 1
        self.skipped_in_a_row = 0
        return StepResult(grad_norm, lr, False)


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Make torch's Adam update each tensor in one kernel; other optimizers are fused already.

    The default reads and writes the state a dozen times, and needs temporary memory as large as one moment.
    """
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


class StateShard(NamedTuple):
    """This rank's part of one parameter's optimizer state: flat views of the optimizer's memory, by kind."""

    start: int
    stop: int
    tensors: dict[str, Tensor]


def is_sharded(optimizer: Optimizer) -> bool:
    """Return whether each data-parallel rank holds a part of the state; otherwise each holds all of it."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.megatron.chained_optimizers)


def state_shards(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> dict[str, StateShard]:
    """Return the optimizer state of the parameters that this rank owns, by name; its tensors may be offloaded.

    Creates state that does not exist before the first step: zeros, as the first step would.
    """
    shards = {}
    for name, param in params.items():
        for part in optimizer.megatron.chained_optimizers:
            main_range = _main_weights(part, param)
            if main_range is None:
                continue
            main, start, stop = main_range
            state = _state(part.optimizer, main, zeros_like)
            tensors = {kind: state[kind].view(-1) for kind in MOMENTS}
            if main.dtype != param.dtype:
                tensors[MASTER] = main.detach().view(-1)
            shards[name] = StateShard(start, stop, tensors)
    return shards


def check_steps(optimizer: Optimizer) -> None:
    """Check that every parameter has the one step count that a checkpoint stores.

    Raises:
        CheckpointError: Adam's step count differs from the schedule's.
    """
    counts = set()
    for part in optimizer.megatron.chained_optimizers:
        counts |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        counts |= {int(group["step"]) for group in part.optimizer.param_groups if group["params"] and "step" in group}
    if counts - {optimizer.steps}:
        text = f"the optimizer took {optimizer.steps} steps, but Adam counts {sorted(counts)}"
        raise CheckpointError(text, code="resume.optimizer-steps")


def set_steps(optimizer: Optimizer, steps: int) -> None:
    """Set the step count of schedule and Adam, whose state exists; every parameter gets a separate tensor."""
    optimizer.steps = steps
    for part in optimizer.megatron.chained_optimizers:
        if _counts_by_group(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = steps
        else:
            for state in part.optimizer.state.values():
                state["step"] = torch.full_like(state["step"], steps)


def _main_weights(part: Any, param: nn.Parameter) -> tuple[Tensor, int, int] | None:
    """The tensor that Adam updates for ``param``, and its range of the flattened parameter."""
    if isinstance(part, DistributedOptimizer):
        if param not in part.model_param_group_index_map:
            return None
        group, index = part.model_param_group_index_map[param]
        owned = part._get_model_param_range_map(param)["param"]
        return part.optimizer.param_groups[group]["params"][index], owned.start, owned.end
    main = getattr(param, "main_param", None)
    main = param if main is None else main
    if not any(main is updated for group in part.optimizer.param_groups for updated in group["params"]):
        return None
    return main, 0, param.numel()


def _state(optimizer: torch.optim.Optimizer, main: Tensor, zeros_like: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[main]
    for kind in MOMENTS:
        if kind not in state:
            state[kind] = zeros_like(main.detach())
    if "step" not in state and not _counts_by_group(optimizer):
        # The fused kernels read the count on the device.
        is_fused = optimizer.param_groups[0].get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=main.device if is_fused else None)
    return state


def _counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """The fused Adam of Transformer Engine and Apex counts steps by parameter group; torch's counts by parameter."""
    return not isinstance(optimizer, torch.optim.Adam)
