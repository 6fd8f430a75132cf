"""Bad input is refused before any process starts; the message names the key, the value and the remedy.

Most runs call the entry point of the command in this process, to avoid a Python start each; a few use a real command
line.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from safetensors.torch import load_file, save_file
from support.arithmetic_task import make_task
from support.squares_task import make_squares_task
from support.vision_models import png

from megarl import cli

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
FEWER_DEVICES = ["trainer.n_gpus_per_node=1"]

Refuse = Callable[..., str]


@pytest.fixture
def refuse(small, tmp_path, monkeypatch, capsys):
    """``refuse(*arguments, code=)``: message of a run that exits with the code before Ray starts."""

    def no_ray(*arguments, **options):
        raise AssertionError("Ray was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", no_ray)

    def run(*arguments, code, config="quickstart"):
        common = small if config == "quickstart" else ()
        exit_code = cli.run_job("train", ["--config-name", config, *common, *arguments])
        printed = capsys.readouterr()
        assert exit_code == code, printed.err
        assert "Traceback" not in printed.err
        return printed.err

    return run


@pytest.fixture
def rows(task):
    return pq.read_table(task / "data" / "train.parquet").to_pylist()


@pytest.fixture
def model(task, tmp_path):
    """A copy of the model that a test can damage."""
    return Path(shutil.copytree(task / "model", tmp_path / "model"))


def write(rows, path, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return f"data.train_files={path}"


def change_config(model, **changes):
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return f"actor_rollout_ref.model.path={model}"


def assert_contains(message, *parts):
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in:\n{message}"


def assert_error(message, code, *values):
    """The message ends with the code, and names the values."""
    assert_contains(message, f"[{code}]", *map(str, values))


# Data


def test_missing_data_file(refuse):
    assert refuse("data.train_files=nowhere/train.parquet", code=2) == (
        "data.train_files: nowhere/train.parquet: there is no such file; name a parquet or JSONL file "
        "[data.file-missing]\n"
    )


def test_invalid_parquet_file(refuse, tmp_path):
    (tmp_path / "train.parquet").write_text("prompt,answer\n", encoding="utf-8")
    message = refuse(f"data.val_files={tmp_path}/train.parquet", code=2)
    assert_error(message, "data.unreadable-file", "data.val_files", "train.parquet")


def test_missing_column(refuse, rows, tmp_path):
    renamed = [{("reward" if name == "reward_model" else name): row[name] for name in row} for row in rows]
    message = refuse(write(renamed, tmp_path / "train.parquet"), code=2)
    assert_error(message, "data.missing-column", "data.train_files", "train.parquet", "'reward_model'", "'reward'?")


def test_prompt_that_is_a_number(refuse, rows, tmp_path):
    numbers = [{**row, "prompt": 3} for row in rows]
    message = refuse(write(numbers, tmp_path / "train.parquet"), code=2)
    assert_error(message, "data.column-type", "data.train_files", "column 'prompt'", "int64")


def test_null_ground_truth(refuse, rows, tmp_path):
    rows[17]["reward_model"]["ground_truth"] = None
    message = refuse(write(rows, tmp_path / "train.parquet"), code=2)
    assert_error(message, "data.null-value", "train.parquet", "column 'reward_model', row 17", "'ground_truth'")


def test_unknown_agent_name_in_a_row(refuse, rows, tmp_path):
    named = [{**row, "agent_name": "tool_agnt" if number >= 17 else None} for number, row in enumerate(rows)]
    message = refuse(write(named, tmp_path / "train.parquet"), code=2)
    assert_error(message, "config.unknown-name", "train.parquet, row 17", "agent_name='tool_agnt'", "tool_agent")
    missing = "actor_rollout_ref.rollout.agent.external_agent=nowhere.py:lead"
    assert_error(refuse(missing, code=2), "config.user-code-file", "agent 'nowhere.py:lead'")


def test_empty_dataset(refuse, rows, tmp_path):
    schema = pa.Table.from_pylist(rows).schema
    message = refuse(write([], tmp_path / "train.parquet", schema), code=2)
    assert_error(message, "data.no-rows", "data.train_files", "train.parquet")


def test_fewer_prompts_than_one_batch(refuse, rows, tmp_path):
    message = refuse(write(rows[:23], tmp_path / "train.parquet"), code=2)
    assert_error(message, "data.too-few-rows", "data.train_batch_size", 24, 23)


def test_overlong_prompt(refuse):
    message = refuse("data.max_prompt_length=8", code=2)
    assert_error(message, "data.prompt-too-long", "row 0", 11, 8, "data.max_prompt_length", "data.truncation=left")


def test_all_prompts_overlong(refuse):
    message = refuse("data.max_prompt_length=8", "data.filter_overlong_prompts=true", code=2)
    assert_error(message, "data.all-prompts-too-long", 80, 8, "data.max_prompt_length")


# Images


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"))


@pytest.fixture
def refuse_images(refuse, squares, tmp_path):
    """``refuse_images(*arguments, **changes)``: message of a run whose row 5 has other columns."""

    def run(*arguments, **changes):
        rows = pq.read_table(squares / "data" / "train.parquet").to_pylist()
        rows = [{**row, "images": [{"bytes": None, "path": None} | image for image in row["images"]]} for row in rows]
        rows[5] |= changes
        files = (write(rows, tmp_path / "train.parquet"), f"data.val_files={squares}/data/test.parquet")
        keys = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
        model = f"actor_rollout_ref.model.path={squares}/model"
        return refuse(*files, *keys, model, *arguments, code=2, config="vision")

    return run


SEEN = {"bytes": png(56, 56)}


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"images": [{"path": "lost.png"}]}, "image.missing", ("column 'images', image 0", "lost.png")),
        ({"images": [{"bytes": SEEN["bytes"][:-2000]}]}, "image.damaged", ("column 'images', image 0",)),
        ({"images": []}, "image.placeholder-count", ("1 placeholders", "column 'images'", "0 images")),
        ({"images": [SEEN] * 2}, "image.placeholder-count", ("1 placeholders", "column 'images'", "2 images")),
    ],
)
def test_bad_images(refuse_images, changes, code, named):
    assert_error(refuse_images(**changes), code, "train.parquet, row 5", *named)


def test_images_for_a_model_of_text(refuse_images, task):
    model = (f"actor_rollout_ref.model.path={task}/model", "actor_rollout_ref.actor.freeze_vision_tower=false")
    message = refuse_images(*model)
    assert_error(message, "data.media-column", "data.train_files", "train.parquet", "column 'images', row 0")


# Models


def test_missing_model_folder(refuse):
    message = refuse("actor_rollout_ref.model.path=./nowhere/model", code=2)
    assert_error(message, "model.folder-missing", "nowhere/model")


def test_model_folder_without_config(refuse, model):
    (model / "config.json").unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_error(message, "model.no-config-json", model, "config.json")


def test_architecture_without_weight_map(refuse, model):
    message = refuse(change_config(model, architectures=["MambaForCausalLM"]), code=2)
    assert_error(message, "model.no-weight-map", "MambaForCausalLM", "llama", "qwen2", "qwen3_moe")


def test_missing_safetensors_shard(refuse, model):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model-00001-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_error(message, "model.missing-shard", model, "model-00002-of-00002.safetensors")


def test_truncated_weights(refuse, model):
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-100])
    message = refuse(f"critic.model.path={model}", code=2)
    assert_error(message, "model.truncated-file", model / "model.safetensors", len(content))


def test_tokenizer_without_chat_template(refuse, model):
    (model / "chat_template.jinja").unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_error(message, "tokenizer.no-chat-template", model, "chat_template", "tokenizer_config.json")


@pytest.mark.parametrize("removed", [("tokenizer.json",), ("tokenizer.json", "tokenizer_config.json")])
def test_model_without_tokenizer_files(refuse, model, removed):
    """transformers builds an empty tokenizer for it, with which every prompt would be empty."""
    for name in removed:
        (model / name).unlink()
    message = refuse(f"actor_rollout_ref.model.path={model}", code=2)
    assert_error(message, "tokenizer.no-vocabulary", model, "tokenizer.json", "tokenizer_path")


# Layouts and batches


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        (
            {},
            [f"{ACTOR}.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3"],
            ("layout.tp-heads", "=3", "1, 2"),
        ),
        (
            {"num_key_value_heads": 1},
            [f"{ACTOR}.tensor_model_parallel_size=2"],
            ("layout.tp-heads", "=2", "num_key_value_heads=1"),
        ),
        (
            {},
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.pipeline_model_parallel_size=4"],
            ("layout.pp-layers", "=4", "num_hidden_layers=2"),
        ),
    ],
    ids=["heads", "key-value heads", "layers"],
)
def test_layout_does_not_fit_the_model(changes, arguments, expected, refuse, model):
    if "pipeline" in arguments[-1]:
        arguments = [*arguments, f"{ACTOR}.tensor_model_parallel_size=1"]
    critic = [f"{CRITIC}.pipeline_model_parallel_size=1", f"{CRITIC}.data_parallel_size=1"]
    message = refuse(change_config(model, **changes), *critic, *arguments, code=2)
    key = next(argument for argument in arguments if argument.startswith(ACTOR)).partition("=")[0]
    assert_error(message, *expected, key)


def test_layout_does_not_divide_the_devices(refuse):
    message = refuse("trainer.n_gpus_per_node=3", code=2)
    key = f"{ACTOR}.tensor_model_parallel_size=2"
    assert_error(message, "layout.replicas-do-not-divide", key, "trainer.n_gpus_per_node=3")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            ("batch.mini-batch-size", "data.train_batch_size=24", "16 and 32"),
        ),
        (
            [f"{ACTOR}.tensor_model_parallel_size=1", "data.train_batch_size=9", "actor_rollout_ref.rollout.n=1"],
            ("batch.samples-per-rank", "data.train_batch_size=9", "2 data-parallel ranks", "8 and 10"),
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.micro_batch_size_per_gpu=5"],
            ("batch.micro-batch-division", "actor_rollout_ref.actor.micro_batch_size_per_gpu=5", "24", "4 and 6"),
        ),
        (
            ["critic.max_token_len_per_gpu=37"],
            ("batch.token-budget", "critic.max_token_len_per_gpu=37", "38 tokens"),
        ),
    ],
    ids=["mini-batch", "data parallel", "micro-batch", "token budget"],
)
def test_batch_sizes_do_not_divide(arguments, expected, refuse):
    assert_error(refuse(*arguments, code=2), *expected)


def test_embedded_engine_has_no_tensor_parallelism(refuse):
    message = refuse("actor_rollout_ref.rollout.tensor_model_parallel_size=2", code=2)
    assert_error(message, "engine.one-device", "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "embedded")


# Keys, rewards


def test_all_wrong_keys_are_reported_together(refuse):
    message = refuse("trainer.total_training_step=3", "critic.optim.lr=fast", "algorithm.adv_estimator=ppo", code=2)
    assert_error(message, "config.unknown-key", "trainer.total_training_step=3", "trainer.total_training_steps?")
    assert_error(message, "config.wrong-type", "critic.optim.lr=fast")
    assert_error(message, "config.value-out-of-limits", "algorithm.adv_estimator=ppo", "gae, grpo")


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (None, "score", ("config.user-code-file",)),
        ("import missing_package", "score", ("config.user-code-import", "ModuleNotFoundError", "missing_package")),
        (
            "def compute_score(solution_str): return 1.0",
            "compute_score",
            ("reward.wrong-signature", "data_source", "ground_truth"),
        ),
        ("def reward(**columns): return 1.0", "score", ("config.user-code-function", "'score'", "reward")),
    ],
    ids=["no file", "import fails", "signature", "no function"],
)
def test_reward_function_import_fails(content, name, expected, refuse, tmp_path):
    path = tmp_path / "judge.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    message = refuse(f"reward.custom_reward_function.path={path}", f"reward.custom_reward_function.name={name}", code=2)
    assert_error(message, *expected, path)


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(small, start):
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


def resume_from(checkpoint):
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_checkpoint_of_another_model(refuse, checkpoint, task, tmp_path):
    other = make_task(tmp_path / "other", "--hidden", "48", "--layers", "3", "--lessons", "1", "1", "--pairs", "1", "1")
    path = f"actor_rollout_ref.model.path={other}/model"
    message = refuse(*GRPO_ALONE, *resume_from(checkpoint), path, code=1)
    assert_error(message, "resume.other-model", "hidden_size: 32 in the checkpoint, 48 in this run")
    assert_contains(message, "num_layers: 2 in the checkpoint, 3 in this run")


def test_truncated_checkpoint_file(refuse, checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "global_step_1"))
    largest = largest_file(copy / "actor")
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-1])
    message = refuse(*GRPO_ALONE, *resume_from(copy), code=1)
    assert_error(message, "checkpoint.corrupt-file", copy, largest.name, f"{size - 1} bytes", size)


def test_checkpoint_with_a_flipped_bit(refuse, checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "global_step_1"))
    largest = largest_file(copy / "actor")
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    message = refuse(*GRPO_ALONE, *resume_from(copy), code=1)
    assert_error(message, "checkpoint.corrupt-file", copy, largest.name, "checksum")


def test_missing_checkpoint(refuse):
    message = refuse(*resume_from(Path("nowhere/global_step_3")), code=1)
    assert_error(message, "checkpoint.no-folder", "nowhere/global_step_3")


def test_resume_mode_must_without_a_checkpoint(refuse):
    message = refuse("trainer.resume_mode=must", code=1)
    assert_error(message, "resume.no-checkpoint", "trainer.resume_mode=must", "trainer.default_local_dir")


def test_checkpoint_without_a_critic(refuse, checkpoint):
    message = refuse(*resume_from(checkpoint), code=1)
    assert_error(message, "checkpoint.missing-role", checkpoint, "critic")


def test_invalid_slurm_end_time(refuse, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    assert_error(refuse(code=2), "launch.job-end-time", "SLURM_JOB_END_TIME='tomorrow'")


def test_checkpoint_of_another_dataset(refuse, checkpoint, rows, tmp_path):
    message = refuse(*GRPO_ALONE, *resume_from(checkpoint), write(rows[:50], tmp_path / "train.parquet"), code=2)
    assert_error(message, "resume.data-changed", 80, 50, "trainer.resume_mode=disable")


# Machine


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.device=cuda"], ("ray.no-gpu", "trainer.device=cuda", "0 GPUs", "driver", "trainer.device=cpu")),
        (
            ["trainer.logger=[console,wandb]"],
            ("tracking.no-login", "trainer.logger='wandb'", "wandb login", "WANDB_MODE"),
        ),
        (
            ["trainer.save_freq=1", "trainer.default_local_dir=/proc/checkpoints"],
            ("disk.not-writable", "trainer.default_local_dir=/proc/checkpoints"),
        ),
        (["hydra.run.dir=/proc/run"], ("disk.not-writable", "/proc/run", "hydra.run.dir")),
        (["trainer.ray_dashboard=true"], ("ray.no-dashboard", "trainer.ray_dashboard=true", "ray[default]")),
    ],
    ids=["no GPU", "no login", "checkpoint folder", "run folder", "dashboard"],
)
def test_machine_that_cannot_run_the_job(arguments, expected, refuse, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("megarl.trainer.roles.devices.local_node", lambda: {"CPU": 2.0, "GPU": 0.0})
    monkeypatch.setattr("megarl.trainer.roles.devices.dashboard_error", lambda: "No module named 'aiohttp_cors'")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert_error(refuse(*arguments, code=2), *expected)


def test_machine_without_sglang(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    message = refuse("actor_rollout_ref.rollout.name=sglang", code=2)
    assert_error(message, "sglang.not-installed", "actor_rollout_ref.rollout.name=sglang", "embedded")


def test_dead_cluster(refuse, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert_error(refuse(code=1), "ray.no-cluster", "127.0.0.1:1", "3 s", "RAY_ADDRESS")


CHEAP = {
    "data.train_files=nowhere.parquet": "data.file-missing",
    "data.train_files=broken.jsonl": "data.not-json",
    "actor_rollout_ref.model.path=nowhere": "model.folder-missing",
    "trainer.device=cuda": "ray.no-gpu",
    "trainer.save_freq=1": "disk.not-writable",
}
IN_TURN = """
import contextlib, io, json, sys
from megarl import cli
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    imported = sorted({"torch", "transformers", "megatron", "wandb"} & set(sys.modules))
    print(json.dumps({"code": code, "imported": imported, "out": out.getvalue(), "err": err.getvalue()}))
