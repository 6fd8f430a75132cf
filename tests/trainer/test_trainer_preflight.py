"""Preflight errors, each with its key."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.arithmetic_task import RUN
from support.dotted_keys import set_keys
from support.expected_errors import raises

from megarl.base.packages import require_sglang
from megarl.config import GenerateConfig
from megarl.config.batch import plan_batches
from megarl.config.build import build
from megarl.config.keys import with_values
from megarl.trainer.jobs import early_checks
from megarl.trainer.jobs.early_checks import check_early
from megarl.trainer.jobs.preflight import check_schedules, check_train
from megarl.trainer.jobs.supervised_jobs import FineTuning
from megarl.trainer.roles import devices

POLICY = "actor_rollout_ref"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine of eight cores without GPU, cluster and logins, and with SGLang."""
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(devices, "local_node", lambda: {"CPU": 8.0, "GPU": 0.0})
    monkeypatch.setattr(early_checks, "require_sglang", lambda: None)


def check_all(config):
    """Check a configuration as the command line does."""
    check_early(config)
    check_train(config)


def test_the_quickstart_task_passes(
    train_config,
    sft_config,
    pair_config,
    evaluate_config,
):
    for config in (train_config(), sft_config(), pair_config(), evaluate_config()):
        check_early(config)
    check_train(train_config())
    FineTuning(sft_config()).check()


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        (
            {"trainer.default_local_dir": "/proc/x", "trainer.save_freq": 1},
            "disk.not-writable",
            "trainer.default_local_dir=/proc/x",
        ),
        ({"trainer.hf_export_dir": "/proc/x"}, "disk.not-writable", "trainer.hf_export_dir=/proc/x"),
        ({"trainer.rollout_data_dir": "/proc/x"}, "disk.not-writable", "trainer.rollout_data_dir=/proc/x"),
        ({"trainer.logger": ["console", "wandb"]}, "tracking.no-login", "trainer.logger='wandb'"),
        ({"trainer.device": "cuda"}, "ray.no-gpu", "trainer.device=cuda"),
        ({"trainer.n_gpus_per_node": 24}, "ray.too-few-cores", "trainer.n_gpus_per_node=24"),
        ({"data.max_response_length": 512}, "data.no-prompt-room", "data.max_response_length=512"),
        (
            {
                "data.max_response_length": 100,
                f"{POLICY}.rollout.name": "sglang",
                f"{POLICY}.rollout.engine_kwargs.sglang.server_args": {"max_total_tokens": 100},
            },
            "data.no-prompt-room",
            "max_total_tokens",
        ),
        ({f"{POLICY}.model.path": "/nowhere"}, "model.folder-missing", "/nowhere"),
        ({f"{POLICY}.actor.megatron.tensor_model_parallel_size": 3}, "layout.tp-heads", f"{POLICY}.actor.megatron"),
        ({f"{POLICY}.actor.megatron.pipeline_model_parallel_size": 3}, "layout.pp-layers", f"{POLICY}.actor.megatron"),
        ({"critic.megatron.pipeline_model_parallel_size": 3}, "layout.pp-layers", "critic.megatron"),
        ({"critic.model.path": "/nowhere"}, "model.folder-missing", "/nowhere"),
        (
            {f"{POLICY}.ref.megatron.tensor_model_parallel_size": 3, f"{POLICY}.actor.use_kl_loss": True},
            "layout.tp-heads",
            f"{POLICY}.ref.megatron",
        ),
        (
            {f"{POLICY}.rollout.name": "sglang", f"{POLICY}.rollout.tensor_model_parallel_size": 3},
            "layout.tp-heads",
            f"{POLICY}.rollout.tensor_model_parallel_size=3 ",
        ),
        ({"algorithm.adv_estimator": "/no.py:mine"}, "config.user-code-file", "algorithm.adv_estimator"),
        ({f"{POLICY}.actor.policy_loss.loss_mode": "no.such.loss"}, "config.user-code-import", "no.such"),
        ({"data.train_files": ["/no.parquet"]}, "data.file-missing", "data.train_files: /no.parquet"),
        ({"data.val_files": ["/no.parquet"]}, "data.file-missing", "data.val_files: /no.parquet"),
        ({"data.prompt_key": "question"}, "data.missing-column", "'question'"),
        ({"reward.custom_reward_function.path": "/no.py"}, "config.user-code-file", "/no.py"),
        ({"reward.model.enable": True, "reward.model.path": "/nowhere"}, "model.folder-missing", "/nowhere"),
    ],
)
def test_errors_have_code_and_key(train_config, changes, code, named):
    # A layout of 3 needs 3 devices, or the configuration itself is refused.
    devices = 3 if any("parallel_size" in name for name in changes) else 1
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": 24, "data.train_batch_size": 24}
    config = train_config({**sizes, "trainer.n_gpus_per_node": devices, **changes})
    with raises(code, named):
        check_all(config)


