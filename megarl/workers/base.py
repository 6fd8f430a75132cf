"""The base of all Megatron workers: one model in one layout, its checkpoints, and the loop over mini-batches."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from megarl.algorithms import LearningRateSchedule, LossCounts, loss_counts, token_weights
from megarl.algorithms.masked import sequence_sums
from megarl.base.errors import MegarlError
from megarl.base.reductions import Largest, Total
from megarl.base.user_code import import_user_modules
from megarl.config import MegatronConfig, OptimConfig
from megarl.data import DataProto
from megarl.data.images import IMAGES
from megarl.megatron import (
    DEFAULT_OUTPUTS,
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    OutputOptions,
    OverlapOptions,
    PackedMicroBatch,
    RecomputeOptions,
    StepResult,
    init_runtime,
)
from megarl.megatron.engine.offload import GRAD, OPTIMIZER, PARAM
from megarl.megatron.runtime.memory import read_device_memory
from megarl.models import ModelConfig, read_model_config
from megarl.models.hf_writer import NO_FILES
from megarl.workers.dispatch import MINI_BATCH_SIZES, Dispatch, WorkerPlace, verb
from megarl.workers.rows import FORWARD, UPDATE, MemoryBudgets, PackedRows
from megarl.workers.saving import SavingWorker
from megarl.workers.settings import MicroBatchBudget, RoleSettings, UpdatePlan, schedule_steps


class TokenLosses(NamedTuple):
    """A role's loss for the response tokens of a micro-batch; every tensor is packed, ``[n]``.

    Attributes:
        loss: per-token loss, aggregated by ``loss_agg_mode``.
        loss_metrics: metrics with the same aggregation as the loss.
        token_means: metrics averaged over the trained tokens.
        sequence_means: boolean metrics averaged over rows: a row counts if all its trained tokens are true.
    """

    loss: Tensor
    loss_metrics: Mapping[str, Tensor]
    token_means: Mapping[str, Tensor]
    sequence_means: Mapping[str, Tensor] = {}


TokenLossFunction = Callable[[Any, PackedMicroBatch], TokenLosses]
"""Computes the losses from the model's outputs and a micro-batch with the requested columns and ``response_mask``."""
ColumnFunction = Callable[[PackedRows, range, Sequence[Sequence[int]]], Mapping[str, Tensor]]
"""Computes packed columns over a mini-batch's response tokens from all rows, its rows, and its micro-batches."""


