"""Rules for verl's supervised fine-tuning: data, run and engine; the model's rules are those of the roles."""

from __future__ import annotations

from megarl.config.verl.role_rules import ADAPTER_KIND
from megarl.config.verl.rules import Feature, NoEffect, Only, OtherBackend, Refused, Renamed, Rule, Values

_TEXTS = "megarl trains on text: it has no images, video or sound"
_FSDP = OtherBackend("FSDP", "the layout is in `megatron`, which verl calls `engine`")
_NO_VALIDATION = "megarl sft does not validate while it trains; `megarl evaluate` scores the exported model"
_CUSTOM = "megarl sft reads prompts with responses, or conversations (data.messages_key)"

_DATA: dict[str, Rule] = {
    "data.val_files": NoEffect(_NO_VALIDATION),
    "data.val_max_samples": NoEffect(_NO_VALIDATION),
    "data.tools_key": Only(("tools",), "the column of a row's tools is called `tools`"),
    "data.enable_thinking_key": Only(
        ("enable_thinking",), "megarl reads no such column; set data.apply_chat_template_kwargs.enable_thinking"
    ),
    "data.enable_thinking_default": Renamed(
        "data.apply_chat_template_kwargs.enable_thinking", left_out=(None, "none"), why="for every row"
    ),
    "data.pad_mode": NoEffect("megarl always packs sequences, without padding"),
    "data.balance_dp_token": NoEffect("data-parallel ranks always get equal work"),
    "data.custom_cls.name": Feature("data.custom_cls.path", (), _CUSTOM),
    "data.custom_cls.path": Feature("data.custom_cls.path", (), _CUSTOM),
    "data.use_shm": NoEffect("megarl reads files through the page cache"),
    "data.num_workers": NoEffect("the loader reads rows from memory-mapped files on demand"),
    "data.ignore_input_ids_mismatch": NoEffect(
        "a conversation whose earlier turns the chat template changes later on (as templates do that remove thinking) "
        "is an error; make one row per assistant message"
    ),
    "data.image_key": Only(("images",), _TEXTS),
    "data.video_key": Only(("videos",), _TEXTS),
    "data.image_patch_size": NoEffect(_TEXTS),
}

_RUN: dict[str, Rule] = {
    "checkpoint.save_contents": Renamed("trainer.checkpoint.save_contents"),
    "checkpoint.load_contents": Renamed("trainer.checkpoint.load_contents"),
    "checkpoint.async_save": Renamed("trainer.checkpoint.async_save"),
    "checkpoint.strict": NoEffect("every weight must be there exactly once"),
    "checkpoint.mbridge_config.*": NoEffect("megarl's weight maps write Hugging Face folders"),
    "trainer.default_hdfs_dir": Refused("set trainer.default_local_dir to a folder on a mounted file system"),
    "trainer.test_freq": Only((-1,), _NO_VALIDATION),
    "trainer.balance_batch": NoEffect("data-parallel ranks always get equal work"),
    "trainer.profile_interval": Only(([-1, -1],), "megarl sft has no profiler; set trainer.timeline.enable"),
    "profiler.enable": Only((False,), "megarl sft has no profiler; set trainer.timeline.enable"),
    "profiler.*": Feature("profiler.enable", (False,), "megarl sft has no profiler; set trainer.timeline.enable"),
}

_FSDP_ENGINE = (
    "fsdp_size reshard_after_forward wrap_policy.* offload_policy model_dtype ulysses_sequence_parallel_size "
    "entropy_checkpointing forward_prefetch use_orig_params data_parallel_shard_size"
)
_FSDP_OPTIM = "lr_scheduler_type min_lr_ratio num_cycles optimizer_impl warmup_style"

_ENGINE: dict[str, Rule] = {
    "engine.*": Renamed("megatron"),
    "engine.strategy": Only(("megatron",), "megarl trains with Megatron; set engine=megatron"),
    "engine.use_torch_compile": NoEffect("megarl compiles nothing"),
    **{f"engine.{name}": _FSDP for name in _FSDP_ENGINE.split()},
    **{f"optim.{name}": _FSDP for name in _FSDP_OPTIM.split()},
}

SFT_VALUES: dict[str, Values] = {
    "trainer.logger": Values(meanings={"file": "jsonl"}),
    "optim.lr_warmup_steps": Values(meanings={None: -1}),
    "optim.lr_wsd_decay_steps": Values(meanings={None: -1}),
    "optim.total_training_steps": Values(meanings={-1: None}),
    "model.lora.type": ADAPTER_KIND,
    "trainer.save_freq": Values(refused={"after_each_epoch": "a number of steps in megarl, or -1"}),
    "trainer.device": Values(refused={"npu": "an Ascend NPU, with MindSpeed: megarl runs on CUDA and on CPUs"}),
}
"""Keys of both with different values."""


def sft_rules() -> dict[str, Rule]:
    """Return the rules by path; ``*`` at the end matches any rest."""
    return _DATA | _RUN | _ENGINE
