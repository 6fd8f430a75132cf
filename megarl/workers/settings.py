"""Settings of workers: budgets, layouts and schedules from the configuration, and their checks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.formatting import DTYPE_BYTES, count_noun
from megarl.config import (
    AdapterKeys,
    EvaluateConfig,
    GenerateConfig,
    MegatronConfig,
    OptimConfig,
    RolloutConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.batch import token_store_bytes
from megarl.config.checks.transformer_fields import BALANCE_RATES
from megarl.config.derived import inheritance_note
from megarl.config.schema.distillation import DistillationConfig
from megarl.config.schema.jobs import JobConfig
from megarl.models import ModelConfig, ParallelLayout, WeightMap, check_layout, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from megarl.models.peft_folder import AdapterFolder
from megarl.models.sequence_cost import TOKENS, SequenceCost

TEACHER_NUMBER_BYTES = 2
"""Bytes of a token's teacher number, an int16."""


@dataclass(frozen=True)
class MicroBatchBudget:
    """Size limit of a micro-batch: a token budget (``max_tokens``) or a fixed number of rows (``size``).

    Attributes:
        max_tokens: tokens of all its rows.
        size: rows.
        multiple: a rank's number of micro-batches is a multiple of this: the number of pipeline stages, for an
            interleaved schedule.
        cost: work of a row from its tokens, balanced over micro-batches and ranks.
        share_prompts: rows of one prompt go into one micro-batch if that is less work, and the prompt is computed once.
    """

    max_tokens: int | None = None
    size: int | None = None
    multiple: int = 1
    cost: SequenceCost = TOKENS
    share_prompts: bool = False

    @property
    def limit(self) -> int:
        """The limit that is set, in tokens or rows."""
        limit = self.size if self.max_tokens is None else self.max_tokens
        assert limit is not None, "a budget has one of the two limits"
        return limit

    def with_limit(self, limit: int) -> MicroBatchBudget:
        """Return the same budget with another limit, in the same unit."""
        return replace(self, size=limit) if self.max_tokens is None else replace(self, max_tokens=limit)

    def describe(self) -> str:
        """Describe the limit with its unit."""
        return count_noun(self.limit, "row" if self.max_tokens is None else "token")


@dataclass(frozen=True)
class RoleSettings:
    """Settings of a Megatron role.

    Attributes:
        model_path: Hugging Face folder of the initial weights.
        optim: optimizer of a role that trains; None for inference.
        total_updates: optimizer steps of the whole run, the length of the learning-rate schedule.
        nccl_timeout: seconds after which an incomplete collective fails.
        external_lib: user modules to import first, as ``path.py`` or ``package.module``.
        lora: low-rank adapters, which alone are trained; None = all weights are.
        adapter_path: folder of adapters in peft's format to continue from.
        reference_adapter: the reference policy has those adapters; otherwise it is the model without adapters.
        has_own_devices: no other process uses the role's devices, so phases keep cached memory.
        export_files: text of files, by name, that replace those of the initial folder in checkpoints and exports.
        image_options: settings of the image processor, for a model with a vision tower.
        trained_tower: the vision tower, if the model has one, is trained; otherwise it is frozen.
        vision_lr_factor: factor on the learning rate of a trained vision tower.
    """

    model_path: str
    layout: ParallelLayout
    megatron: MegatronConfig
    optim: OptimConfig | None
    total_updates: int
    device: str
    seed: int
    nccl_timeout: float
    external_lib: tuple[str, ...] = ()
    repeat_out_of_memory: bool = True
    lora: LoraOptions | None = None
    adapter_path: str | None = None
    reference_adapter: bool = False
    has_own_devices: bool = False
    export_files: Mapping[str, str] = field(default_factory=dict)
    image_options: Mapping[str, Any] = field(default_factory=dict)
    trained_tower: bool = False
    vision_lr_factor: float = 1.0


@dataclass(frozen=True)
class UpdatePlan:
    """Division of a batch into optimizer steps.

    Attributes:
        mini_batch_rows: rows of a mini-batch over all data-parallel ranks.
        budget: micro-batch budget for a rank's share of a mini-batch.
        loss_agg_mode: aggregation of per-token losses (see :func:`megarl.algorithms.token_weights`).
        horizon: divisor of ``seq-mean-token-sum-norm``, in tokens.
    """

    mini_batch_rows: int
    epochs: int
    budget: MicroBatchBudget
    loss_agg_mode: str
    horizon: int