"""


def test_cheap_checks_precede_expensive_imports(small, tmp_path):
    """One new process makes all checks in turn."""
    (tmp_path / "broken.jsonl").write_text(
        json.dumps({"prompt": "1+1", "data_source": "a"}) + '\n{"prompt": [\n', encoding="utf-8"
    )
    common = ["train", "--config-name", "quickstart", *small, "trainer.default_local_dir=/proc/x"]
    calls = json.dumps([[*common, argument] for argument in CHEAP])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", IN_TURN, calls]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    for answer, error in zip(answers, CHEAP.values(), strict=True):
        assert answer["code"] == 2 and answer["imported"] == [] and f"[{error}]" in answer["err"], answer
        # A folder is locked even before the first line.
        assert answer["out"] in ("", "train quickstart: check files, devices and logins ...\n")


# Real command lines


@pytest.mark.parametrize(
    ("argument", "code", "error"),
    [
        ("trainer.total_training_step=3", 2, "config.unknown-key"),
        ("data.train_files=nowhere.parquet", 2, "data.file-missing"),
    ],
)
def test_message_and_exit_code_of_a_real_command_line(argument, code, error, small, start):
    run = start("--config-name", "quickstart", *small, argument)
    assert run.wait() == code
    assert f"[{error}]" in run.output and "Traceback" not in run.output
    assert run.remaining() == []
