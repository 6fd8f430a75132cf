"""Bad input is refused before any process starts; the message names the key, the value and the remedy.

Most runs call the entry point of the command in this process, to avoid a Python start each; a few use a real command
line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from arithmetic_task import make_task
from cli_runs import CliRun
from safetensors.torch import load_file, save_file

from megarl import cli

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
FEWER_DEVICES = ["trainer.n_gpus_per_node=1"]

Refuse = Callable[..., str]


@pytest.fixture
def refuse(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refuse:
    """``refuse(*arguments, code=)``: message of a run that exits with the code before Ray starts."""

    def no_ray(*arguments: Any, **options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", no_ray)

    def run(*arguments: str, code: int) -> str:
        try:
            exit_code = cli.run_job("train", ["--config-name", "quickstart", *small, *arguments])
        except SystemExit as stop:  # Hydra reports an unexpected exception this way
            exit_code = stop.code
        printed = capsys.readouterr()
        assert exit_code == code, printed.err
        assert "Traceback" not in printed.err
        return printed.err

    return run


@pytest.fixture
def rows(task: Path) -> list[dict[str, Any]]:
    return pq.read_table(task / "data" / "train.parquet").to_pylist()


@pytest.fixture
def model(task: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test can damage."""
    return Path(shutil.copytree(task / "model", tmp_path / "model"))


def write(rows: list[dict[str, Any]], path: Path, schema: pa.Schema | None = None) -> str:
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return f"data.train_files={path}"


def change_config(model: Path, **changes: Any) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return f"actor_rollout_ref.model.path={model}"


def assert_contains(message: str, *parts: str) -> None:
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in:\n{message}"


# Data


def test_missing_data_file(refuse: Refuse) -> None:
    message = refuse("data.train_files=nowhere/train.parquet", code=2)
    assert_contains(message, "data.train_files", "nowhere/train.parquet", "no such file")