@dataclass(frozen=True)
class LogProbSettings:
    """Settings of a log-prob computation.

    Attributes:
        temperature: sampling temperature, applied to the logits.
        full_kl: for a reference, also compute the exact KL to it.
        sum_pi_squared: also compute the sum of the squared probabilities of each token's distribution.
        vocab_size: distributions are over the tokens with smaller ids; None = the model's vocabulary.
    """

    budget: MicroBatchBudget
    temperature: float
    full_kl: bool = False
    sum_pi_squared: bool = False
    vocab_size: int | None = None


class TeacherHead(NamedTuple):
    """The output layer of a teacher, of which the actor's ranks read their rows for the exact KL.

    Attributes:
        dtype: number format of the teacher's weights and hidden states.
    """

    model_path: str
    dtype: str

    @property
    def hidden_size(self) -> int:
        """Width of the layer's rows and of hidden states."""
        return read_model_config(self.model_path).hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes per layer row."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]


class HiddenForm(NamedTuple):
    """Form in which teachers return final hidden states for the exact KL, so that their rows fit into one column.

    Attributes:
        width: hidden size of the widest teacher; the states of others end with zeros.
        dtype: number format that holds the states of every teacher.
        number: index of this teacher's output layer in the actor, returned with each token; None = it is the only one.
    """

    width: int
    dtype: str
    number: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that the object store keeps per response token."""
        return self.width * DTYPE_BYTES[self.dtype] + (0 if self.number is None else TEACHER_NUMBER_BYTES)


def teacher_heads(distillation: DistillationConfig) -> tuple[TeacherHead, ...]:
    """List the output layers of the teachers that the actor reads; empty without the exact KL to teachers."""
    if not (distillation.enabled and distillation.distillation_loss.reads_teacher_hidden):
        return ()
    return tuple(TeacherHead(str(t.model_path), t.megatron.dtype) for t in distillation.teacher_models.values())


def hidden_forms(distillation: DistillationConfig) -> dict[str, HiddenForm]:
    """Return each teacher's form of hidden states, by name; empty without the exact KL to teachers."""
    heads = teacher_heads(distillation)
    if not heads:
        return {}
    width = max(head.hidden_size for head in heads)
    dtype = max((head.dtype for head in heads), key=DTYPE_BYTES.__getitem__)
    names = list(distillation.teacher_models)
    return {name: HiddenForm(width, dtype, index if names[1:] else None) for index, name in enumerate(names)}


def needed_store_bytes(config: TrainConfig) -> int:
    """Return the bytes of a step's token columns, teachers' hidden states included."""
    forms = hidden_forms(config.distillation).values()
    return token_store_bytes(config, max((form.token_bytes for form in forms), default=0))


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout replica.

    Attributes:
        model_path: Hugging Face folder; provides the configuration, and the weights if there is no actor.
        return_routes: the engine returns the experts of tokens, for routing replay R3.
        first_hybrid: number of the first replica on the trainer's devices, besides replicas with devices of their own;
            None = there are none.
        eos_token_ids: tokens that end every sequence; None = those of the model folder and its tokenizer.
        image_options: settings of the image processor, for a model with a vision tower.
        trained_tower: the vision tower, if the model has one, is trained; otherwise it is frozen.
    """

    model_path: str
    device: str
    config: RolloutConfig
    external_lib: tuple[str, ...] = ()
    return_routes: bool = False
    first_hybrid: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    image_options: Mapping[str, Any] = field(default_factory=dict)
    trained_tower: bool = False


def layout_of(megatron: MegatronConfig) -> ParallelLayout:
    """Return the layout of a role whose parallel sizes are complete."""
    return ParallelLayout(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        dp=megatron.data_parallel_size or 1,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or 0,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=megatron.num_layers_in_first_pipeline_stage,
        last_stage_layers=megatron.num_layers_in_last_pipeline_stage,
        embedding_as_layer=megatron.account_for_embedding_in_pipeline_split,
        loss_as_layer=megatron.account_for_loss_in_pipeline_split,
    )


def lora_options(model: AdapterKeys, seed: int) -> LoraOptions | None:
    """Return the options of a role's adapters; None without adapters."""
    if not model.lora_rank:
        return None
    return LoraOptions(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=tuple(model.target_modules),
        excludes=tuple(model.exclude_modules or ()),
        rank_stabilized=model.lora.use_rslora,
        initial_a=model.lora.lora_A_init_method,
        seed=seed,
        kind=model.lora.type,
        adapt_vision_tower=model.lora.adapt_vision_tower,
        freeze_vision_model=model.lora.freeze_vision_model,
        freeze_vision_projection=model.lora.freeze_vision_projection,
    )


