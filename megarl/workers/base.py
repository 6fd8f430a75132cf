"""What every Megatron role shares: one model in one layout, its checkpoints, and the loop over mini-batches."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from megarl.algorithms import LossCounts, loss_counts, token_weights
from megarl.config import MegatronConfig, OptimConfig
from megarl.data import DataProto
from megarl.errors import MegarlError
from megarl.megatron import (
    DEFAULT_OUTPUTS,
    EngineOptions,
    MegatronEngine,
    OptimizerOptions,
    OutputOptions,
    OverlapOptions,
    PackedMicroBatch,
    RecomputeOptions,
    init_runtime,
)
from megarl.megatron.offload import GRAD, OPTIMIZER, PARAM
from megarl.models import ModelConfig, read_model_config
from megarl.own_module import import_own
from megarl.workers.dispatch import MINI_BATCH_SIZES, Dispatch, verb
from megarl.workers.place import WorkerPlace
from megarl.workers.rows import PackedRows
from megarl.workers.saving import SavingWorker
from megarl.workers.schedule import schedule_of
from megarl.workers.settings import MicroBatchBudget, RoleSettings, UpdatePlan


class TokenLosses(NamedTuple):
    """What a role's loss says of the response tokens of a micro-batch; every tensor is packed, ``[n]``.

    Attributes:
        loss: what is minimised, aggregated as the configuration says.
        parts: metrics aggregated like the loss.
        facts: metrics that are means over the trained tokens.
        answers: metrics that are shares of rows: those in which every trained token is true.
    """

    loss: Tensor
    parts: Mapping[str, Tensor]
    facts: Mapping[str, Tensor]
    answers: Mapping[str, Tensor] = {}


TokenLossFunction = Callable[[Any, PackedMicroBatch], TokenLosses]
"""From a model's outputs and the micro-batch they are of, whose columns are those asked for and ``response_mask``."""
ColumnFunction = Callable[[PackedRows, range, Sequence[Sequence[int]]], Mapping[str, Tensor]]
"""From rows, those of a mini-batch and how they are cut, to columns over the mini-batch's response tokens, packed."""