def _no_extra_columns(rows: PackedRows, mini_batch: range, groups: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    return {}


logger = logging.getLogger(__name__)

_Worker = TypeVar("_Worker", bound="MegatronWorker")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

LOSS_WEIGHT, TOKEN_MEAN_WEIGHT = "loss_weight", "token_mean_weight"
FIRST_STEP_BYTES = 2**30
"""Allowance for NCCL's communicators and libraries' workspaces, which a process creates in its first step."""


def offload_after(method: Callable[Concatenate[_Worker, _Arguments], _Result]) -> Callable[..., _Result]:
    """Offload the configured parts to host memory after the decorated method of a worker."""

    @functools.wraps(method)
    def wrapped(self: _Worker, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result = method(self, *args, **kwargs)
        self.free_device()
        return result

    return wrapped


class SkippedStepsError(MegarlError):
    """Too many consecutive optimizer steps had a non-finite gradient."""


class MegatronWorker(SavingWorker):
    """One rank of a role: a plain class, usable under Ray, torchrun and pytest."""

    prefix = ""
    """Prefix of the role's metrics."""
    value_head = False
    """Whether the model has a scalar head instead of the output layer."""

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings) -> None:
        self.settings = settings
        self.shares_device = self.shares_device and not settings.has_own_devices
        import_user_modules(*settings.external_lib)
        self.runtime = init_runtime(
            settings.layout,
            **place._asdict(),
            device=settings.device,
            seed=settings.seed,
            timeout_s=settings.nccl_timeout,
        )
        self.engine: MegatronEngine
        self.memory = MemoryBudgets(
            self.prefix, self.counts_over_dp, lambda numbers: self.engine.max_over_ranks(numbers)
        )
        self._skips: list[str] = []
        self._has_updated = False

    @verb(Dispatch.ALL)
    @offload_after
    def init_model(self) -> None:
        """Build the model in this role's layout and load this rank's shard of the initial weights."""
        settings = self.settings
        self.engine = MegatronEngine(self.model_config(), settings.layout, self.runtime, self._engine_options())
        self.engine.load_hf(settings.model_path)
        if settings.adapter_path is not None:
            self.engine.load_adapters(settings.adapter_path)
        if self.engine.model.vision is not None:
            self.engine.set_images(settings.model_path, settings.image_options)
        self._log_device_memory("after its start")

    def reference_scope(self) -> Callable[[], AbstractContextManager[None]]:
        """List the contexts that make the model the reference policy: copied weights or adapters, or adapters off."""
        if self.settings.lora is None or self.settings.reference_adapter:
            return partial(self.engine.swapped_weights, self.engine.copy_weights())
        return self.engine.adapters_off

    def model_config(self) -> ModelConfig:
        """Return the configuration of the model to build: that of the initial weights."""
        return read_model_config(self.settings.model_path).with_trained_tower(self.settings.trained_tower)

    @verb(Dispatch.ALL)
    def pending_device_bytes(self) -> int:
        """Return the device bytes that the first step adds permanently: Adam's state, and collective buffers."""
        return self.engine.offload_manager.pending_bytes() + FIRST_STEP_BYTES

    @verb(Dispatch.ONE)
    def pass_metrics(self) -> dict[str, float]:
        """Return metrics of the passes since the last call, as an update does: out-of-memory errors and budgets."""
        return self.memory.take_metrics()

    @verb(Dispatch.ONE)
    def describe(self) -> str:
        """Describe layout, number format and kernels in one line."""
        return self.engine.describe()

    @verb(Dispatch.ALL)
    @offload_after
    def export_hf(self, path: str, files: Mapping[str, str] = NO_FILES) -> None:
        """Write the model as a Hugging Face folder with the initial model's tokenizer; replaces an existing folder."""
        files = {**self.settings.export_files, **files}
        self.engine.export_hf(Path(path), source=Path(self.settings.model_path), overwrite=True, files=files)

    def update(
        self,
        batch: DataProto,
        plan: UpdatePlan,
        columns: Sequence[str],
        loss: TokenLossFunction,
        outputs: OutputOptions = DEFAULT_OUTPUTS,
        extra_columns: ColumnFunction = _no_extra_columns,
    ) -> dict[str, float]:
        """Run optimizer steps over the mini-batches of this rank's rows.

        Args:
            batch: rows of this data-parallel rank, mini-batch after mini-batch, with ``response_mask``. All
                mini-batches have the same number of rows unless ``meta_info`` has :data:`MINI_BATCH_SIZES`.
            loss: computes losses per token from the model's outputs and those columns, packed.
            extra_columns: computes further columns before each mini-batch's step; may communicate.

        Returns:
            Metrics under the role's prefix, averaged over the optimizer steps; equal on all ranks. ``skipped_steps``
            and ``empty_steps``, those without a trained token, are counts. If equal beginnings of sequences may be
            computed once, ``perf/computed_tokens/<role>`` and ``perf/sequence_tokens/<role>``, those of all sequences
            one by one, are totals.
        """
        rows = self.packed_rows(batch, plan.budget)
        share = plan.mini_batch_rows // self.settings.layout.dp
        sizes = batch.meta_info.get(MINI_BATCH_SIZES, [share] * (len(rows) // share))
        totals: dict[str, float] = defaultdict(float)
        steps, tokens = 0, torch.zeros(2, dtype=torch.int64)

        def compute_gradient(
            mini_batch: range, groups: Sequence[Sequence[int]]
        ) -> tuple[dict[str, float], Sequence[Sequence[int]], Tensor]:
            packed, counts = self._pack_mini_batch(rows, mini_batch, groups, plan, columns, extra_columns)
            sums = self.engine.forward_backward(packed, partial(weighted_sums, loss, counts.sequences), outputs)
            packed_tokens = torch.tensor([(each.num_tokens, sum(each.lengths)) for each in packed]).sum(0)
            return sums | {"empty_steps": float(not counts.tokens)}, groups, packed_tokens

        for _ in range(plan.epochs):
            for start, stop in pairwise(accumulate(sizes, initial=0)):
                mini_batch = range(start, stop)
                compute = partial(compute_gradient, mini_batch)
                metrics, groups, packed_tokens = self.memory.run_pass(UPDATE, plan.budget, rows, compute, mini_batch)
                tokens += packed_tokens
                metrics |= self.step_metrics(self.engine.optimizer_step(), rows, groups)
                for name, value in metrics.items():
                    totals[name] += value
                steps += 1
        means = {f"{self.prefix}/{name}": value / steps for name, value in totals.items()}
        means |= {f"{self.prefix}/{name}": Total(totals[name]) for name in ("skipped_steps", "empty_steps")}
        if rows.shares_prompts:
            computed, whole = self.engine.all_reduce_dp(tokens).tolist()
            means |= {
                f"perf/computed_tokens/{self.prefix}": Total(computed),
                f"perf/sequence_tokens/{self.prefix}": Total(whole),
            }
        return means | self.memory.take_metrics() | self.end_phase()

    def _pack_mini_batch(
        self,
        rows: PackedRows,
        mini_batch: range,
        groups: Sequence[Sequence[int]],
        plan: UpdatePlan,
        names: Sequence[str],
        extra_columns: ColumnFunction,
    ) -> tuple[list[PackedMicroBatch], LossCounts]:
        """Pack the micro-batches with the loss's columns and weights; also the mini-batch's global counts."""
        lengths = torch.tensor([rows.response_lengths[row] for row in mini_batch])
        mask = rows.column("response_mask", mini_batch)
        local_counts = torch.tensor(loss_counts(mask, lengths), dtype=torch.int64)
        counts = LossCounts(*self.engine.all_reduce_dp(local_counts).tolist())
        weigh = partial(token_weights, mask, global_tokens=counts.tokens, global_sequences=counts.sequences)
        # Values at tool tokens are arbitrary: a non-finite number would survive a weight of zero.
        columns = {name: _zero_untrained(rows.column(name, mini_batch), mask) for name in names}
        columns |= extra_columns(rows, mini_batch, groups)
        columns["response_mask"] = mask
        columns[LOSS_WEIGHT] = weigh(plan.loss_agg_mode, lengths=lengths, horizon=plan.horizon)
        columns[TOKEN_MEAN_WEIGHT] = weigh("token-mean", lengths=lengths)
        by_row = {name: column.split(lengths.tolist()) for name, column in columns.items()}
        micro_batches = [
            rows.pack(
                group,
                {name: torch.cat([parts[row - mini_batch.start] for row in group]) for name, parts in by_row.items()},
            )
            for group in groups
        ]
        return micro_batches, counts

    def step_metrics(
        self, result: StepResult, rows: PackedRows, groups: Sequence[Sequence[int]], sequences_per_row: int = 1
    ) -> dict[str, float]:
        """Compute the metrics of an optimizer step; reports a skipped step.

        Raises:
            SkippedStepsError: too many consecutive steps were skipped.
        """
        if result.skipped:
            self._report_skip(lambda number, sequence: rows.describe(groups[number][sequence // sequences_per_row]))
        return {"grad_norm": result.grad_norm, "lr": result.lr, "skipped_steps": float(result.skipped)}

    def packed_rows(self, batch: DataProto, budget: MicroBatchBudget) -> PackedRows:
        """Prepare the rows of a batch for packing, and take their images.

        Prompts are shared if the budget and the engine allow it.
        """
        of_rows = batch.non_tensor_batch.get(IMAGES, ())
        self.engine.take_images(image for images in of_rows for image in images or ())
        return PackedRows(batch, share_prompts=budget.share_prompts and self.engine.can_share_prompts)

    def forward_pass(
        self,
        rows: PackedRows,
        budget: MicroBatchBudget,
        read: Callable[[Sequence[Sequence[int]], Sequence[Any]], _Result],
        pack: Callable[[Sequence[int]], PackedMicroBatch] | None = None,
        options: OutputOptions = DEFAULT_OUTPUTS,
    ) -> _Result | None:
        """Compute outputs of all rows without gradients; ``read`` builds the result from groups of rows and outputs.

        None on ranks before the last pipeline stage.
        """

        def compute(groups: Sequence[Sequence[int]]) -> _Result | None:
            outputs = self.engine.forward([(pack or rows.pack)(group) for group in groups], options)
            return None if outputs is None else read(groups, outputs)

        return self.memory.run_pass(FORWARD, budget, rows, compute)

    def counts_over_dp(self, count: int) -> list[int]:
        """Gather one number of every data-parallel rank; communicates."""
        counts = torch.zeros(self.settings.layout.dp, dtype=torch.int64)
        counts[self.runtime.coordinate.dp] = count
        total: list[int] = self.engine.all_reduce_dp(counts).tolist()
        return total

    def gather_over_dp(self, columns: Sequence[Tensor]) -> tuple[Tensor, slice]:
        """Gather columns of all data-parallel ranks, in the order of the ranks; communicates.

        Args:
            columns: ``[n]`` each; ``n`` may differ between ranks.

        Returns:
            ``[number of columns, sum of n]`` in double precision, the same on all ranks, and the slice of this rank.
        """
        local = torch.stack([column.double() for column in columns])
        counts = self.counts_over_dp(local.shape[1])
        first = sum(counts[: self.runtime.coordinate.dp])
        local_slice = slice(first, first + local.shape[1])
        gathered = local.new_zeros(len(columns), sum(counts))
        gathered[:, local_slice] = local
        return self.engine.all_reduce_dp(gathered), local_slice

    def end_phase(self) -> dict[str, float]:
        """Offload the configured parts; returns peak memory since the last call and the bytes that the offload
        released.

        Each value is the maximum over the ranks; communicates.
        """
        device, gigabytes = self.runtime.device, {}
        if device.type == "cuda":
            gigabytes["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        freed = self.free_device()
        gigabytes |= {f"offloaded_gb/{part}": size / 2**30 for part, size in freed.items()}
        if not self._has_updated:
            self._log_device_memory("after its first update")  # its collectives have allocated their buffers
            self._has_updated = True
        if not gigabytes:
            return {}
        maxima = self.engine.max_over_ranks(torch.tensor(list(gigabytes.values()), dtype=torch.float64)).tolist()
        names = [f"perf/{name}" if self.prefix != "critic" else f"perf/critic/{name}" for name in gigabytes]
        return dict(zip(names, map(Largest, maxima), strict=True))

    def _log_device_memory(self, when: str) -> None:
        """Log the memory of this process, whose part outside of torch `megarl plan` assumes as ``reserved_gib``."""
        if self.runtime.device.type == "cuda":
            memory = read_device_memory(self.runtime.device).describe()
            logger.info("%s rank %d on %s %s: %s", self.prefix, self.runtime.rank, self.runtime.device, when, memory)

    def _report_skip(self, describe: Callable[[int, int], str]) -> None:
        """Log the reason of a skipped step; raises after too many consecutive skips."""
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
                f"optim.max_skipped_steps={allowed} allows no more\n{evidence}",
                code="algorithm.skipped-steps",
            )

    def _optimizer_options(self, optim: OptimConfig) -> OptimizerOptions:
        settings = self.settings
        options = optimizer_options(optim, settings.megatron, settings.total_updates)
        return replace(options, vision_lr_factor=settings.vision_lr_factor)

    def _engine_options(self) -> MegatronOptions:
        megatron, optim = self.settings.megatron, self.settings.optim
        return MegatronOptions(
            dtype=getattr(torch, megatron.dtype),
            sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
            value_head=self.value_head,
            optimizer=None if optim is None else self._optimizer_options(optim),
            recompute=_recompute_options(megatron),
            overlap=OverlapOptions(megatron.overlap_grad_reduce, megatron.overlap_param_gather),
            offload=offloaded_parts(megatron),
            lora=self.settings.lora,
            transformer=megatron.override_transformer_config,
            repeat_out_of_memory=self.settings.repeat_out_of_memory,
        )


def _zero_untrained(column: Tensor, mask: Tensor) -> Tensor:
    """Zero the entries of untrained tokens in a column ``[n, ...]``."""
    return column.where(mask.bool().view(-1, *[1] * (column.dim() - 1)), 0)


def weighted_sums(
    loss: TokenLossFunction, rows: int, outputs: object, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a micro-batch's share of the mini-batch loss and metrics.

    Sums over tokens of values times weights; ``sequence_means`` sum over rows.

    Args:
        rows: the mini-batch's rows with a trained token, over all ranks.
    """
    columns = micro_batch.columns
    losses = loss(outputs, micro_batch)
    total = (losses.loss * columns[LOSS_WEIGHT]).sum()
    metrics = {"loss": total.detach()}
    for name, values in losses.loss_metrics.items():
        metrics[name] = (values.detach() * columns[LOSS_WEIGHT]).sum()
    for name, values in losses.token_means.items():
        metrics[name] = (values.detach() * columns[TOKEN_MEAN_WEIGHT]).sum()
    trained = columns[TOKEN_MEAN_WEIGHT] > 0
    for name, flags in losses.sequence_means.items():
        metrics[name] = _rows_all_true(flags, trained, micro_batch) / rows
    return total, metrics


def _rows_all_true(flags: Tensor, trained: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
    """Number of rows with a trained token whose trained tokens all have the flag."""
    lengths = micro_batch.row_lengths
    counts = [sequence_sums(values.double(), trained, lengths) for values in (trained, flags)]
    return ((counts[0] > 0) & (counts[0] == counts[1])).sum()


def _recompute_options(megatron: MegatronConfig) -> RecomputeOptions | None:
    if megatron.recompute_granularity is None:
        return None
    return RecomputeOptions(
        granularity=megatron.recompute_granularity,
        method=megatron.recompute_method or "uniform",
        num_layers=megatron.recompute_num_layers or 1,
        modules=tuple(megatron.recompute_modules),
    )


def offloaded_parts(megatron: MegatronConfig) -> tuple[str, ...]:
    """Return the parts that leave the device between a role's phases."""
    chosen = {PARAM: megatron.param_offload, GRAD: megatron.grad_offload, OPTIMIZER: megatron.optimizer_offload}
    return tuple(part for part, on in chosen.items() if on)


def optimizer_options(optim: OptimConfig, megatron: MegatronConfig, total_updates: int) -> OptimizerOptions:
    """Build the engine's optimizer options with every null resolved."""
    return OptimizerOptions(
        **asdict(_schedule_of(optim, total_updates)),
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )


def _schedule_of(optim: OptimConfig, updates: int) -> LearningRateSchedule:
    """Build the learning-rate schedule of a run."""
    steps = schedule_steps(optim, updates)
    return LearningRateSchedule(
        lr=optim.lr,
        min_lr=optim.min_lr,
        decay_style=optim.lr_decay_style,
        warmup_steps=steps.warmup,
        total_steps=steps.total,
        wsd_decay_steps=steps.wsd_decay,
        wsd_decay_style=optim.lr_wsd_decay_style,
    )
