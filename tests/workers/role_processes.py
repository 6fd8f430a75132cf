"""Workers in separate processes, called like the driver calls them, with pipes instead of Ray."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import Place, ProcessPool, RemoteError
from tiny_policies import CLIP_GRAD, EPS, LR, RESPONSE_WIDTH, TEMPERATURE, WARMUP, WEIGHT_DECAY

from megarl.cluster.partition import Partition, Rows, partition_costs, row_costs
from megarl.config import ActorConfig, CriticConfig, MegatronConfig, OptimConfig
from megarl.data import DataProto
from megarl.megatron import shutdown_runtime
from megarl.megatron.engine.offload import PARTS
from megarl.models import ParallelLayout
from megarl.workers.dispatch import WorkerPlace, read_marks
from megarl.workers.settings import LogProbSettings, MicroBatchBudget, RoleSettings, UpdatePlan

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "dp2": ParallelLayout(dp=2),
    "cp2": ParallelLayout(cp=2),
}
BUDGETS = {
    "one row": MicroBatchBudget(size=1),
    "all rows": MicroBatchBudget(size=8),
    "tokens": MicroBatchBudget(max_tokens=16),
}
ACTOR = ActorConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
    clip_ratio_c=1.5,
    entropy_coeff=0.01,
    use_kl_loss=True,
    kl_loss_coef=0.2,
    kl_loss_type="low_var_kl",
)
CRITIC = CriticConfig(cliprange_value=0.4, vf_coef=0.7)
MINI_BATCH_ROWS = 4

_held: list[Any] = []
_counts: list[int] = []
_hooks: list[Any] = []


def role_settings(
    path: Path, layout: ParallelLayout, *, learns: bool = True, megatron: dict[str, Any] | None = None, **optim: Any
) -> RoleSettings:
    config = MegatronConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        data_parallel_size=layout.dp,
        dtype="float32",
        **(megatron or {}),
    )
    options = {
        "lr": LR,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": CLIP_GRAD,
        "lr_warmup_steps": WARMUP,
        **optim,
    }
    return RoleSettings(
        model_path=str(path),
        layout=layout,
        megatron=config,
        optim=OptimConfig(**options) if learns else None,
        total_updates=10,
        device="cpu",
        seed=1,
        nccl_timeout=600,
    )


def update_plan(
    mode: str = "token-mean", budget: str = "tokens", mini_batch_rows: int = MINI_BATCH_ROWS, epochs: int = 1
) -> UpdatePlan:
    return UpdatePlan(mini_batch_rows, epochs, BUDGETS[budget], mode, RESPONSE_WIDTH)


def log_prob_settings(budget: str = "tokens") -> LogProbSettings:
    return LogProbSettings(BUDGETS[budget], TEMPERATURE)


def actor_arguments(path: Path, layout: ParallelLayout, *, reference: bool = False, **optim: Any) -> dict[str, Any]:
    return {
        "settings": role_settings(path, layout, **optim),
        "config": ACTOR,
        "plan": update_plan(),
        "log_prob": log_prob_settings(),
        "reference": log_prob_settings("one row") if reference else None,
    }


def with_offload(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same role with everything offloaded between its phases."""
    settings = arguments["settings"]
    megatron = replace(settings.megatron, **{f"{part}_offload": True for part in PARTS})
    return {**arguments, "settings": replace(settings, megatron=megatron)}


@dataclass(frozen=True)
class Raised:
    """Class name, message and traceback of a rank's exception."""

    kind: str
    text: str
    trace: str