def no_more_columns(rows: PackedRows, mini_batch: range, groups: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """What most losses read besides the batch's columns."""
    return {}


logger = logging.getLogger(__name__)

_Worker = TypeVar("_Worker", bound="MegatronWorker")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

LOSS_WEIGHT, FACT_WEIGHT = "loss_weight", "fact_weight"


def ends_phase(method: Callable[Concatenate[_Worker, _Arguments], _Result]) -> Callable[..., _Result]:
    """After a worker's method, what its configuration keeps in host memory between phases goes there."""

    @functools.wraps(method)
    def wrapped(self: _Worker, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result = method(self, *args, **kwargs)
        self.engine.residence.rest()
        return result

    return wrapped


class SkippedStepsError(MegarlError):
    """Too many optimizer steps in a row had a non-finite gradient."""


class MegatronWorker(SavingWorker):
    """One rank of a role: a plain class, usable under Ray, torchrun and pytest alike.

    Args:
        place: of this process in the role.
        settings: what the role is built from.
    """

    prefix = ""
    """Prefix of the role's metrics."""
    value_head = False
    """Whether the model ends in a scalar head instead of the vocabulary."""

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings) -> None:
        self.settings = settings
        import_own(*settings.external_lib)
        self.runtime = init_runtime(
            settings.layout,
            **place._asdict(),
            device=settings.device,
            seed=settings.seed,
        )
        self.engine: MegatronEngine
        self._skips: list[str] = []

    @verb(Dispatch.ALL)
    @ends_phase
    def init_model(self) -> None:
        """Build the model in this role's layout and read this rank's slices of the initial weights."""
        settings = self.settings
        self.engine = MegatronEngine(self.model_config(), settings.layout, self.runtime, self._engine_options())
        self.engine.load_hf(settings.model_path)

    def model_config(self) -> ModelConfig:
        """The model to build: that of the initial weights."""
        return read_model_config(self.settings.model_path)

    @verb(Dispatch.ONE)
    def describe(self) -> str:
        """One line: the layout, the number format, and whose kernels compute."""
        return self.engine.describe()

    @verb(Dispatch.ALL)
    @ends_phase
    def export_hf(self, path: str) -> None:
        """Write the model as a Hugging Face folder with the initial one's tokenizer, in place of what is there."""
        self.engine.export_hf(Path(path), source=Path(self.settings.model_path), overwrite=True)

    def update(
        self,
        batch: DataProto,
        plan: UpdatePlan,
        columns: Sequence[str],
        loss: TokenLossFunction,
        outputs: OutputOptions = DEFAULT_OUTPUTS,
        more_columns: ColumnFunction = no_more_columns,
    ) -> dict[str, float]:
        """Optimizer steps over the mini-batches of this rank's rows.

        Args:
            batch: rows of this data-parallel rank, mini-batch after mini-batch, with ``response_mask``; equally many of
                each unless ``meta_info`` has :data:`MINI_BATCH_SIZES`.
            plan: mini-batches, epochs, budget, aggregation.
            columns: response-aligned columns that the loss reads.
            loss: the model's outputs and those columns, packed, to losses per token.
            outputs: what the model must tell of the tokens.
            more_columns: makes further ones that the loss reads, before each mini-batch's step; may communicate.

        Returns:
            Metrics under the role's prefix, averaged over the optimizer steps; equal on all ranks.
        """
        rows = self.packed_rows(batch, plan.budget)
        share = plan.mini_batch_rows // self.settings.layout.dp
        sizes = batch.meta_info.get(MINI_BATCH_SIZES, [share] * (len(rows) // share))
        totals: dict[str, float] = defaultdict(float)
        steps = 0
        for _ in range(plan.epochs):
            for start, stop in pairwise(accumulate(sizes, initial=0)):
                mini_batch = range(start, stop)
                for name, value in self._step(rows, mini_batch, plan, columns, loss, outputs, more_columns).items():
                    totals[name] += value
                steps += 1
        metrics = {f"{self.prefix}/{name}": value / steps for name, value in totals.items()}
        metrics[f"{self.prefix}/skipped_steps"] = totals["skipped_steps"]
        return metrics | self.end_phase()

    def _step(
        self,
        rows: PackedRows,
        mini_batch: range,
        plan: UpdatePlan,
        columns: Sequence[str],
        loss: TokenLossFunction,
        options: OutputOptions,
        more_columns: ColumnFunction,
    ) -> dict[str, float]:
        """One optimizer step: forward and backward over the mini-batch's micro-batches, then the update."""
        lengths = torch.tensor([rows.response_lengths[row] for row in mini_batch])
        mask = rows.column("response_mask", mini_batch)
        counts = self._global_counts(loss_counts(mask, lengths))
        weigh = partial(token_weights, mask, global_tokens=counts.tokens, global_sequences=counts.sequences)
        groups = rows.micro_batches(plan.budget, mini_batch, self.counts_over_dp)
        # what a tool said may hold anything: a number that is not finite would survive a weight of zero
        known = {name: rows.column(name, mini_batch).where(mask.bool(), 0) for name in columns}
        known |= more_columns(rows, mini_batch, groups)
        known["response_mask"] = mask
        known[LOSS_WEIGHT] = weigh(plan.loss_agg_mode, lengths=lengths, horizon=plan.horizon)
        known[FACT_WEIGHT] = weigh("token-mean", lengths=lengths)
        of_rows = {name: column.split(lengths.tolist()) for name, column in known.items()}
        micro_batches = [
            rows.pack(
                group,
                {name: torch.cat([parts[row - mini_batch.start] for row in group]) for name, parts in of_rows.items()},
            )
            for group in groups
        ]
        metrics = self.engine.forward_backward(
            micro_batches,
            partial(weighted_sums, loss, counts.sequences),
            options,
        )
        return metrics | self.step_optimizer(lambda number, row: rows.describe(groups[number][row]))

    def step_optimizer(self, describe: Callable[[int, int], str]) -> dict[str, float]:
        """The optimizer's step on the gradients that there are, or its skipping, and the metrics of it.

        Args:
            describe: names a sample by the number of its micro-batch and its row there.

        Raises:
            SkippedStepsError: too many steps in a row were skipped.
        """
        result = self.engine.optimizer_step()
        if result.skipped:
            self._tell_skip(describe)
        return {"grad_norm": result.grad_norm, "lr": result.lr, "skipped_steps": float(result.skipped)}

    def packed_rows(self, batch: DataProto, budget: MicroBatchBudget) -> PackedRows:
        """The rows of a batch, ready to be packed as ``budget`` asks and the engine can."""
        return PackedRows(batch, share_prompts=budget.share_prompts and self.engine.can_share_prompts)

    def counts_over_dp(self, count: int) -> list[int]:
        """A number of every data-parallel rank, from this rank's; communicates."""
        mine = torch.zeros(self.settings.layout.dp, dtype=torch.int64)
        mine[self.runtime.coordinate.dp] = count
        return self.engine.all_reduce_dp(mine).tolist()

    def gather_over_dp(self, columns: Sequence[Tensor]) -> tuple[Tensor, slice]:
        """What all data-parallel ranks have of some columns, each in the order of the ranks; communicates.

        Args:
            columns: ``[n]`` each; ``n`` may be another on another rank.

        Returns:
            ``[number of columns, sum of n]`` in double precision, the same on all of them, and where this rank's are.
        """
        mine = torch.stack([column.double() for column in columns])
        counts = self.counts_over_dp(mine.shape[1])
        first = sum(counts[: self.runtime.coordinate.dp])
        here = slice(first, first + mine.shape[1])
        whole = mine.new_zeros(len(columns), sum(counts))
        whole[:, here] = mine
        return self.engine.all_reduce_dp(whole), here

    def end_phase(self) -> dict[str, float]:
        """What rests between phases leaves the device; peak memory since the last call, and what that freed.

        Each figure is that of the rank with most; communicates.
        """
        device, gigabytes = self.runtime.device, {}
        if device.type == "cuda":
            gigabytes["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        freed = self.engine.residence.rest()
        gigabytes |= {f"offloaded_gb/{part}": size / 2**30 for part, size in freed.items()}
        if not gigabytes:
            return {}
        most = self.engine.max_over_ranks(torch.tensor(list(gigabytes.values()), dtype=torch.float64)).tolist()
        names = [f"perf/{name}" if self.prefix != "critic" else f"perf/critic/{name}" for name in gigabytes]
        return dict(zip(names, most, strict=True))

    def _global_counts(self, counts: LossCounts) -> LossCounts:
        total = self.engine.all_reduce_dp(torch.tensor(counts, dtype=torch.int64))
        return LossCounts(*total.tolist())

    def _tell_skip(self, describe: Callable[[int, int], str]) -> None:
        """Tells why the step was skipped; stops where too many in a row were."""
        assert self.settings.optim is not None and self.engine.optimizer is not None
        report = self.engine.explain_skip(describe).describe()
        count, allowed = self.engine.optimizer.skipped_in_a_row, self.settings.optim.max_skipped_steps
        self._skips = [*self._skips[max(0, len(self._skips) - count + 1) :], f"{count}. {report}"]
        if self.runtime.rank == 0:
            logger.warning("%s: optimizer step skipped, %d in a row. %s", self.prefix, count, report)
        if count > allowed:
            evidence = "\n".join(self._skips)
            raise SkippedStepsError(
                f"{self.prefix}: {count} optimizer steps in a row had a non-finite loss or gradient and were skipped; "
                f"optim.max_skipped_steps={allowed} allows no more\n{evidence}"
            )

    def _engine_options(self) -> EngineOptions:
        megatron, optim = self.settings.megatron, self.settings.optim
        return EngineOptions(
            dtype=getattr(torch, megatron.dtype),
            sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
            value_head=self.value_head,
            optimizer=None if optim is None else optimizer_options(optim, megatron, self.settings.total_updates),
            recompute=recompute_options(megatron),
            overlap=OverlapOptions(megatron.overlap_grad_reduce, megatron.overlap_param_gather),
            offload=offloaded_parts(megatron),
            transformer=megatron.override_transformer_config,
        )


def weighted_sums(
    loss: TokenLossFunction, rows: int, outputs: object, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the loss and metrics of a mini-batch of ``rows`` rows with a trained token.

    Sums over tokens of numbers times their weights; over rows for what is true of whole rows.
    """
    columns = micro_batch.columns
    losses = loss(outputs, micro_batch)
    total = (losses.loss * columns[LOSS_WEIGHT]).sum()
    parts = {name: (part.detach() * columns[LOSS_WEIGHT]).sum() for name, part in losses.parts.items()}
    facts = {name: (fact.detach() * columns[FACT_WEIGHT]).sum() for name, fact in losses.facts.items()}
    trained = columns[FACT_WEIGHT] > 0
    answers = {name: _rows_all_true(flags, trained, micro_batch) / rows for name, flags in losses.answers.items()}
    return total, {"loss": total.detach(), **parts, **facts, **answers}


def _rows_all_true(flags: Tensor, trained: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
    """Rows with a trained token in which every trained token's flag is set."""
    parts = zip(micro_batch.split(flags | ~trained), micro_batch.split(trained), strict=True)
    return torch.stack([all_set.all() & some.any() for all_set, some in parts]).sum()


def recompute_options(megatron: MegatronConfig) -> RecomputeOptions | None:
    """What the backward computes again, with every "null = ..." resolved."""
    if megatron.recompute_granularity is None:
        return None
    return RecomputeOptions(
        granularity=megatron.recompute_granularity,
        method=megatron.recompute_method or "uniform",
        num_layers=megatron.recompute_num_layers or 1,
        modules=tuple(megatron.recompute_modules),
    )


def offloaded_parts(megatron: MegatronConfig) -> tuple[str, ...]:
    """What leaves the device between a role's phases."""
    chosen = {PARAM: megatron.param_offload, GRAD: megatron.grad_offload, OPTIMIZER: megatron.optimizer_offload}
    return tuple(part for part, on in chosen.items() if on)


def optimizer_options(optim: OptimConfig, megatron: MegatronConfig, total_updates: int) -> OptimizerOptions:
    """The engine's optimizer from its configuration, with every "null = ..." resolved."""
    return OptimizerOptions(
        **asdict(schedule_of(optim, total_updates)),
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )
