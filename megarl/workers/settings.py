"""What workers are built from: plain values that the driver fills in, without importing what the workers import."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import MegatronConfig, OptimConfig, RolloutConfig
from megarl.models import ParallelLayout
from megarl.models.sequence_cost import TOKENS, SequenceCost


@dataclass(frozen=True)
class MicroBatchBudget:
    """How many rows a micro-batch may hold: a token budget (``max_tokens``) or a fixed number of rows (``size``).

    Attributes:
        max_tokens: tokens of all its rows.
        size: rows.
        multiple: the number of micro-batches of a rank is a multiple of this: of the pipeline's stages, where their
            schedule is interleaved.
        cost: work of a row by its tokens, which micro-batches and ranks are to have equally much of.
        share_prompts: rows of one prompt go together where that is less work, and the prompt is computed once.
    """

    max_tokens: int | None = None
    size: int | None = None
    multiple: int = 1
    cost: SequenceCost = TOKENS
    share_prompts: bool = False


@dataclass(frozen=True)
class RoleSettings:
    """What a Megatron role is built from.

    Attributes:
        model_path: Hugging Face folder of the initial weights.
        layout: parallel sizes of this role.
        megatron: number format, sequence parallelism, distributed optimizer.
        optim: optimizer of a role that learns; None for one that only computes.
        total_updates: optimizer steps of the whole run, over which the learning rate is scheduled.
        device: ``cpu``, ``cuda`` or ``auto``.
        seed: seed of every rank's generators.
        external_lib: modules of the user's own to import first, as ``path.py`` or ``package.module``.
    """

    model_path: str
    layout: ParallelLayout
    megatron: MegatronConfig
    optim: OptimConfig | None
    total_updates: int
    device: str
    seed: int
    external_lib: tuple[str, ...] = ()


@dataclass(frozen=True)
class UpdatePlan:
    """How a batch becomes optimizer steps.

    Attributes:
        mini_batch_rows: rows of a mini-batch over all data-parallel ranks.
        epochs: passes over the batch.
        budget: how a rank cuts its share of a mini-batch.
        loss_agg_mode: how losses per token become one (see :func:`megarl.algorithms.token_weights`).
        horizon: what ``seq-mean-token-sum-norm`` divides by, in tokens.
    """

    mini_batch_rows: int
    epochs: int
    budget: MicroBatchBudget
    loss_agg_mode: str
    horizon: int


@dataclass(frozen=True)
class LogProbSettings:
    """How log-probs are computed.

    Attributes:
        budget: how rows are cut.
        temperature: of sampling, at which they are taken.
        full_kl: of a reference, whether the exact KL to it is told too.
    """

    budget: MicroBatchBudget
    temperature: float
    full_kl: bool = False


@dataclass(frozen=True)
class RolloutSettings:
    """What a rollout replica is built from.

    Attributes:
        model_path: Hugging Face folder; its configuration is read, and its weights where there is no actor.
        device: ``cpu``, ``cuda`` or ``auto``.
        config: engine, sampling and size.
        external_lib: see :class:`RoleSettings`.
    """

    model_path: str
    device: str
    config: RolloutConfig
    external_lib: tuple[str, ...] = ()