class Role:
    """One worker per process; a context in which its process group lives."""

    def __init__(self, pool: ProcessPool, worker_cls: type, layout: ParallelLayout, arguments: dict[str, Any]) -> None:
        self.pool = pool
        self.layout = layout
        self.marks = read_marks(worker_cls)
        self._run(_start, worker_cls, arguments)

    def __enter__(self) -> Role:
        self.call("init_model")
        return self

    def __exit__(self, kind: type | None, *details: Any) -> None:
        if kind is None:
            self._run(_stop)
        else:
            self.pool.close()  # the processes may be anywhere

    def call(self, verb: str, *args: Any) -> list[Any]:
        """Call a verb with the same arguments on all ranks; results by rank.

        An exception is raised here, once all ranks have answered. As in a run, the processes go on.
        """
        results = self._run(_attempt, verb, [args] * self.layout.world_size)
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                raise RemoteError(f"rank {rank}:\n{result.trace}")
        return results

    def split(
        self,
        verb: str,
        batch: DataProto,
        mini_batch_rows: int | None = None,
        attempt: bool = False,
        plan: Rows | None = None,
    ) -> list[Any]:
        """Call a verb with each data-parallel rank's rows, split like the driver does; results by rank.

        With ``plan`` ranks may have different numbers of rows of a mini-batch, and receive them.
        """
        mark = self.marks[verb]
        if plan is None:
            partition = Partition(self._plan(verb, batch, mini_batch_rows))
        else:
            partition = Partition(plan, mini_batch_rows)
        chunks = partition.split(mark.read(batch))
        args = [(chunks[self.layout.coordinate(rank).dp],) for rank in range(self.layout.world_size)]
        return self._run(_attempt if attempt else _call, verb, args)

    def map(self, verb: str, batch: DataProto) -> DataProto:
        """Call a verb that returns rows; the owners' rows in the order of ``batch``."""
        results = self.split(verb, batch)
        owners = [self.layout.rank(dp=dp, pp=self.layout.pp - 1) for dp in range(self.layout.dp)]
        last = [self.layout.coordinate(rank).pp == self.layout.pp - 1 for rank in range(self.layout.world_size)]
        assert [result is not None for result in results] == last
        return Partition(self._plan(verb, batch, None)).collect([results[owner] for owner in owners])

    def update(self, verb: str, batch: DataProto, mini_batch_rows: int = MINI_BATCH_ROWS) -> dict[str, float]:
        """Metrics of an update, equal on all ranks."""
        results = self.split(verb, batch, mini_batch_rows)
        for result in results:
            assert result == pytest.approx(results[0], rel=0, abs=0, nan_ok=True)
        return results[0]

    def rebuild(self, **attributes: Any) -> None:
        """Restart from the initial weights with other settings, in the same process group."""
        self._run(_rebuild, attributes)

    def local_weights(self) -> list[dict[str, torch.Tensor]]:
        """Copies of each rank's shard of the weights."""
        return self._run(_local_weights)

    def count_tokens(self) -> None:
        """Restart the token count; see :meth:`counted_tokens`."""
        self._run(_count_tokens)

    def counted_tokens(self) -> list[list[int]]:
        """Tokens of each micro-batch since :meth:`count_tokens`, by rank."""
        return self._run(_counted_tokens)

    def offloaded_parts(self) -> tuple[str, ...]:
        """Offloaded parts; the ranks must agree."""
        (parts,) = set(self._run(_offloaded_parts))
        return parts

    def next_lr(self) -> float:
        """Learning rate of the next optimizer step; the ranks must agree."""
        (rate,) = set(self._run(_next_lr))
        return rate

    def _plan(self, verb: str, batch: DataProto, mini_batch_rows: int | None) -> Rows:
        # Equal counts, where they come out, suit every budget; counts by work alone have a test of their own.
        equal = self.marks[verb].equal_rows or len(batch) % self.layout.dp == 0
        return partition_costs(row_costs(batch), self.layout.dp, mini_batch_rows, equal=equal).rows

    def _run(self, function: Any, *args: Any) -> list[Any]:
        return self.pool.run(function, self.layout.world_size, *args)


def _start(place: Place, worker_cls: type, arguments: dict[str, Any]) -> None:
    _held.append(worker_cls(WorkerPlace(place.rank, place.world_size, "127.0.0.1", place.port), **arguments))


def _stop(place: Place) -> None:
    _held.clear()
    shutdown_runtime()


def _call(place: Place, verb: str, args: Sequence[tuple[Any, ...]]) -> Any:
    return getattr(_held[0], verb)(*args[place.rank])


def _attempt(place: Place, verb: str, args: Sequence[tuple[Any, ...]]) -> Any:
    try:
        return _call(place, verb, args)
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())


def _rebuild(place: Place, attributes: dict[str, Any]) -> None:
    worker = _held[0]
    for name, value in attributes.items():
        setattr(worker, name, value)
    worker.init_model()


def _local_weights(place: Place) -> dict[str, torch.Tensor]:
    return _held[0].engine.weights.to_host()


def _count_tokens(place: Place) -> None:
    _counts.clear()
    for hook in _hooks:
        hook.remove()
    embeddings = [
        module
        for chunk in _held[0].engine.chunks
        for module in chunk.modules()
        if type(module).__name__ == "VocabParallelEmbedding"
    ]
    _hooks[:] = [module.register_forward_pre_hook(_count) for module in embeddings]


def _count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    _counts.append(args[0].numel())


def _counted_tokens(place: Place) -> list[int]:
    return list(_counts)


def _offloaded_parts(place: Place) -> tuple[str, ...]:
    return _held[0].engine.offload_manager.offloaded


def _next_lr(place: Place) -> float:
    return _held[0].engine.optimizer.next_lr
