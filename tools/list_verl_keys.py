#!/usr/bin/env python3
"""Generate the page on verl's keys: ``python tools/list_verl_keys.py > docs/reference/verl_keys.md``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megarl.config.keys import AUTO, find_key
from megarl.config.problems import format_value
from megarl.config.schema.jobs import SFTConfig, TrainConfig
from megarl.config.verl.rules import Feature, NoEffect, Only, OtherBackend, PoolSwitch, Refused, Renamed, Rule
from megarl.config.verl.table import table_of

_ROLES = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
    "critic.model",
    "critic",
    "reward.model",
)
_POLICY = "actor_rollout_ref."
_COLUMN: dict[type, str] = {Renamed: "megarl", Only: "values", Feature: "off at", OtherBackend: "backend"}
_TITLES: dict[type, tuple[str, str]] = {
    Renamed: ("Translated", "megarl has a different name. If one place sets both keys, their values must agree."),
    Only: ("Accepted at the values that describe megarl's behaviour", "Any other value is refused."),
    NoEffect: (
        "Accepted without effect",
        "Accepted at every value, since it cannot change the results. megarl reports it once per run.",
    ),
    Feature: ("Accepted while its feature is off", "If the switch is on, both are refused."),
    PoolSwitch: ("Switches of resource pools", "In megarl a role has devices of its own if it has nodes."),
    OtherBackend: (
        "Keys of other backends",
        "Refused by name: megarl trains with Megatron-Core and generates with SGLang.",
    ),
    Refused: ("Not supported", "Refused by name, with the nearest setting of megarl."),
}

_MEGATRON = (
    "context_parallel_size dtype expert_model_parallel_size expert_tensor_parallel_size grad_offload "
    "optimizer_offload override_transformer_config param_offload pipeline_model_parallel_size sequence_parallel "
    "tensor_model_parallel_size use_distributed_optimizer virtual_pipeline_model_parallel_size"
)
_OPTIM = (
    "betas clip_grad lr lr_decay_style lr_warmup_steps lr_warmup_steps_ratio lr_wsd_decay_steps "
    "lr_wsd_decay_style min_lr total_training_steps weight_decay"
)
_ADAPTERS = "exclude_modules lora_adapter_path lora_alpha lora_rank target_modules"
_CHECKPOINT, _PROFILER = "async_save load_contents save_contents", "enable all_ranks ranks"
_SHARED = {
    "actor_rollout_ref.actor.checkpoint": _CHECKPOINT,
    "actor_rollout_ref.actor": (
        "tau_neg tau_pos loss_scale_factor calculate_sum_pi_squared "
        "clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low entropy_coeff freeze_vision_tower kl_loss_coef "
        "kl_loss_type loss_agg_mode ppo_epochs ppo_mini_batch_size shuffle "
        "use_dynamic_bsz use_kl_loss use_prefix_grouper"
    ),
    "actor_rollout_ref.actor.megatron": _MEGATRON,
    "actor_rollout_ref.actor.optim": _OPTIM,
    "actor_rollout_ref.actor.profiler": _PROFILER,
    "actor_rollout_ref.ref.profiler": _PROFILER,
    "critic.profiler": _PROFILER,
    "global_profiler": "tool steps profile_continuous_steps save_path",
    "global_profiler.global_tool_config.nsys": "discrete",
    "actor_rollout_ref.actor.router_replay": "mode",
    "actor_rollout_ref.actor.policy_loss": "clip_cov_lb clip_cov_ratio clip_cov_ub kl_cov_ratio loss_mode ppo_kl_coef",
    "actor_rollout_ref.model": f"external_lib path tokenizer_path {_ADAPTERS}",
    "actor_rollout_ref.model.lora": "freeze_vision_model freeze_vision_projection lora_A_init_method type",
    "actor_rollout_ref.ref.megatron": _MEGATRON,
    "actor_rollout_ref.rollout.agent": "agent_loop_config_path default_agent_loop num_workers",
    "actor_rollout_ref.rollout": (
        "calculate_log_probs dtype free_cache_engine log_prob_max_token_len_per_gpu "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz max_num_seqs n n_gpus_per_node name nnodes seed "
        "quantization temperature "
        "tensor_model_parallel_size top_k top_p"
    ),
    "actor_rollout_ref.rollout.multi_turn": (
        "enable format max_assistant_turns max_parallel_calls max_tool_response_length max_user_turns "
        "tool_config_path tool_response_truncate_side"
    ),
    "actor_rollout_ref.rollout.val_kwargs": "n temperature top_k top_p",
    "algorithm": "adv_estimator gamma kl_penalty lam norm_adv_by_std_in_grpo use_kl_in_reward use_pf_ppo",
    "algorithm.filter_groups": "enable max_num_gen_batches metric",
    "algorithm.kl_ctrl": "horizon kl_coef target_kl type",
    "algorithm.rollout_correction": (
        "bypass_mode rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs rollout_rs_threshold"
    ),
    "critic.checkpoint": _CHECKPOINT,
    "critic": "cliprange_value enable loss_agg_mode ppo_epochs ppo_mini_batch_size use_dynamic_bsz",
    "critic.megatron": _MEGATRON,
    "critic.model.lora": "freeze_vision_model freeze_vision_projection lora_A_init_method type",
    "critic.model": f"path {_ADAPTERS}",
    "critic.optim": _OPTIM,
    "data": (
        "reward_fn_key train_max_samples val_max_samples filter_overlong_prompts_workers "
        "apply_chat_template_kwargs filter_overlong_prompts gen_batch_size image_key image_patch_size "
        "max_prompt_length max_response_length mm_processor_kwargs prompt_key seed shuffle train_batch_size "
        "train_files truncation val_batch_size val_files video_key"
    ),
    "algorithm.pf_ppo": "reweight_method weight_pow",
    "reward": "num_workers",
    "reward.custom_reward_function": "name path reward_kwargs",
    "reward.reward_kwargs": "max_resp_len",
    "reward.reward_kwargs.overlong_buffer_cfg": "enable len log penalty_factor",
    "reward.reward_manager": "name",
    "data.custom_cls": "name path",
    "distillation": "enabled n_gpus_per_node nnodes teacher_key",
    "distillation.distillation_loss": (
        "clip_ratio clip_ratio_high clip_ratio_low distillation_loss_coef log_prob_min_clamp loss_max_clamp loss_mode "
        "topk use_policy_gradient use_task_rewards"
    ),
    "data.sampler": "class_name class_path",
    "trainer": (
        "balance_batch critic_warmup default_local_dir device esi_redundant_time experiment_name "
        "log_val_generations logger max_actor_ckpt_to_keep max_critic_ckpt_to_keep n_gpus_per_node nnodes "
        "project_name resume_from_path resume_mode rollout_data_dir save_freq test_freq total_epochs "
        "total_training_steps val_before_train val_only validation_data_dir"
    ),
}
_SFT_SHARED = {
    "data": (
        "apply_chat_template_kwargs max_length max_token_len_per_gpu messages_key micro_batch_size_per_gpu "
        "train_batch_size train_files train_max_samples truncation use_dynamic_bsz"
    ),
    "model.lora": "freeze_vision_model freeze_vision_projection lora_A_init_method type",
    "model": f"external_lib path tokenizer_path {_ADAPTERS}",
    "optim": _OPTIM,
    "trainer": (
        "default_local_dir device experiment_name logger max_ckpt_to_keep n_gpus_per_node nnodes project_name "
        "resume_from_path resume_mode save_freq seed total_epochs total_training_steps"
    ),
}
SHARED: dict[type, dict[str, str]] = {TrainConfig: _SHARED, SFTConfig: _SFT_SHARED}
"""Keys with the same name and meaning in verl and megarl, separated by spaces, by section and job."""


def shared_keys(schema: type) -> list[str]:
    """List the keys of a job that have the same name and meaning in verl and megarl."""
    return [f"{section}.{name}" for section, names in SHARED[schema].items() for name in names.split()]


_INTRODUCTION = """\
# verl's keys

