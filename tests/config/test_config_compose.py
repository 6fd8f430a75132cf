"""YAML files and overrides become a configuration or a list of problems; origins of changed keys."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml
from support.expected_errors import raises

from megarl.base.errors import ConfigError
from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.batch import plan_batches
from megarl.config.build import ChangedKey, build, changed_keys
from megarl.config.compose import (
    REPOSITORY_CONFIGS,
    ConfigRequest,
    compose,
    compose_sweep,
    to_yaml,
)
from megarl.config.keys import walk
from megarl.config.problems import InvalidConfigError

REQUIRED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")


def composed(*overrides, name="ppo", **request):
    return compose(ConfigRequest(TrainConfig, name, (*REQUIRED, *overrides), **request))


def write(folder, name, content):
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")


SHIPPED = sorted(file.stem for file in REPOSITORY_CONFIGS.glob("*.yaml"))
NAMES = {
    "distill": ("distillation.teacher_models.teacher.model_path=teacher",),
    "run_671b_grpo": ("actor_rollout_ref.rollout.engine_kwargs.sglang.urls=[http://a:30000,http://b:30000]",),
    "run_search_agent": ("actor_rollout_ref.rollout.multi_turn.search.url=http://a:8000/retrieve",),
}
"""Names and addresses that a run needs and no file can contain."""


@pytest.mark.parametrize("name", [name for name in SHIPPED if "evaluate" in name])
def test_every_shipped_evaluation_is_valid(name):
    required = ("data.val_files=val.parquet", "actor_rollout_ref.model.path=model") if name == "evaluate" else ()
    assert compose(ConfigRequest(EvaluateConfig, name, required)).actor_rollout_ref.rollout.replicas


@pytest.mark.parametrize("name", [name for name in SHIPPED if "generate" in name])
def test_every_shipped_generation_is_valid(name):
    required = ("data.prompts=[Why?]", "actor_rollout_ref.model.path=model") if name == "generate" else ()
    assert compose(ConfigRequest(GenerateConfig, name, required)).actor_rollout_ref.rollout.replicas


@pytest.mark.parametrize("name", [name for name in SHIPPED if "evaluate" not in name and "generate" not in name])
def test_every_shipped_config_is_valid(name):
    pair_jobs = {"reward_model": RewardTrainingConfig, "preference": PreferenceConfig}
    schema: Any = pair_jobs.get(name) or (SFTConfig if "sft" in name else TrainConfig)
    required = () if name.startswith("quickstart") else REQUIRED
    if schema is not TrainConfig and required:
        required = ("data.train_files=train.parquet", "model.path=model")
    assert plan_batches(compose(ConfigRequest(schema, name, (*required, *NAMES.get(name, ()))))).phases


def test_quickstart_differs_in_the_algorithm_only():
    ppo, grpo = (compose(ConfigRequest(TrainConfig, name)) for name in ("quickstart", "quickstart_grpo"))
    assert ppo.uses_critic and not grpo.uses_critic
    assert ppo.actor_rollout_ref.actor.megatron == grpo.actor_rollout_ref.actor.megatron
    assert ppo.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 2
    assert ppo.critic.megatron != ppo.actor_rollout_ref.actor.megatron
    assert ppo.trainer.device == "cpu" and ppo.trainer.num_devices == 2
    assert ppo.trainer.experiment_name == grpo.trainer.experiment_name == "quickstart"


def test_override_beats_yaml_beats_schema(tmp_path):
    write(tmp_path, "mine", {"trainer": {"experiment_name": "mine", "nnodes": 2, "seed": 5}})
    config = composed("trainer.seed=7", name="mine", config_dir=str(tmp_path))
    assert (config.trainer.seed, config.trainer.nnodes, config.trainer.n_gpus_per_node) == (7, 2, 8)


def test_user_yaml_builds_on_a_shipped_one(tmp_path):
    write(tmp_path, "mine", {"defaults": ["grpo", "_self_"], "trainer": {"experiment_name": "mine"}})
    config = composed(name="mine", config_dir=str(tmp_path))
    assert config.algorithm.adv_estimator == "grpo" and config.trainer.experiment_name == "mine"


def test_user_yaml_in_a_sub_folder(tmp_path):
    write(tmp_path, "deep/mine", {"trainer": {"experiment_name": "deep"}})
    assert composed(name="deep/mine", config_dir=str(tmp_path)).trainer.experiment_name == "deep"


def test_yaml_problems_and_override_problems_come_together(tmp_path):
    write(tmp_path, "mine", {"trainer": {"experiment_name": "mine", "seeed": 5}})
    with pytest.raises(InvalidConfigError) as caught:
        composed("actor_rollout_ref.actor.optm.lr=1", "+data.shufle=true", "algorithm.lam=x", name="mine",
                 config_dir=str(tmp_path))  # fmt: skip
    text = {problem.path: problem.text for problem in caught.value.problems}
    assert text == {
        "trainer.seeed": "unknown key; did you mean trainer.seed?",
        "actor_rollout_ref.actor.optm.lr": "unknown key; did you mean actor_rollout_ref.actor.optim.lr?",
        "data.shufle": "unknown key; did you mean data.shuffle?",
        "algorithm.lam": "must be a number (>= 0 and <= 1)",
    }


def test_keys_below_an_optional_section_and_a_free_mapping():
    config = composed(
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2",
        "data.apply_chat_template_kwargs.enable_thinking=false",
    )
    assert config.actor_rollout_ref.ref.megatron is not None
    assert config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size == 2
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_hydra_syntax_of_overrides():
    config = composed("trainer.logger=[jsonl,wandb]", "++trainer.nnodes=2", "actor_rollout_ref.actor.optim.lr=1e-5",
                      "~algorithm.use_kl_in_reward", "trainer.hf_export_dir='a b'", "data.val_files=null_file",
                      "actor_rollout_ref.actor.optim={eps: 1e-6}")  # fmt: skip
    assert config.trainer.logger == ["jsonl", "wandb"] and config.trainer.nnodes == 2
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5 and config.actor_rollout_ref.actor.optim.eps == 1e-6
    assert config.algorithm.use_kl_in_reward is False  # back to the schema's default
    assert config.trainer.hf_export_dir == "a b"


NUMBERS = ["2026_11_27", "1e3", "1.50", "true", "0x10", "-5", "inf", "1_000.5"]
UNREADABLE = [
    "~/data/x",
    "/x/epoch=3",
    "/x/模型",
    "/x/m#1",
    "${oc.env:HOME}/a b#",
    "a (copy)",
    "it's",
    'say "x"',
    "/x/[0-9]*",
    "/x/{a,b}",
]


@pytest.mark.parametrize("text", [*NUMBERS, *UNREADABLE])
def test_a_text_of_the_command_line_keeps_its_characters(text):
    config = composed(
        f"trainer.experiment_name={text}",
        f"data.train_files=[a,{text}]",
        f"data.val_files={text}",
        f"critic.model={{lora_rank: 8, exclude_modules: [a,{text}]}}",
        f"reward.custom_reward_function={{path: f.py, name: {text}}}",
    )
    expected = text.replace("${oc.env:HOME}", os.environ["HOME"])
    assert config.trainer.experiment_name == expected
    assert config.data.train_files == ["a", expected] and config.data.val_files == [expected]
    assert config.critic.model.exclude_modules == ["a", expected]
    assert config.reward.custom_reward_function.name == expected


@pytest.mark.parametrize(("text", "more"), [("2026_11_27", ["1e3", "1.50", "yes"]), ("0x10", ["007", "12:30", "-5"])])
def test_a_text_of_a_yaml_file_keeps_its_characters(tmp_path, text, more):
    (tmp_path / "mine.yaml").write_text(
        f"trainer: {{experiment_name: {text}, seed: 1_0}}\n"
        f"data:\n  val_files: {more[0]}\n  train_files:\n  - a\n" + "".join(f"  - {other}\n" for other in more),
        encoding="utf-8",
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other.yaml").write_text(f"prompt_key: {text}\n", encoding="utf-8")
    request = ConfigRequest(TrainConfig, "mine", ("actor_rollout_ref.model.path=m", "+data=other"), str(tmp_path))
    config = compose(request)
    (tmp_path / "stored.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert compose(ConfigRequest(TrainConfig, "stored", (), str(tmp_path))) == config
    assert (config.trainer.experiment_name, config.data.prompt_key, config.trainer.seed) == (text, text, 10)
    assert config.data.val_files == more[:1] and config.data.train_files == ["a", *more]


def test_numbers_of_other_keys_stay_numbers():
    config = composed("trainer.seed=1_0", "reward.functions={gsm8k: 1.0, format: 1e-1}", "trainer.hf_export_dir=null")
    assert config.trainer.seed == 10 and config.trainer.hf_export_dir is None
    assert config.reward.functions == {"gsm8k": 1.0, "format": 0.1}


MAPPINGS = [path for path, item in walk(TrainConfig) if item.is_mapping or item.section is not None]


@pytest.mark.parametrize("depth", sorted({path.count(".") for path in MAPPINGS}))
def test_a_mapping_is_an_override_of_any_section(depth):
    """All sections of a depth in one command, since none is a part of another."""
    mappings = [f"{path}={{no_such_key: {{}}}}" for path in MAPPINGS if path.count(".") == depth]
    with pytest.raises(InvalidConfigError) as caught:  # the schema's words, not Hydra's
        composed(*mappings, "trainer.seed=x")
    assert "trainer.seed" in {problem.path for problem in caught.value.problems}


@pytest.mark.parametrize("override", ["data.train_files=", "data.train_files=[a,'']", "trainer.experiment_name=' '"])
def test_an_empty_text_is_refused(override):
    with pytest.raises(InvalidConfigError) as caught:
        composed(override)
    assert [problem.path for problem in caught.value.problems] == [override.split("=")[0]]


def test_a_system_prompt_may_be_empty():
    assert composed("data.system_prompt=").data.system_prompt == ""


@pytest.mark.parametrize(
    ("override", "code", "remedy"),
    [
        ("=3", "config.override-without-key", "key=value"),
        ("trainer.hf_export_dir='a", "config.malformed-override", """'key="value"'"""),
        ("trainer.hf_export_dir=a,b", "config.several-values", "'a,b'"),
        ("trainer.seed", "config.malformed-override", "key=value"),
        ("trainer.seed=[1", "config.malformed-override", "key=value"),
        ("actor_rollout_ref.actor.optim.lr=1e-5,1e-4", "config.several-values", "--multirun"),
    ],
)
def test_malformed_override(override, code, remedy):
    with raises(code, override, remedy):
        composed(override)


def test_unknown_config_name():
    with raises("config.no-config-file", "quickstrt", "quickstart?", "evaluate, generate, grpo, ppo"):
        composed(name="quickstrt")


def test_missing_config_dir():
    with pytest.raises(ConfigError) as caught:
        composed(config_dir="/nowhere")
    assert str(caught.value) == "--config-dir=/nowhere: no such folder [config.no-config-dir]"


def test_malformed_yaml_names_file_and_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("data:\n  train_files: [a\n", encoding="utf-8")
    with raises("config.cannot-compose", "mine", "line 2"):
        composed(name="mine", config_dir=str(tmp_path))


def test_missing_default_is_named(tmp_path):
    write(tmp_path, "mine", {"defaults": ["pppo", "_self_"]})
    with raises("config.cannot-compose", "pppo"):
        composed(name="mine", config_dir=str(tmp_path))


def test_sweep_composes_every_run():
    overrides = (*REQUIRED, "trainer.seed=1,2", "algorithm.lam=0.9,1.0")
    composed = compose_sweep(ConfigRequest(TrainConfig, "ppo", overrides)).runs
    runs = [(run.config.trainer.seed, run.config.algorithm.lam) for run in composed]
    assert runs == [(1, 0.9), (1, 1.0), (2, 0.9), (2, 1.0)]


def test_sweep_with_one_wrong_run_names_it():
    overrides = (*REQUIRED, "trainer.seed=1,x")
    with raises("config.wrong-type", f"run of the sweep with {' '.join((*REQUIRED, 'trainer.seed=x'))}:\n"):
        compose_sweep(ConfigRequest(TrainConfig, "ppo", overrides))


def test_printed_config_composes_to_itself(tmp_path):
    config = composed("actor_rollout_ref.actor.clip_ratio=0.3")
    (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert compose(ConfigRequest(TrainConfig, "again", config_dir=str(tmp_path))) == config


def test_origins_of_values():
    values: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": "model"}, "actor": {"optim": {"lr": 3e-6}}},
        "data": {"train_files": ["x"]},
        "trainer": {"experiment_name": "e", "n_gpus_per_node": 1, "seed": 5},
    }
    config = build(TrainConfig, values)
    changed = {item.key: item for item in changed_keys(config, values, ["++trainer.seed=5", "data.train_files=[x]"])}
    assert changed["trainer.seed"] == ChangedKey("trainer.seed", 5, 1, "command line")
    assert changed["data.train_files"].origin == "command line"
    assert changed["actor_rollout_ref.actor.optim.lr"].origin == "file"
    assert changed["data.seed"].origin == "derived" and changed["data.seed"].value == 5
    assert all(item.value != item.default for item in changed.values()) and "trainer.val_only" not in changed


def test_values_of_a_file_have_its_origin(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\ntrainer: {seed: 9}\n", encoding="utf-8")
    config = compose(ConfigRequest(TrainConfig, "mine", (), str(tmp_path)))
    file = {"algorithm": {"use_kl_in_reward": True}, "trainer": {"seed": 9}}
    changed = {item.key: item.origin for item in changed_keys(config, file, ["trainer.note"])}
    assert changed["algorithm.use_kl_in_reward"] == changed["trainer.seed"] == "file"
    assert changed["data.seed"] == "derived"


def test_sweep_without_multirun_is_refused():
    with raises("config.needs-multirun", "hydra.mode=MULTIRUN", "--multirun"):
        composed("hydra.mode=MULTIRUN")
