"""What every Megatron role shares: one model in one layout, its checkpoints, and the loop over mini-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import LossCounts, loss_counts, token_weights
from megarl.config import MegatronConfig, OptimConfig
from megarl.data import DataProto
from megarl.errors import MegarlError
from megarl.megatron import EngineOptions, MegatronEngine, OptimizerOptions, PackedMicroBatch, init_runtime
from megarl.megatron.checkpoint import load_sharded, save_sharded
from megarl.models import read_model_config
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.rows import PackedRows
from megarl.workers.settings import RoleSettings, UpdatePlan


class TokenLosses(NamedTuple):
    """What a role's loss says of the response tokens of a micro-batch; every tensor is packed, ``[n]``.

    Attributes:
        loss: what is minimised, aggregated as the configuration says.
        parts: metrics aggregated like the loss.
        facts: metrics that are means over the trained tokens.
    """

    loss: Tensor
    parts: Mapping[str, Tensor]
    facts: Mapping[str, Tensor]


TokenLossFunction = Callable[[Any, Mapping[str, Tensor]], TokenLosses]


class OutputOptions(NamedTuple):
    """What a language model's outputs are taken with; a critic's need none of it."""

    temperature: float = 1.0
    with_entropy: bool = False


DEFAULT_OUTPUTS = OutputOptions()
LOSS_WEIGHT, FACT_WEIGHT = "loss_weight", "fact_weight"


class SkippedStepsError(MegarlError):
    """Too many optimizer steps in a row had a non-finite gradient."""


class MegatronWorker:
    """One rank of a role: a plain class, usable under Ray, torchrun and pytest alike.

    Args:
        rank: this process's rank in the role.
        world_size: processes of the role.
        master_addr: address of the role's rank 0.
        master_port: port there for the process group.
        settings: what the role is built from.
    """

    prefix = ""
    """Prefix of the role's metrics."""
    value_head = False
    """Whether the model ends in a scalar head instead of the vocabulary."""

    def __init__(
        self, *, rank: int, world_size: int, master_addr: str, master_port: int, settings: RoleSettings
    ) -> None:
        self.settings = settings
        self.runtime = init_runtime(
            settings.layout,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            device=settings.device,
            seed=settings.seed,
        )
        self.engine: MegatronEngine
        self._skipped_in_a_row = 0

    @verb(Dispatch.ALL)
    def init_model(self) -> None:
        """Build the model in this role's layout and read this rank's slices of the initial weights."""
        settings = self.settings
        self.engine = MegatronEngine(
            read_model_config(settings.model_path), settings.layout, self.runtime, self._engine_options()
        )
        self.engine.load_hf(settings.model_path)

    @verb(Dispatch.ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write weights, optimizer, schedule and random state into a folder that all ranks share."""
        save_sharded(self.engine, Path(path))

    @verb(Dispatch.ALL)
    def load_checkpoint(self, path: str) -> None:
        """Read what :meth:`save_checkpoint` wrote, also in another layout.

        Raises:
            CheckpointError: something is missing, corrupt, or of another model.
        """
        load_sharded(self.engine, Path(path))

    @verb(Dispatch.ALL)
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
    ) -> dict[str, float]:
        """Optimizer steps over the mini-batches of this rank's rows.

        Args:
            batch: rows of this data-parallel rank, mini-batch after mini-batch, with ``response_mask``.
            plan: mini-batches, epochs, budget, aggregation.
            columns: response-aligned columns that the loss reads.
            loss: the model's outputs and those columns, packed, to losses per token.
            outputs: what the model must tell of the tokens.

        Returns:
            Metrics under the role's prefix, averaged over the optimizer steps; equal on all ranks.
        """
        rows = PackedRows(batch)
        share = plan.mini_batch_rows // self.settings.layout.dp
        totals: dict[str, float] = defaultdict(float)
        steps = 0
        for _ in range(plan.epochs):
            for start in range(0, len(rows), share):
                mini_batch = range(start, min(start + share, len(rows)))
                for name, value in self._step(rows, mini_batch, plan, columns, loss, outputs).items():
                    totals[name] += value
                steps += 1
        metrics = {f"{self.prefix}/{name}": value / steps for name, value in totals.items()}
        metrics[f"{self.prefix}/skipped_steps"] = totals["skipped_steps"]
        return metrics

    def _step(
        self,
        rows: PackedRows,
        mini_batch: range,
        plan: UpdatePlan,
        columns: Sequence[str],
        loss: TokenLossFunction,
        options: OutputOptions,
    ) -> dict[str, float]:
        """One optimizer step: forward and backward over the mini-batch's micro-batches, then the update."""
        lengths = torch.tensor([rows.response_lengths[row] for row in mini_batch])
        mask = rows.column("response_mask", mini_batch)
        counts = self._global_counts(loss_counts(mask, lengths))
        weigh = partial(token_weights, mask, global_tokens=counts.tokens, global_sequences=counts.sequences)
        weights = {
            LOSS_WEIGHT: weigh(plan.loss_agg_mode, lengths=lengths, horizon=plan.horizon).split(lengths.tolist()),
            FACT_WEIGHT: weigh("token-mean", lengths=lengths).split(lengths.tolist()),
        }
        micro_batches = []
        for group in rows.micro_batches(plan.budget, mini_batch):
            packed = {name: rows.column(name, group) for name in columns}
            for name, per_row in weights.items():
                packed[name] = torch.cat([per_row[row - mini_batch.start] for row in group])
            micro_batches.append(rows.pack(group, packed))
        metrics = self.engine.forward_backward(
            micro_batches,
            partial(weighted_sums, loss),
            temperature=options.temperature,
            with_entropy=options.with_entropy,
        )
        result = self.engine.optimizer_step()
        self._count_skipped(result.skipped)
        return {**metrics, "grad_norm": result.grad_norm, "lr": result.lr, "skipped_steps": float(result.skipped)}

    def _global_counts(self, counts: LossCounts) -> LossCounts:
        total = self.engine.all_reduce_dp(torch.tensor(counts, dtype=torch.int64))
        return LossCounts(*total.tolist())

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        optim = self.settings.optim
        if optim is not None and self._skipped_in_a_row > optim.max_skipped_steps:
            raise SkippedStepsError(
                f"{self.prefix}: {self._skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                f"and were skipped; optim.max_skipped_steps={optim.max_skipped_steps} allows no more"
            )

    def _engine_options(self) -> EngineOptions:
        megatron, optim = self.settings.megatron, self.settings.optim
        return EngineOptions(
            dtype=getattr(torch, megatron.dtype),
            sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
            value_head=self.value_head,
            optimizer=None if optim is None else optimizer_options(optim, megatron, self.settings.total_updates),
        )


def weighted_sums(
    loss: TokenLossFunction, outputs: object, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the mini-batch's loss and metrics: sums of numbers per token times their weights."""
    columns = micro_batch.columns
    losses = loss(outputs, columns)
    total = (losses.loss * columns[LOSS_WEIGHT]).sum()
    parts = {name: (part.detach() * columns[LOSS_WEIGHT]).sum() for name, part in losses.parts.items()}
    facts = {name: (fact.detach() * columns[FACT_WEIGHT]).sum() for name, fact in losses.facts.items()}
    return total, {"loss": total.detach(), **parts, **facts}


def optimizer_options(optim: OptimConfig, megatron: MegatronConfig, total_updates: int) -> OptimizerOptions:
    """The engine's optimizer from its configuration, with every "null = ..." resolved."""
    total = optim.total_training_steps or total_updates
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
    return OptimizerOptions(
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        warmup_steps=warmup,
        total_steps=total,
        decay_style=optim.lr_decay_style,
        min_lr=optim.min_lr,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )
