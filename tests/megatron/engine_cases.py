"""Functions that the tests run in each process: one engine in one layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.distributed import Place
from support.whole_tensors import whole_tensors
from tiny_models import TEMPERATURE, Row
from torch import Tensor

from megarl.base.errors import MegarlError
from megarl.megatron import (
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    OutputOptions,
    OverlapOptions,
    PackedMicroBatch,
    PolicyOutputs,
    RecomputeOptions,
    StepResult,
    ValueOutputs,
    init_runtime,
    shutdown_runtime,
)
from megarl.models import ParallelLayout, read_model_config
from megarl.models.adapters import LoraOptions


class Setup(NamedTuple):
    """A layout and the options of an engine."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    value_head: bool = False
    dtype: torch.dtype = torch.float32
    rows_per_micro_batch: int = 3
    optimizer: OptimizerOptions | None = None
    recompute: RecomputeOptions | None = None
    overlap: OverlapOptions = OverlapOptions()
    transformer: tuple[tuple[str, Any], ...] = ()
    offload: tuple[str, ...] = ()
    lora: LoraOptions | None = None
    trained_tower: bool = False


@contextmanager
def engine(place: Place, path: Path, setup: Setup) -> Iterator[MegatronEngine]:
    runtime = init_runtime(
        setup.layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu", timeout_s=60
    )
    try:
        built = MegatronEngine(
            read_model_config(path).with_trained_tower(setup.trained_tower),
            setup.layout,
            runtime,
            MegatronOptions(
                dtype=setup.dtype,
                sequence_parallel=setup.sequence_parallel,
                value_head=setup.value_head,
                optimizer=setup.optimizer,
                recompute=setup.recompute,
                overlap=setup.overlap,
                transformer=dict(setup.transformer),
                offload=setup.offload,
                lora=setup.lora,
            ),
        )
        built.load_hf(path)
        yield built
    finally:
        shutdown_runtime()


def micro_batches(rows: list[Row], setup: Setup, dp_rank: int = 0, dp: int = 1) -> list[PackedMicroBatch]:
    mine = rows[dp_rank::dp]
    return [
        PackedMicroBatch.from_rows(
            [(row.prompt, row.response) for row in group],
            {"weights": torch.cat([r.weights for r in group]), "returns": torch.cat([r.returns for r in group])},
        )
        for start in range(0, len(mine), setup.rows_per_micro_batch)
        for group in [mine[start : start + setup.rows_per_micro_batch]]
    ]


def policy_loss(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A weighted likelihood with an entropy bonus."""
    weights = micro_batch.columns["weights"]
    nll, entropy = -(outputs.log_probs * weights).sum(), (outputs.entropy * weights).sum()
    return nll - 0.3 * entropy, {"nll": nll, "entropy": entropy}


def value_loss(outputs: ValueOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A weighted squared error."""
    errors = (outputs.values - micro_batch.columns["returns"]).square()
    loss = (errors * micro_batch.columns["weights"]).sum()
    return loss, {"loss": loss}


def forward(place: Place, path: Path, setup: Setup, rows: list[Row], with_entropy: bool = True) -> Any:
    """Packed log-probs and entropies, or values, of all rows; None if the engine returns nothing."""
    with engine(place, path, setup) as built:
        outputs = built.forward(
            micro_batches(rows, setup), OutputOptions(temperature=TEMPERATURE, with_entropy=with_entropy)
        )
        if outputs is None:
            return None
        if setup.value_head:
            return torch.cat([output.values for output in outputs])
        entropies = [output.entropy for output in outputs]
        return torch.cat([o.log_probs for o in outputs]), torch.cat(entropies) if with_entropy else entropies


class Training(NamedTuple):
    """One rank's results after some optimizer steps."""

    metrics: list[dict[str, float]]
    steps: list[StepResult]
    grads: dict[str, Tensor]  # of the last step, before clipping
    weights: dict[str, Tensor]


def train(place: Place, path: Path, setup: Setup, batches: list[list[Row]]) -> Training:
    """One optimizer step per batch."""
    loss = value_loss if setup.value_head else policy_loss
    metrics, steps, grads = [], [], {}
    with engine(place, path, setup) as built:
        for batch in batches:
            mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
            options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
            metrics.append(built.forward_backward(mine, loss, options))
            named = built.weights.parameters()
            grads = {name: param.main_grad.clone() for name, param in named.items()}
            steps.append(built.optimizer_step())
        return Training(metrics, steps, grads, built.weights.to_host())


def assemble(path: Path, setup: Setup, local: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Hugging Face tensors from the shards of each rank."""
    return whole_tensors(path, setup.layout, local, value_head=setup.value_head, tower=setup.trained_tower)


def refusal(place: Place, case: Callable[..., Any], *args: Any) -> str:
    """The error that a case raises."""
    try:
        case(place, *args)
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{case.__name__} was not refused")


def in_parts(values: Tensor, rows: list[Row]) -> tuple[Tensor, ...]:
    return values.split([len(row.response) for row in rows])