Generated from `megarl/config/verl/` by `python tools/list_verl_keys.py > docs/reference/verl_keys.md`; do not edit.

megarl accepts each key of verl with its meaning, translates it, or refuses it by name before any process starts. It
reports translated keys, unless the value is megarl's default, and keys without effect once, on standard error.
[From verl](../tutorials/from_verl.md) starts a run script of verl.

`model_engine=megatron`, or `--config-name=ppo_megatron_trainer` in older scripts, starts from verl's defaults
(`configs/ppo_megatron_trainer.yaml`). megarl ignores `--config-path` if the folder has no such file. The tests train
with the overrides of verl's GRPO and PPO scripts for Qwen3-8B, with a tiny model on a CPU
(`tests/e2e/test_e2e_verl_scripts.py`).

## Accepted share of verl's scripts

The table covers the run scripts with Megatron among verl's examples, at the commit that the tests name, with
`INFER_BACKEND=sglang`. An override is a key with its value. A key counts as accepted if megarl accepts every value that
the scripts give it.

@SHARES@

megarl refuses the rest by name. The refused keys belong to features that megarl lacks: multi-token prediction (MTP),
initial weights from Megatron checkpoints, and Megatron's FSDP. Others belong to vLLM, TensorRT-LLM, VeOmni and Ascend
NPUs.

## Differences

