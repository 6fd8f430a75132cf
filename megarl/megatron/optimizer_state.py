"""What a rank's optimizer keeps of each parameter, as flat tensors: Megatron's optimizers seen as one kind of thing.

Everything that depends on how a Megatron release lays out its optimizers is in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megarl.errors import CheckpointError
from megarl.megatron.optimizer import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""Float32 weights that the optimizer keeps beside half-precision ones."""


class StateShard(NamedTuple):
    """The part of one parameter's state that this rank holds.

    Attributes:
        start: first element of the flattened local parameter.
        stop: one after the last.
        tensors: flat, by kind (:data:`MOMENTS`, :data:`MASTER`); the optimizer's own memory.
    """

    start: int
    stop: int
    tensors: dict[str, Tensor]


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether each data-parallel rank holds a part of the state; else each holds all of it."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.megatron.chained_optimizers)


def state_shards(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, StateShard]:
    """State by parameter name; a parameter of which this rank holds nothing is absent.

    State that does not exist yet, because no step was taken, is made: zeros, as the first step would.

    Args:
        optimizer: the optimizer of this rank.
        params: the model's parameters, by name.
    """
    shards = {}
    for name, param in params.items():
        for part in optimizer.megatron.chained_optimizers:
            found = _main_weights(part, param)
            if found is None:
                continue
            main, start, stop = found
            state = _state(part.optimizer, main)
            tensors = {kind: state[kind].view(-1) for kind in MOMENTS}
            if main.dtype != param.dtype:
                tensors[MASTER] = main.detach().view(-1)
            shards[name] = StateShard(start, stop, tensors)
    return shards


def check_steps(optimizer: Optimizer) -> None:
    """Makes sure that the one step count that a checkpoint stores is that of every parameter.

    Raises:
        CheckpointError: Adam counted other steps than the schedule.
    """
    counted = set()
    for part in optimizer.megatron.chained_optimizers:
        counted |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        counted |= {int(group["step"]) for group in part.optimizer.param_groups if group["params"] and "step" in group}
    if counted - {optimizer.steps}:
        raise CheckpointError(f"the optimizer took {optimizer.steps} steps, but Adam counts {sorted(counted)}")


def set_steps(optimizer: Optimizer, steps: int) -> None:
    """Sets how many steps Adam and the schedule have taken. Each parameter gets a count of its own, never a shared one.

    Args:
        optimizer: its state exists (:func:`state_shards`).
        steps: optimizer steps.
    """
    optimizer.steps = steps
    for part in optimizer.megatron.chained_optimizers:
        if _counts_by_group(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = steps
        else:
            for state in part.optimizer.state.values():
                state["step"] = torch.full_like(state["step"], steps)


def _main_weights(part: Any, param: nn.Parameter) -> tuple[Tensor, int, int] | None:
    """What Adam updates for ``param``, and the range of the flattened parameter that this is."""
    if isinstance(part, DistributedOptimizer):
        if param not in part.model_param_group_index_map:
            return None
        group, index = part.model_param_group_index_map[param]
        owned = part._get_model_param_range_map(param)["param"]
        return part.optimizer.param_groups[group]["params"][index], owned.start, owned.end
    main = getattr(param, "main_param", None)
    main = param if main is None else main
    if not any(main is held for held in _params(part.optimizer)):
        return None
    return main, 0, param.numel()


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer, main: Tensor) -> dict[str, Any]:
    state = optimizer.state[main]
    for kind in MOMENTS:
        if kind not in state:
            state[kind] = torch.zeros_like(main, memory_format=torch.preserve_format).detach()
    if "step" not in state and not _counts_by_group(optimizer):
        state["step"] = torch.tensor(0.0)
    return state


def _counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """The fused Adam of Transformer Engine and Apex counts steps by parameter group, torch's by parameter."""
    return not isinstance(optimizer, torch.optim.Adam)