def test_invalid_parquet_file(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("prompt,answer\n", encoding="utf-8")
    message = refuse(f"data.val_files={tmp_path}/train.parquet", code=2)
    assert_contains(message, "data.val_files", "train.parquet", "not a readable parquet file")


def test_missing_column(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    renamed = [{("reward" if name == "reward_model" else name): row[name] for name in row} for row in rows]
    message = refuse(write(renamed, tmp_path / "train.parquet"), code=2)
    assert_contains(message, "data.train_files", "train.parquet", "no column 'reward_model'", "did you mean 'reward'")


def test_prompt_that_is_a_number(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    numbers = [{**row, "prompt": 3} for row in rows]
    message = refuse(write(numbers, tmp_path / "train.parquet"), code=2)
    assert_contains(message, "data.train_files", "column 'prompt'", "a text, or a list of chat messages", "it is int64")


def test_null_ground_truth(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows[17]["reward_model"]["ground_truth"] = None
    message = refuse(write(rows, tmp_path / "train.parquet"), code=2)
    assert_contains(message, "train.parquet", "column 'reward_model', row 17", "'ground_truth' null")


def test_unknown_agent_name_in_a_row(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    named = [{**row, "agent_name": "tool_agnt" if number >= 17 else None} for number, row in enumerate(rows)]
    message = refuse(write(named, tmp_path / "train.parquet"), code=2)
    assert_contains(
        message, "train.parquet, row 17", "agent_name='tool_agnt'", "known ones: external_agent,", "tool_agent;"
    )
    missing = "actor_rollout_ref.rollout.agent.external_agent=nowhere.py:lead"
    assert_contains(refuse(missing, code=2), "agent 'nowhere.py:lead'", "there is no file nowhere.py")


def test_empty_dataset(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    schema = pa.Table.from_pylist(rows).schema
    message = refuse(write([], tmp_path / "train.parquet", schema), code=2)
    assert_contains(message, "data.train_files", "there is no row", "train.parquet")


def test_fewer_prompts_than_one_batch(refuse: Refuse, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    message = refuse(write(rows[:23], tmp_path / "train.parquet"), code=2)
    assert_contains(message, "data.train_batch_size", "24", "23")


def test_overlong_prompt(refuse: Refuse) -> None:
    message = refuse("data.max_prompt_length=8", code=2)
    assert_contains(message, "row 0", "has 11 tokens", "at most 8", "data.max_prompt_length", "data.truncation=left")


def test_all_prompts_overlong(refuse: Refuse) -> None:
    message = refuse("data.max_prompt_length=8", "data.filter_overlong_prompts=true", code=2)
    assert_contains(message, "all 80 prompts", "longer than 8", "data.max_prompt_length")


# Models


def test_missing_model_folder(refuse: Refuse) -> None:
    message = refuse("actor_rollout_ref.model.path=nowhere/model", code=2)
    assert_contains(message, "nowhere/model")


def test_model_folder_without_config(refuse: Refuse, model: Path) -> None:
    (model / "config.json").unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_contains(message, str(model), "config.json")


def test_architecture_without_weight_map(refuse: Refuse, model: Path) -> None:
    message = refuse(change_config(model, architectures=["MambaForCausalLM"]), code=2)
    assert_contains(message, "MambaForCausalLM", "families with one:", "llama", "qwen2", "qwen3_moe")


def test_missing_safetensors_shard(refuse: Refuse, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model-00001-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_contains(message, str(model), "lacks shard 'model-00002-of-00002.safetensors'")


def test_truncated_weights(refuse: Refuse, model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-100])
    message = refuse(f"critic.model.path={model}", code=2)
    assert_contains(message, str(model / "model.safetensors"), "truncated", str(len(content)))


def test_tokenizer_without_chat_template(refuse: Refuse, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_contains(message, str(model), "chat_template", "tokenizer_config.json")


@pytest.mark.parametrize("removed", [("tokenizer.json",), ("tokenizer.json", "tokenizer_config.json")])
def test_model_without_tokenizer_files(refuse: Refuse, model: Path, removed: tuple[str, ...]) -> None:
    """transformers builds an empty tokenizer for it, with which every prompt would be empty."""
    for name in removed:
        (model / name).unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_contains(message, str(model), "no vocabulary", "tokenizer.json", "tokenizer_path")


# Layouts and batches


@pytest.mark.parametrize(
    ("changes", "arguments", "parts"),
    [
        ({}, [f"{ACTOR}.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3"], ("=3", "heads", "1, 2")),
        (
            {"num_key_value_heads": 1},
            [f"{ACTOR}.tensor_model_parallel_size=2"],
            ("=2", "num_key_value_heads=1"),
        ),
        (
            {},
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.pipeline_model_parallel_size=4"],
            ("=4", "num_hidden_layers=2"),
        ),
    ],
    ids=["heads", "key-value heads", "layers"],
)
def test_layout_does_not_fit_the_model(
    changes: dict[str, Any], arguments: list[str], parts: tuple[str, ...], refuse: Refuse, model: Path
) -> None:
    if "pipeline" in arguments[-1]:
        arguments = [*arguments, f"{ACTOR}.tensor_model_parallel_size=1"]
    critic = [f"{CRITIC}.pipeline_model_parallel_size=1", f"{CRITIC}.data_parallel_size=1"]
    message = refuse(change_config(model, **changes), *critic, *arguments, code=2)
    key = next(argument for argument in arguments if argument.startswith(ACTOR)).partition("=")[0]
    assert_contains(message, key, *parts)


def test_layout_does_not_divide_the_devices(refuse: Refuse) -> None:
    message = refuse("trainer.n_gpus_per_node=3", code=2)
    assert_contains(message, f"{ACTOR}.tensor_model_parallel_size=2", "do not divide", "trainer.n_gpus_per_node=3")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            ("data.train_batch_size=24", "mini-batches of 16", "nearest that do: 16 and 32"),
        ),
        (
            [f"{ACTOR}.tensor_model_parallel_size=1", "data.train_batch_size=9", "actor_rollout_ref.rollout.n=1"],
            ("data.train_batch_size=9", "2 data-parallel ranks", "nearest that do: 8 and 10"),
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5"],
            ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5", "24 samples", "4 and 6"),
        ),
        (
            ["critic.ppo_max_token_len_per_gpu=37"],
            ("critic.ppo_max_token_len_per_gpu=37", "longest sample", "38 tokens"),
        ),
    ],
    ids=["mini-batch", "data parallel", "micro-batch", "token budget"],
)
def test_batch_sizes_do_not_divide(arguments: list[str], parts: tuple[str, ...], refuse: Refuse) -> None:
    assert_contains(refuse(*arguments, code=2), *parts)


def test_embedded_engine_has_no_tensor_parallelism(refuse: Refuse) -> None:
    message = refuse("actor_rollout_ref.rollout.tensor_model_parallel_size=2", code=2)
    assert_contains(message, "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "embedded", "1")


# Keys, rewards


def test_all_wrong_keys_are_reported_together(refuse: Refuse) -> None:
    message = refuse("trainer.total_training_step=3", "critic.optim.lr=fast", "algorithm.adv_estimator=ppo", code=2)
    assert_contains(message, "trainer.total_training_step=3", "did you mean trainer.total_training_steps?")
    assert_contains(message, "critic.optim.lr=fast", "number", "algorithm.adv_estimator=ppo", "gae, grpo")


@pytest.mark.parametrize(
    ("content", "name", "parts"),
    [
        (None, "score", ("there is no file",)),
        ("import missing_package", "score", ("ModuleNotFoundError", "missing_package")),
        ("def compute_score(solution_str): return 1.0", "compute_score", ("data_source", "ground_truth")),
        ("def reward(**columns): return 1.0", "score", ("no 'score'", "reward")),
    ],
    ids=["no file", "import fails", "signature", "no function"],
)
def test_reward_function_import_fails(
    content: str | None, name: str, parts: tuple[str, ...], refuse: Refuse, tmp_path: Path
) -> None:
    path = tmp_path / "judge.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    message = refuse(f"custom_reward_function.path={path}", f"custom_reward_function.name={name}", code=2)
    assert_contains(message, str(path), *parts)


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(small: list[str], start: Callable[..., CliRun]) -> Path:
    """A checkpoint of one step without a critic, saved by a run that reached its time limit."""
    run = start(*GRPO_ALONE, *small, "trainer.max_wall_seconds=1", "trainer.hf_export_dir=too_late")
    assert run.wait() == 0, run.output
    folder = run.folder / "outputs" / "quickstart" / "checkpoints" / "global_step_1"
    line = " ".join(run.output.split())  # the terminal wraps
    assert_contains(line, "Ended after step 1 of 5 (trainer.max_wall_seconds=1: 0 s are left")
    assert_contains(line.replace(" ", ""), f"savedin{folder}.Togoon:python")
    assert_contains(line, "trainer.resume_mode=auto or from elsewhere: the same command with")
    assert not (run.folder / "too_late").exists()
    return folder


GRPO_ALONE = [
    *("--config-name", "quickstart_grpo", *FEWER_DEVICES, f"{ACTOR}.tensor_model_parallel_size=1"),
    *("actor_rollout_ref.actor.use_kl_loss=false", "trainer.val_before_train=false", "trainer.test_freq=-1"),
]


def resume_from(checkpoint: Path) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_checkpoint_of_another_model(refuse: Refuse, checkpoint: Path, task: Path, tmp_path: Path) -> None:
    other = make_task(tmp_path / "other", "--hidden", "48", "--layers", "3", "--lessons", "1", "1", "--pairs", "1", "1")
    path = f"actor_rollout_ref.model.path={other}/model"
    message = refuse(*GRPO_ALONE, *resume_from(checkpoint), path, code=1)
    assert_contains(message, "checkpoint is of another model", "hidden_size: 32 in the checkpoint, 48 in this run")
    assert_contains(message, "num_layers: 2 in the checkpoint, 3 in this run")


def test_truncated_checkpoint_file(refuse: Refuse, checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "global_step_1"))
    largest = largest_file(copy / "actor")
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-1])
    message = refuse(*GRPO_ALONE, *resume_from(copy), code=1)
    assert_contains(message, str(copy), "corrupt", f"{largest.name} has {size - 1} bytes, {size} were saved")


def test_checkpoint_with_a_flipped_bit(refuse: Refuse, checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "global_step_1"))
    largest = largest_file(copy / "actor")
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    message = refuse(*GRPO_ALONE, *resume_from(copy), code=1)
    assert_contains(message, str(copy), largest.name, "content differs from its checksum")


def test_missing_checkpoint(refuse: Refuse) -> None:
    message = refuse(*resume_from(Path("nowhere/global_step_3")), code=1)
    assert_contains(message, "nowhere/global_step_3", "does not exist")


def test_resume_mode_must_without_a_checkpoint(refuse: Refuse) -> None:
    message = refuse("trainer.resume_mode=must", code=1)
    assert_contains(message, "trainer.resume_mode=must, but there is no checkpoint in", "trainer.default_local_dir")


def test_checkpoint_without_a_critic(refuse: Refuse, checkpoint: Path) -> None:
    message = refuse(*resume_from(checkpoint), code=1)
    assert_contains(message, str(checkpoint), "holds no critic")


def test_invalid_slurm_end_time(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    assert_contains(refuse(code=2), "SLURM_JOB_END_TIME='tomorrow' is not a UNIX time")


def test_checkpoint_of_another_dataset(
    refuse: Refuse, checkpoint: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    message = refuse(*GRPO_ALONE, *resume_from(checkpoint), write(rows[:50], tmp_path / "train.parquet"), code=2)
    assert_contains(message, "80", "50", "trainer.resume_mode=disable")


# Machine


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trainer.device=cuda"], ("trainer.device=cuda", "0 GPUs", "driver", "trainer.device=cpu")),
        (["trainer.logger=[console,wandb]"], ("trainer.logger='wandb'", "no login", "wandb login", "WANDB_MODE")),
        (
            ["trainer.save_freq=1", "trainer.default_local_dir=/proc/checkpoints"],
            ("trainer.default_local_dir=/proc/checkpoints", "cannot be written to"),
        ),
        (["hydra.run.dir=/proc/run"], ("the folder of the run, /proc/run", "hydra.run.dir")),
        (["trainer.ray_dashboard=true"], ("trainer.ray_dashboard=true", "ray[default]")),
    ],
    ids=["no GPU", "no login", "checkpoint folder", "run folder", "dashboard"],
)
def test_machine_that_cannot_run_the_job(
    arguments: list[str], parts: tuple[str, ...], refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("megarl.trainer.jobs.devices.local_node", lambda: {"CPU": 2.0, "GPU": 0.0})
    monkeypatch.setattr("megarl.trainer.jobs.devices.dashboard_error", lambda: "No module named 'aiohttp_cors'")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert_contains(refuse(*arguments, code=2), *parts)


def test_machine_without_sglang(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    message = refuse("actor_rollout_ref.rollout.name=sglang", code=2)
    assert_contains(message, "actor_rollout_ref.rollout.name=sglang", "package sglang", "embedded")


def test_dead_cluster(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert_contains(refuse(code=1), "no Ray cluster answers at 127.0.0.1:1", "tried for 3 s", "unset RAY_ADDRESS")


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("data.train_files=nowhere.parquet", "nowhere.parquet: there is no such file"),
        ("data.train_files=broken.jsonl", "broken.jsonl, line 2: is not JSON"),
        ("actor_rollout_ref.model.path=nowhere", "model folder nowhere does not exist"),
        ("trainer.device=cuda", "this machine has 0 GPUs"),
        ("trainer.save_freq=1", "cannot be written to"),
    ],
)
def test_cheap_checks_precede_expensive_imports(argument: str, part: str, small: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(
        json.dumps({"prompt": "1+1", "data_source": "a"}) + '\n{"prompt": [\n', encoding="utf-8"
    )
    arguments = ["train", "--config-name", "quickstart", *small, argument, "trainer.default_local_dir=/proc/x"]
    code = (
        "import sys\n"
        "from megarl import cli\n"
        f"code = cli.main({arguments!r})\n"
        "imported = {'torch', 'transformers', 'megatron', 'wandb'} & set(sys.modules)\n"
        "assert code == 2 and not imported, (code, imported)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and part in result.stderr, result.stderr
    # A folder is locked even before the first line.
    assert result.stdout in ("", "train quickstart: check files, devices and logins ...\n")


# Real command lines


@pytest.mark.parametrize(
    ("argument", "code", "part"),
    [
        ("trainer.total_training_step=3", 2, "did you mean trainer.total_training_steps?"),
        ("data.train_files=nowhere.parquet", 2, "nowhere.parquet: there is no such file"),
    ],
)
def test_message_and_exit_code_of_a_real_command_line(
    argument: str, code: int, part: str, small: list[str], start: Callable[..., CliRun]
) -> None:
    run = start("--config-name", "quickstart", *small, argument)
    assert run.wait() == code
    assert part in run.output and "Traceback" not in run.output
    assert run.remaining() == []