- `data.train_batch_size` and `ppo_mini_batch_size` count prompts, as in verl. verl multiplies the latter by `rollout.n`
  and divides it over ranks; in megarl it never depends on the layout. `micro_batch_size_per_gpu` and
  `log_prob_micro_batch_size_per_gpu` count samples per data-parallel rank. If no micro-batch size is set, megarl cuts
  micro-batches by tokens; verl does so only with `use_dynamic_bsz=True`. Neither choice changes the result.
- Batch sizes must divide. If one does not, the error names the nearest sizes that do.
- Losses are divided by counts over the whole mini-batch and all ranks. In `token-mean`, a micro-batch therefore weighs
  as much as its tokens, and results depend neither on the micro-batch split nor on padding.
- `trainer.critic_warmup=N` freezes the actor for N steps; in verl for N - 1.
- `trainer.balance_batch` also orders samples so that mini-batches are similar. Data-parallel ranks get different
  numbers of samples if that equalizes their work.
- `actor_rollout_ref.ref.megatron` gives the reference separate workers. Missing keys are the actor's, as in verl.
  Without any of its keys, the reference's weights are swapped into the actor's model, which needs less memory.
- `critic.megatron` and `reward.model.megatron` inherit the actor's section too. verl's have their own defaults, which
  the preset `ppo_megatron_trainer` sets.
- LoRA: `lora_rank` and `lora.rank` are one setting, likewise `lora_alpha`, `target_modules`, `exclude_modules` and the
  adapter's path. Each Hugging Face tensor has one A and one B, also in Megatron's fused layers. A's initial
  values are peft's by default; verl's presets select Megatron-Bridge's ([LoRA](../how_to/lora.md)).
- `total_training_steps` of an optimizer counts optimizer steps, including warm-up.
- `val_kwargs.temperature=0` is greedy; megarl refuses several greedy responses per prompt.
- Rows that are too long stop the run with `data.truncation=error`, as in verl. `filter_overlong_prompts` counts the
  dropped rows. `data.mixture` weights data sets. `data.custom_cls` takes classes with verl's constructor, and
  `data.sampler` verl's samplers; one with `update` needs `state_dict` and `load_state_dict` too, so that a run can be
  resumed. A class derived from verl's `RLHFDataset` needs verl's package. `data.collate_fn` takes verl's form of a
  collate function ([data](../how_to/data.md)).
- `actor.shuffle` shuffles the samples of a step once, for actor and critic; verl shuffles in every epoch.
- Two bounds of `rollout_rs_threshold` for k1 bound the ratio of actor to engine; verl's code bounds its inverse.
  Replace `'a_b'` by the numbers of `'1/b_1/a'` ([rollout correction](rollout_correction.md)).
- `nccl_timeout` is `trainer.nccl_timeout`, for all roles: 1800 s by default, 600 s in verl.
- `algorithm.filter_groups` admits the next prompt as soon as a group without variance in `metric` (`score` by default)
  is dropped; verl generates rounds of `gen_batch_size` prompts. If `max_num_gen_batches` batches of prompts give too
  few groups, the run saves and stops, or fills the step (`on_shortage`).
- Checkpoints have megarl's format: `global_step_N` folders, written atomically, readable in any layout. `hf_model` in
  `save_contents` adds a Hugging Face folder. megarl does not resume from a checkpoint of verl; `megarl convert` makes a
  Hugging Face folder from verl's Megatron checkpoint. `resume_mode=auto` continues exactly, with random states and the
  position in the data; `must` is an addition of megarl.
- `trainer.logger` takes console, jsonl, mlflow, swanlab, tensorboard and wandb. Metrics have verl's names
  (`actor/pg_loss`, `critic/rewards/mean`, `timing_s/gen`, ...). `val-core/<data_source>/reward/mean@N` is the mean over
  responses.
- `reward.custom_reward_function` has verl's signature. A reward that raises stops the run or masks the sample
  (`reward.on_error`); it never counts as 0. `reward.reward_manager.name` takes naive, batch, dapo and prime.
- `reward.model.enable` is for a model with a scalar head. It runs on Megatron, with the layout `reward.model.megatron`,
  independent of the engine in verl's keys. For a generative judge set `reward.name=judge` and
  `reward.judge.base_url`.
- `router_replay.mode` of the actor, also below `megatron`, takes R2 and R3. With R3 the engines return their routes;
  `rollout.enable_rollout_routing_replay` has no effect. Balance of experts is per sequence
  (`moe_router_load_balancing_type=seq_aux_loss`), z-loss and bias updates have Megatron's keys, and every update
  measures the load of the experts ([mixture of experts](../how_to/moe.md)).
