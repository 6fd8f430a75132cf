"""What every Megatron role shares: one model in one layout, its checkpoints, and the loop over mini-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import LossCounts, loss_counts, token_weights
from megarl.config import MegatronConfig, OptimConfig
from megarl.data import DataProto
from megarl.errors import MegarlError
from megarl.megatron import EngineOptions, MegatronEngine, OptimizerOptions, PackedMicroBatch, init_runtime

# CKPT
from megarl.models import read_model_config
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.rows import PackedRows
from megarl.workers.settings import RoleSettings, UpdatePlan

TokenContributions = dict[str, Tensor]
"""Numbers per token, each to be weighted by the token's weight in the loss and summed; ``loss`` is among them."""
TokenLossFunction = Callable[[Any, Mapping[str, Tensor]], TokenContributions]


class OutputOptions(NamedTuple):
    """What a language model's outputs are taken with; a critic's need none of it."""

    temperature: float = 1.0
    with_entropy: bool = False


DEFAULT_OUTPUTS = OutputOptions()


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
            loss: outputs and columns, packed, to numbers per token: ``loss`` and others; all of them are metrics.
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
        metrics[f"{self.prefix}/lr"] = self.engine.learning_rate
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
        weights = self._token_weights(rows, mini_batch, plan)
        micro_batches = []
        for group in rows.micro_batches(plan.budget, mini_batch):
            packed = {name: rows.column(name, group) for name in columns}
            packed["weights"] = torch.cat([weights[row - mini_batch.start] for row in group])
            micro_batches.append(rows.pack(group, packed))

        def weighted(outputs: object, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            parts = loss(outputs, micro_batch.columns)
            sums = {name: (part * micro_batch.columns["weights"]).sum() for name, part in parts.items()}
            return sums["loss"], {name: value.detach() for name, value in sums.items()}

        metrics = self.engine.forward_backward(
            micro_batches, weighted, temperature=options.temperature, with_entropy=options.with_entropy
        )
        result = self.engine.optimizer_step()
        self._count_skipped(result.skipped)
        return {**metrics, "grad_norm": result.grad_norm, "skipped_steps": float(result.skipped)}

    def _token_weights(self, rows: PackedRows, mini_batch: range, plan: UpdatePlan) -> Sequence[Tensor]:
        """Each row's token weights in the loss of the whole mini-batch, whose counts are summed over DP first."""
        lengths = torch.tensor([rows.response_lengths[row] for row in mini_batch])
        mask = rows.column("response_mask", mini_batch)
        counts = self._global_counts(loss_counts(mask, lengths))
        weights = token_weights(
            mask,
            plan.loss_agg_mode,
            global_tokens=counts.tokens,
            global_sequences=counts.sequences,
            lengths=lengths,
            horizon=plan.horizon,
        )
        return weights.split(lengths.tolist())

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