def check_adapters(
    model: ModelConfig,
    keys: AdapterKeys,
    megatron: MegatronConfig,
    field: str,
    *,
    value_head: bool = False,
    base: str | Path | None = None,
) -> None:
    """Check that a role's adapters fit its model and layout, and the folder that they continue from.

    Args:
        base: folder of the model, with which copies of its weights in that folder are compared; None compares none.

    Raises:
        ConfigError: names the key, its value and the valid choices.
    """
    options = lora_options(keys, seed=0)
    if options is None:
        return
    _check_frozen_routers(megatron, keys)
    _check_grouped_experts(megatron, "megatron", f"{field}.lora_rank={keys.lora_rank}")
    try:
        adapters = AdapterMap(WeightMap(model.with_trained_tower(keys.trains_tower), value_head), options)
        adapters.check_layout(layout_of(megatron))
        if keys.lora_adapter_path is not None:
            folder = AdapterFolder(keys.lora_adapter_path)
            folder.check(adapters)
            if base is not None:
                folder.check_base(base)
    except ConfigError as error:
        raise ConfigError(f"{field}.{error.text}", code=error.code) from error


def check_role(model: ModelConfig, megatron: MegatronConfig, field: str) -> None:
    """Check a role's layout and recomputation options against its model.

    Args:
        megatron: the role's configuration with complete parallel sizes.
        field: the configuration's key, such as ``actor_rollout_ref.actor.megatron``.

    Raises:
        ConfigError: names the key, its value and the valid choices.
    """
    layout = layout_of(megatron)
    check_layout(model, layout, field)
    _check_balance(model, megatron.override_transformer_config, field)
    if megatron.recompute_granularity == "full":
        _check_groups(model.num_layers, layout, megatron, field)
    elif megatron.recompute_granularity == "selective":
        _check_modules(model, megatron, field)


def _check_frozen_routers(megatron: MegatronConfig, keys: AdapterKeys) -> None:
    rate = megatron.override_transformer_config.get("moe_router_bias_update_rate")
    if rate:
        raise ConfigError(
            f"megatron.override_transformer_config.moe_router_bias_update_rate={rate} changes weights that "
            f"lora_rank={keys.lora_rank} freezes; remove the key",
            code="adapter.frozen-router-bias",
        )


def _check_balance(model: ModelConfig, fields: Mapping[str, Any], field: str) -> None:
    for name in BALANCE_RATES:
        value = fields.get(name)
        if value and model.experts is None:
            raise ConfigError(
                f"{field}.override_transformer_config.{name}={value}, but {model.architecture} is a dense model; "
                "remove the key",
                code="model.no-experts",
            )
        is_bias = name == "moe_router_bias_update_rate"
        if value and is_bias and model.experts is not None and not model.experts.correction_bias:
            raise ConfigError(
                f"{field}.override_transformer_config.{name}={value}, but the routers of {model.architecture} have no "
                "correction bias; remove the key, or set moe_router_load_balancing_type=seq_aux_loss",
                code="model.no-correction-bias",
            )


def check_router_replay(model: ModelConfig, mode: str) -> None:
    """Check that a model whose routes are replayed has routers.

    Raises:
        ConfigError: it is a dense model.
    """
    if mode != "disabled" and model.experts is None:
        raise ConfigError(
            f"actor_rollout_ref.actor.router_replay.mode={mode}, but {model.architecture} is a dense model without "
            "routers; set disabled",
            code="model.no-experts",
        )


def _check_groups(num_layers: int, layout: ParallelLayout, megatron: MegatronConfig, field: str) -> None:
    chunks, group = layout.chunk_sizes(num_layers), megatron.recompute_num_layers or 1
    common = math.gcd(*chunks)
    if megatron.recompute_method != "block" and common % group:
        valid = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"{field}.recompute_num_layers={group} must divide the layers of each pipeline chunk, "
            f"{sorted(set(chunks))}; valid for this layout: {valid}",
            code="layout.recompute-layers",
        )


