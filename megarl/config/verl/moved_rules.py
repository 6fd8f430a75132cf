"""Rules for keys that have moved or gone: rewards, in verl and in megarl, the search agent, and delta syncs."""

from __future__ import annotations

from megarl.config.schema.jobs import REWARD_MODEL, SEARCH
from megarl.config.verl.rules import Feature, NoEffect, Only, PoolSwitch, Refused, Renamed, Rule

_JUDGE = "the model has a scalar head; for a generative judge set reward.judge.base_url"
_CUSTOM = "set reward.custom_reward_function.path for a custom reward"
_OLD, _VERL = "reward_model", "reward.reward_model"
_FUNCTION_KEYS = (
    "name function_weight num_workers launch_reward_fn_async timeout_s max_concurrency max_retries on_error "
    "max_failure_ratio"
)
_FUNCTION_SECTIONS = "functions data_sources function_kwargs reward_kwargs sandbox judge"

REWARDS: dict[str, Rule] = {
    "reward.compute_score_kwargs.*": Refused("set arguments of a function in reward.function_kwargs.<function>"),
    "reward.reward_manager.source": Only(("register",), _CUSTOM),
    "reward.reward_manager.module.*": Feature("reward.reward_manager.source", ("register",), _CUSTOM),
    "reward.sandbox_fusion.*": Renamed("reward.sandbox"),
    f"{_VERL}.enable": Renamed(f"{REWARD_MODEL}.enable", why=_JUDGE),
    f"{_VERL}.model_path": Renamed(f"{REWARD_MODEL}.path"),
    f"{_VERL}.enable_resource_pool": PoolSwitch(REWARD_MODEL),
    f"{_VERL}.n_gpus_per_node": Renamed(f"{REWARD_MODEL}.n_gpus_per_node", left_out=(0,)),
    f"{_VERL}.*": Renamed(REWARD_MODEL),
    f"{REWARD_MODEL}.rollout.*": NoEffect(f"a reward model runs on Megatron; its layout is {REWARD_MODEL}.megatron"),
    f"{REWARD_MODEL}.forward_max_token_len_per_gpu": Renamed(f"{REWARD_MODEL}.max_token_len_per_gpu"),
    "custom_reward_function.*": Renamed("reward.custom_reward_function"),
    "sandbox_fusion.*": Renamed("reward.sandbox"),
    **{f"{_OLD}.{name}": Renamed(f"reward.{name}") for name in _FUNCTION_KEYS.split()},
    **{f"{_OLD}.{name}.*": Renamed(f"reward.{name}") for name in _FUNCTION_SECTIONS.split()},
    f"{_OLD}.reward_manager": Renamed("reward.reward_manager.name"),
    f"{_OLD}.sandbox_fusion.*": Renamed("reward.sandbox"),
    f"{_OLD}.reward_loop_source": Only(("register",), _CUSTOM),
    f"{_OLD}.reward_loop_module_path": Refused(_CUSTOM),
    f"{_OLD}.reward_loop_class_name": Refused(_CUSTOM),
    f"{_OLD}.enable_resource_pool": PoolSwitch(REWARD_MODEL),
    f"{_OLD}.model_weight": Renamed(f"{REWARD_MODEL}.weight"),
    f"{_OLD}.model.*": Renamed(REWARD_MODEL),
    f"{_OLD}.*": Renamed(REWARD_MODEL),
}
"""verl's section `reward`, and the sections before it: `reward_model`, `custom_reward_function`, `sandbox_fusion`."""

VALIDATION_REWARD: dict[str, Rule] = {"val_reward_fn.*": Renamed("reward.validation_function")}
"""The section before `reward.validation_function`, which only training has."""

SEARCH_AGENT: dict[str, Rule] = {
    "do_search": Renamed(f"{SEARCH}.enable"),
    "max_turns": Renamed(f"{SEARCH}.max_turns"),
    "retriever.*": Renamed(SEARCH),
    "data.max_obs_length": Renamed(f"{SEARCH}.max_obs_length"),
}
"""Keys of Search-R1, whose names megarl had too."""

REMOVED: dict[str, Rule] = {
    "trainer.replay_order": Only(
        (), "asynchronous runs differ in the order of completion; async_training.max_staleness=0 repeats bit for bit"
    ),
    "sync.delta.enable": Only((False,), "a weight sync sends all weights"),
    "sync.delta.full_freq": NoEffect("a weight sync sends all weights"),
}
"""Removed keys of megarl, which complete configurations of earlier runs name."""
