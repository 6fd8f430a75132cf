"""verl's supervised fine-tuning: its scripts' overrides and its defaults, as ``megarl sft`` reads them.

``verl_sft_facts.json`` holds the overrides of verl's SFT scripts with Megatron and the defaults of verl's
configuration, both at the commit in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_cases import SFT, check_problem, problems_of, with_keys
from list_verl_keys import shared_keys

from megarl.config import SFTConfig
from megarl.config.build import build, verl_notes
from megarl.config.compose import ConfigRequest, compose
from megarl.config.keys import value_at, walk
from megarl.config.problems import InvalidConfigError
from megarl.config.verl.table import table_of
from megarl.ops.jobs.table import compose_job

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "verl_sft_facts.json").read_text(encoding="utf-8"))
KNOWN, TABLE = dict(walk(SFTConfig)), table_of(SFTConfig)
FREE = tuple(f"{path}." for path, key in KNOWN.items() if key.is_mapping)


def key_of(override):
    return override.lstrip("+").partition("=")[0]


def composed(script):
    """The configuration of a script, or its refused keys with the codes of their problems."""
    nodes = {"examples/sft/gsm8k/run_qwen3_5_397b_a17b_megatron.sh": 16}
    devices = ("trainer.n_gpus_per_node=8", f"trainer.nnodes={nodes.get(script, 1)}")  # torchrun's options
    try:
        return compose(ConfigRequest(SFTConfig, "sft_trainer_engine", (*FACTS["scripts"][script], *devices))), {}
    except InvalidConfigError as error:
        return None, {problem.path: problem.code for problem in error.problems}


# Keys that the scripts set to values of features that megarl lacks.
_REFUSED = {
    "examples/sft/gsm8k/run_qwen_megatron_fsdp.sh": {
        "engine.use_megatron_fsdp",
        "megatron.override_transformer_config.gradient_accumulation_fusion",
    },
    "examples/sft/gsm8k/run_qwen3_5_397b_a17b_megatron.sh": {
        "model.mtp.enable",
        "model.mtp.enable_train",
        "model.mtp.detach_encoder",
        "model.mtp.mtp_loss_scaling_factor",
        "optim.betas",  # its quotes make it a text
    },
    "examples/sft/gsm8k/run_nemotron_nano_v3_megatron.sh": set(),
    "tests/special_e2e/sft/run_sft_engine.sh": {"trainer.test_freq"},
}


@pytest.mark.parametrize("script", FACTS["scripts"])
def test_overrides_of_verls_scripts(script):
    config, refused = composed(script)
    assert set(refused) <= _REFUSED[script] and bool(refused) == (config is None), refused
    assert "config.unknown-key" not in refused.values()


def test_share_of_accepted_keys(capsys):
    keys = {key_of(override) for overrides in FACTS["scripts"].values() for override in overrides}
    refused = {path for script in FACTS["scripts"] for path in composed(script)[1]}
    with capsys.disabled():
        print(f"\n{len(keys)} keys of verl's SFT scripts, {len(keys & refused)} refused: {sorted(keys & refused)}")
    assert len(keys) == 62 and len(keys & refused) <= 7


def test_values_reach_megarls_keys():
    config, _ = composed("examples/sft/gsm8k/run_nemotron_nano_v3_megatron.sh")
    assert config is not None
    expected = {
        "megatron.tensor_model_parallel_size": 8,
        "megatron.expert_model_parallel_size": 8,
        "megatron.optimizer_offload": True,
        "megatron.recompute_granularity": "full",
        "megatron.recompute_num_layers": 1,
        "megatron.override_transformer_config": {"attention_backend": "auto"},
        "optim.betas": [0.9, 0.95],
        "trainer.checkpoint.save_contents": ["model", "optimizer", "extra"],
        "trainer.max_ckpt_to_keep": 10,
        "data.messages_key": "messages",
    }
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engine.use_megatron_fsdp", True, "config.verl-value: use_distributed_optimizer"),
        ("engine.use_dist_checkpointing", True, "config.verl-value"),
        ("engine.router_replay.mode", "R2", "config.verl-feature"),
        ("engine.strategy", "fsdp", "config.verl-value"),
        ("engine.fsdp_size", 8, "config.verl-key"),
        ("engine.tensor_parallel_size", 8, "config.unknown-key: megatron.tensor_model_parallel_size"),
        ("optim.optimizer", "muon", "config.verl-value"),
        ("data.custom_cls.path", "own.py", "config.verl-feature"),
        ("data.enable_thinking_key", "think", "config.verl-value: apply_chat_template_kwargs"),
        ("trainer.profile_interval", [1, 2], "config.verl-value"),
        ("trainer.save_freq", "after_each_epoch", "config.verl-value"),
    ],
)
def test_refused_by_name(key, value, expected):
    problem = problems_of({key: value}, SFTConfig, SFT)[key]
    check_problem(problem, expected)
    assert problem.value == value


def test_jobs_on_texts_have_no_adapters_on_a_tower():
    key = "model.lora.freeze_vision_model"
    check_problem(problems_of({"model.lora_rank": 8, key: False}, SFTConfig, SFT)[key], "image.text-job")
    assert problems_of({key: False}, SFTConfig, SFT)[key].code == "adapter.rank-zero"


def test_every_key_of_verl_has_a_rule():
    same = set(shared_keys(SFTConfig))
    keys = {*FACTS["defaults"], *(key_of(o) for script in FACTS["scripts"].values() for o in script)}
    undecided = [
        key for key in keys - same - set(TABLE.groups) if not key.startswith(FREE) and TABLE.rule_for(key) is None
    ]
    assert not undecided, f"neither in tools/list_verl_keys.py nor in a rule: {sorted(undecided)}"
    assert same <= KNOWN.keys() and same <= keys


def test_the_preset_has_verls_defaults():
    config = compose(ConfigRequest(SFTConfig, "sft_trainer_engine", ("model.path=model", "data.use_dynamic_bsz=false")))
    wrong = {}
    for path in shared_keys(SFTConfig):
        theirs, ours = FACTS["defaults"].get(path), value_at(config, path)
        if theirs in (None, -1) or "$" in str(theirs) or path in _OTHER_BY_DESIGN:
            continue
        if ours != theirs and ours != [theirs]:
            wrong[path] = (theirs, ours)
    assert wrong == {}


_OTHER_BY_DESIGN = {"model.path", "trainer.device", "data.use_dynamic_bsz"}


def test_groups_of_verl_choose_what_megarl_is():
    overrides = ("model.path=model", "engine=megatron", "optim=megatron", "model=hf_model", "data.train_files=t")
    assert compose(ConfigRequest(SFTConfig, "sft", overrides)).model.path == "model"
    with pytest.raises(InvalidConfigError) as caught:
        compose(ConfigRequest(SFTConfig, "sft", (*overrides[:1], "engine=fsdp", "data.train_files=t")))
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [("engine", "config.verl-group")]


def test_engine_selects_verls_defaults():
    assert compose_job("sft", ["model.path=m", "engine=megatron"]).data.train_batch_size == 256
    assert compose_job("sft", ["model.path=m", "engine=megatron"]).trainer.total_epochs == 4


def test_file_logger_and_unread_sizes():
    values = with_keys({"trainer.logger": ["console", "file"], "data.micro_batch_size_per_gpu": 4}, SFT)
    config = build(SFTConfig, values)
    assert config.trainer.logger == ["console", "jsonl"] and config.data.micro_batch_size_per_gpu is None
    assert any("data.micro_batch_size_per_gpu has no effect" in note for note in verl_notes(SFTConfig, values))