def _check_modules(model: ModelConfig, megatron: MegatronConfig, field: str) -> None:
    absent: set[str] = set()
    if model.experts is None:
        absent |= {"moe", "moe_act"}
    elif all(model.experts.layers):
        absent |= {"mlp"}
    if not model.input_norms:
        absent |= {"layernorm"}
    inapplicable = [name for name in megatron.recompute_modules if name in absent]
    if inapplicable:
        modules = ("core_attn", "mlp", "moe", "moe_act", "layernorm")
        valid = ", ".join(name for name in modules if name not in absent)
        raise ConfigError(
            f"{field}.recompute_modules={inapplicable}, but {model.architecture} has none; "
            f"valid for this model: {valid}",
            code="layout.recompute-modules",
        )
    if megatron.dtype == "float32":
        _check_grouped_experts(megatron, field, f"{field}.dtype=float32")


def _check_grouped_experts(megatron: MegatronConfig, field: str, reason: str) -> None:
    if megatron.recompute_granularity == "selective" and "moe_act" in megatron.recompute_modules:
        raise ConfigError(
            f"{field}.recompute_modules={megatron.recompute_modules}: moe_act needs Transformer Engine's grouped "
            f"experts, which {reason} excludes; use moe",
            code="config.recompute-moe-act",
        )


def check_models(config: JobConfig) -> None:
    """Check the layout of every role against its model, if the model folder exists already.

    Raises:
        ConfigError: a parallel size does not divide a dimension of the model.
        ModelError: the folder's ``config.json`` is missing, malformed, or of an unknown architecture.
    """
    for path, megatron, key in _models_of(config):
        if not Path(path).is_dir():
            continue  # created before the run starts, or reported when the run loads the model
        model = read_model_config(path)
        try:
            check_role(model, megatron, key)
        except ConfigError as error:
            raise ConfigError(f"{error.text}{inheritance_note(config, error.text)}", code=error.code) from error


def _models_of(config: JobConfig) -> list[tuple[str, MegatronConfig, str]]:
    """Model folder, layout and config key of the layout, for every role of a job."""
    if isinstance(config, SupervisedConfig):
        return [(config.model.path, config.megatron, "megatron")]
    if isinstance(config, GenerateConfig):
        return []
    if isinstance(config, EvaluateConfig):
        return _reward_model_of(config)  # the policy may be a checkpoint, which is opened when the run starts
    policy = config.actor_rollout_ref
    rollout = MegatronConfig(tensor_model_parallel_size=policy.rollout.tensor_model_parallel_size)
    roles = [
        (policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron"),
        (policy.model.path, rollout, "actor_rollout_ref.rollout"),
    ]
    if config.uses_reference and policy.ref.megatron is not None:
        roles.append((policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron"))
    roles += [
        (str(teacher.model_path), teacher.megatron, f"distillation.teacher_models.{name}.megatron")
        for name, teacher in config.distillation.local_teachers.items()
    ]
    if config.uses_critic:
        roles.append((str(config.critic.model.path), config.critic.megatron, "critic.megatron"))
    return roles + _reward_model_of(config)


def _reward_model_of(config: TrainConfig | EvaluateConfig) -> list[tuple[str, MegatronConfig, str]]:
    keys = config.reward.model
    return [(str(keys.path), keys.megatron, "reward.model.megatron")] if keys.enable else []


class ScheduleSteps(NamedTuple):
    """Lengths of a schedule in optimizer steps, with the configuration keys that define them.

    Attributes:
        warmup: steps of the warm-up, part of ``total``.
        wsd_decay: steps of the decay of ``wsd``, part of ``total``.
    """

    total: int
    warmup: int
    wsd_decay: int
    warmup_key: str
    wsd_decay_key: str


def schedule_steps(optim: OptimConfig, updates: int) -> ScheduleSteps:
    """Resolve every null and every ratio of the schedule's lengths, without a check that they fit."""
    total = optim.total_training_steps or updates
    warmup, warmup_key = optim.lr_warmup_steps, "lr_warmup_steps"
    if warmup < 0:
        warmup, warmup_key = int(optim.lr_warmup_steps_ratio * total), "lr_warmup_steps_ratio"
    decay, decay_key = optim.lr_wsd_decay_steps, "lr_wsd_decay_steps"
    if decay < 0:
        decay, decay_key = max(1, int(optim.lr_wsd_decay_steps_ratio * total)), "lr_wsd_decay_steps_ratio"
    return ScheduleSteps(total, warmup, decay, warmup_key, decay_key)