def test_missing_sglang_is_refused_for_every_job_that_generates(
    train_config,
    evaluate_config,
    monkeypatch,
):
    monkeypatch.setattr(early_checks, "require_sglang", require_sglang)
    monkeypatch.setitem(sys.modules, "sglang", None)
    for make in (train_config, evaluate_config):
        with raises("sglang.not-installed", "rollout.name=sglang"):
            check_early(make({f"{POLICY}.rollout.name": "sglang"}))
        check_early(make())


def test_generation_tracks_nothing_and_needs_no_login(arithmetic, tmp_path):
    keys = {"actor_rollout_ref.model.path": str(arithmetic / "model"), "data.prompts": ["1+1"], **RUN}
    config = build(GenerateConfig, set_keys({}, {**keys, "trainer.logger": ["wandb"]}), str(tmp_path))
    check_early(config)
    with raises("data.file-missing", "data.val_files: /no.parquet"):
        check_early(with_values(config, {"data.val_files": ["/no.parquet"]}))


def test_replicas_of_two_ranks_pass(train_config):
    sglang = {f"{POLICY}.rollout.name": "sglang", f"{POLICY}.rollout.tensor_model_parallel_size": 2}
    check_train(train_config({**sglang, "trainer.n_gpus_per_node": 2}))


@pytest.mark.parametrize(
    ("changes", "key", "code", "named"),
    [
        ({"lr_warmup_steps": 21}, "lr_warmup_steps", "algorithm.warmup-too-long", "schedule's 20"),
        ({"total_training_steps": 21}, "total_training_steps", "algorithm.schedule-too-long", "run's 20"),
        (
            {"lr_warmup_steps": 20, "lr_decay_style": "linear"},
            "lr_warmup_steps",
            "algorithm.no-decay-steps",
            "lr_decay_style=linear",
        ),
        (
            {"lr_warmup_steps_ratio": 1.0, "lr_decay_style": "cosine"},
            "lr_warmup_steps_ratio",
            "algorithm.no-decay-steps",
            "lr_decay_style=cosine",
        ),
        (
            {"lr_warmup_steps": 5, "lr_wsd_decay_steps": 16, "lr_decay_style": "wsd"},
            "lr_wsd_decay_steps",
            "algorithm.decay-too-long",
            "at most 15",
        ),
        (
            {"lr_warmup_steps_ratio": 0.5, "lr_wsd_decay_steps_ratio": 0.6, "lr_decay_style": "wsd"},
            "lr_wsd_decay_steps_ratio",
            "algorithm.decay-too-long",
            "at most 10",
        ),
    ],
)
def test_schedules_longer_than_the_run_are_errors(
    train_config,
    sft_config,
    changes,
    key,
    code,
    named,
):
    """Of actor (which waits while the critic warms up), critic and supervised job; each run is one of 20 updates."""
    halves = {"data.train_batch_size": 16, "trainer.critic_warmup": 2}
    cases = [
        (train_config(halves | with_prefix(f"{POLICY}.actor.optim", changes)), 12, f"{POLICY}.actor.optim"),
        (train_config(halves | with_prefix("critic.optim", changes)), 10, "critic.optim"),
        (sft_config(with_prefix("optim", changes)), 20, "optim"),
    ]
    for config, steps, path in cases:
        with raises(code, f"{path}.{key}=", named):
            check_schedules(config, plan_batches(config), steps)
        if "ratio" not in key:
            check_schedules(config, plan_batches(config), 10 * steps)


def test_unused_schedules_are_not_checked(train_config):
    warmup = {f"{POLICY}.actor.optim.lr_warmup_steps": 100, "critic.optim.lr_warmup_steps": 100}
    config = train_config({**warmup, "trainer.val_only": True})
    check_schedules(config, plan_batches(config), 1)
    config = train_config(
        {"critic.optim.lr_warmup_steps": 100, "algorithm.adv_estimator": "grpo", f"{POLICY}.rollout.n": 2}
    )
    check_schedules(config, plan_batches(config), 1)