- `override_transformer_config` is checked against the installed Megatron-Core's `TransformerConfig`: names and types,
  before anything starts. megarl classifies every field: supported
  ([layouts](../how_to/layouts.md#fields-of-megatron-core)), set by the model, the layout or another key, or rejected
  with the reason, as FP8 is.
"""

_FINE_TUNING = """\
## Supervised fine-tuning

`megarl sft` takes the overrides of verl's `sft_trainer` for Megatron: `engine.*` is `megatron.*`, and
`engine=megatron` starts from verl's defaults (`configs/sft_trainer_engine.yaml`). Replace
`torchrun ... -m verl.trainer.sft_trainer` by `megarl sft`, and set `trainer.n_gpus_per_node` and
`trainer.nnodes`, which torchrun got from its own options. `data.messages_key` names the column of whole conversations,
as in verl: every message of the assistant is trained on, with its closing tokens. The loss is the mean over trained
tokens of the whole batch. verl's sampler and megarl's shuffle rows differently.
"""

SHARES = (
    ("all", 31, 92, 83, 96),
    ("on GPUs", 27, 94, 88, 97),
    ("on GPUs, generating with SGLang", 9, 95, 92, 97),
)
"""Scripts, with the accepted shares of overrides, keys and uses in percent; measured by the tests."""


def render_verl_page() -> str:
    """Render the page as Markdown."""
    parts = [
        _INTRODUCTION.replace("@SHARES@", _shares()),
        "## Keys",
        *_keys_of(TrainConfig),
        _FINE_TUNING,
        *_keys_of(SFTConfig),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _keys_of(schema: type) -> list[str]:
    """Sections on the keys of one job."""
    table = table_of(schema)
    groups: dict[type, dict[str, Rule]] = defaultdict(dict)
    for path, rule in table.rules.items():
        groups[type(rule)][path] = rule
    parts = ["### Same name and meaning", _same(schema), "### Same name, different values", _values(schema)]
    for kind, (title, text) in _TITLES.items():
        if groups[kind]:
            parts += [f"### {title}", text, _table(kind, groups[kind])]
    return parts


def _shares() -> str:
    lines = ["| scripts | number | overrides | keys | uses |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {number} | {a} % | {b} % | {c} % |" for name, number, a, b, c in SHARES)])


def _same(schema: type) -> str:
    rows = SHARED[schema].items()
    lines = [f"| `{section}` | {' '.join(f'`{name}`' for name in names.split())} |" for section, names in rows]
    return "\n".join(["| section | keys |", "|---|---|", *lines])


def _values(schema: type) -> str:
    rows = ["| key | verl | megarl |", "|---|---|---|"]
    for path, words in table_of(schema).values.items():
        item = find_key(schema, path)
        unset = AUTO if item and item.accepts_auto else None
        rows += [
            _row(path, f"`{format_value(value)}`", f"`{format_value(unset if other is None else other)}`")
            for value, other in words.meanings.items()
        ]
        rows += [_row(path, f"`{format_value(value)}`", f"refused: {why}") for value, why in words.refused.items()]
    return "\n".join(rows)


def _table(kind: type, group: dict[str, Rule]) -> str:
    """Rules of one kind; a key of several roles is one row."""
    merged: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path, rule in group.items():
        role = next((role for role in _ROLES if path.startswith(f"{role}.")), "")
        name = path.removeprefix(f"{role}.")
        middle, text = (cell.replace(f"{role}.", "") if role else cell for cell in _cells(rule))
        merged[name if role else path, middle, text].append(role)
    rows = [f"| {_keys(roles, name)} | {middle} | {text} |" for (name, middle, text), roles in merged.items()]
    return "\n".join([f"| key | {_COLUMN.get(kind, '')} | |", "|---|---|---|", *rows])


def _keys(roles: list[str], name: str) -> str:
    """The key of several roles, with the roles of one section in braces."""
    policy_roles = [role.removeprefix(_POLICY) for role in roles if role.startswith(_POLICY)]
    others = [f"`{role}.{name}`" if role else f"`{name}`" for role in roles if not role.startswith(_POLICY)]
    if not policy_roles:
        return ", ".join(others)
    section = policy_roles[0] if len(policy_roles) == 1 else f"{{{','.join(policy_roles)}}}"
    return ", ".join([f"`{_POLICY}{section}.{name}`", *others])


def _cells(rule: Rule) -> tuple[str, str]:
    if isinstance(rule, Renamed):
        words = [f"{format_value(value)} is {format_value(other)}" for value, other in rule.values.items()]
        words += [f"{format_value(value)} needs nothing" for value in rule.left_out]
        return f"`{rule.to}`", "; ".join([*words, *([rule.why] if rule.why else [])])
    if isinstance(rule, Only):
        return " or ".join(f"`{format_value(value)}`" for value in rule.values) or "`null`", rule.why
    if isinstance(rule, Feature):
        off: list[Any] = list(rule.off) or [None]
        return f"`{rule.switch}={format_value(off[0])}`", rule.why
    if isinstance(rule, OtherBackend):
        return rule.name, rule.nearest
    return "", rule.why


def _row(path: str, *cells: str) -> str:
    return f"| `{path}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(render_verl_page(), end="")