def with_prefix(prefix, changes):
    return {f"{prefix}.{name}": value for name, value in changes.items()}


def test_the_export_cannot_replace_the_initial_model(train_config, sft_config):
    config = train_config()
    folder = f"{config.actor_rollout_ref.model.path}/../{Path(config.critic.model.path).name}"
    with raises("disk.export-replaces-model", f"trainer.hf_export_dir={folder}"):
        check_early(with_values(config, {"trainer.hf_export_dir": folder}))
    tuning = sft_config()
    tuning = with_values(tuning, {"trainer.hf_export_dir": tuning.model.path})
    with raises("disk.export-replaces-model", f"trainer.hf_export_dir={tuning.model.path}"):
        check_early(tuning)


def test_an_unused_critic_is_not_checked(train_config):
    check_all(
        train_config(
            {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "critic.model.path": "/nowhere"}
        )
    )


def test_a_missing_shard(train_config, arithmetic, tmp_path):
    shutil.copytree(arithmetic / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with raises("model.no-weights", "model.safetensors"):
        check_early(train_config({f"{POLICY}.model.path": str(tmp_path / "model")}))


def test_tensors_that_nothing_loads_are_named_before_the_start(train_config, arithmetic, tmp_path, caplog):
    folder = shutil.copytree(arithmetic / "model", tmp_path / "model")
    check_early(train_config({f"{POLICY}.model.path": str(folder)}))
    assert not caplog.messages
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.up_proj.bias": torch.ones(4)}, folder / "model.safetensors")
    check_early(train_config({f"{POLICY}.model.path": str(folder)}))
    (message,) = caplog.messages
    assert str(folder) in message and "model.layers.0.mlp.up_proj.bias" in message


def test_a_filter_with_log_probs_over_the_whole_vocabulary_is_named(train_config, caplog):
    key = "actor_rollout_ref.rollout.support.enable"
    for changes, named in ({"top_p": 0.8}, 1), ({"top_k": 9, "support.enable": True}, 0), ({}, 0):
        caplog.clear()
        check_early(train_config({f"actor_rollout_ref.rollout.{name}": value for name, value in changes.items()}))
        assert sum(key in record.getMessage() for record in caplog.records) == named


@pytest.mark.parametrize(("response", "code"), [(7, "data.column-type"), (None, "data.missing-column")])
def test_sft_responses_must_be_text(sft_config, arithmetic, tmp_path, response, code):
    rows = pq.read_table(arithmetic / "data" / "sft.parquet").to_pylist()
    changed = [{**row, "response": response} for row in rows] if response else [row | {"answer": "1"} for row in rows]
    if response is None:
        for row in changed:
            del row["response"]
    pq.write_table(pa.Table.from_pylist(changed), tmp_path / "sft.parquet")
    with raises(code, "data.train_files: ", "'response'"):
        check_early(sft_config({"data.train_files": [str(tmp_path / "sft.parquet")]}))


def test_a_language_model_is_not_a_reward_model(train_config, arithmetic):
    config = train_config({"reward.model.enable": True, "reward.model.path": str(arithmetic / "model")})
    with raises("reward.no-scalar-head", f"reward.model.path={arithmetic / 'model'}"):
        check_early(config)


def test_a_teacher_needs_the_policys_vocabulary(train_config, arithmetic, tmp_path):
    """Two digits exchange their ids in the teacher's tokenizer; its vocabulary has the same tokens and size."""
    teacher = tmp_path / "teacher"
    shutil.copytree(arithmetic / "model", teacher)
    keys = {
        "distillation.enabled": True,
        "distillation.teacher_models.big.model_path": str(teacher),
        "distillation.distillation_loss.use_policy_gradient": True,
    }
    check_train(train_config(keys))
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = three, seven = vocabulary["7"], vocabulary["3"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with raises("teacher.other-vocabulary") as error:
        check_train(train_config(keys))
    policy = train_config(keys).actor_rollout_ref.model.tokenizer_path
    assert str(error.value) == (
        f"distillation.teacher_models.big.model_path={teacher}: its tokenizer differs from that of the policy "
        f"({policy}) in 2 tokens; '3' has id {three} there and {seven} here. A teacher needs the policy's vocabulary "
        "[teacher.other-vocabulary]"
    )
