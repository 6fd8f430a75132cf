"""``trainer.dry_run`` of reinforcement learning: its parts, and an error in each."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.expected_errors import raises
from support.squares_task import make_squares_task

from megarl.base.packages import is_installed
from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.dry_run.jobs import TrainDryRun, run
from megarl.ops.dry_run.parts import check_parts

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "tests" / "ops" / "plan" / "models"
POLICY = "actor_rollout_ref"
ROLES = (f"{POLICY}.actor", "critic")
SCRIPTS = ["ppo", "grpo", *sorted(path.stem for path in (ROOT / "configs").glob("run_*.yaml"))]
SIZES = {"32b": "Qwen2.5-32B", "70b": "Llama-3-70B", "30b_a3b": "Qwen3-30B-A3B", "671b": "DeepSeek-V3"}
"""Model by the size in a script's name; all other scripts use a 7B model."""


def report(config):
    lines: list[str] = []
    check_parts(TrainDryRun(config), lines.append)
    return lines


@pytest.fixture
def real_model(arithmetic, tmp_path):
    """Make a folder with a real model's ``config.json`` and a small tokenizer."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(arithmetic / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        shutil.copy(MODELS / name / "config.json", folder)
        return str(folder)

    return make


def test_dry_run_of_the_quickstart(train_config, tmp_path):
    config = train_config({"reward.name": "arithmetic", "trainer.dry_run": True, "trainer.save_freq": 2})
    lines = report(config)
    assert [line.split(" (")[0] for line in lines if line.startswith("ok")] == [
        f"ok    {name}" for name in TrainDryRun(config).parts()
    ]
    text = "\n".join(lines)
    assert "11 batches per epoch; the run has 11 steps" in text  # 90 problems by 8
    assert "first batch: 8 prompts of" in text and "first held-out batch: 10 prompts of" in text
    assert "arithmetic called on a row of 'arithmetic' answered by" in text and ": 1\n" in text
    assert "TP1 PP1 DP1 to 1 x TP1: " in text and "exactly once" in text and "starts at step 0" in text
    assert "has complete weights" in text and lines[-1].startswith("dry run: every part is fine")
    run(config)  # the entry point of the command
    assert not (tmp_path / "files").exists()


def test_dry_run_of_adapters(train_config):
    keys = {
        f"{POLICY}.model.lora_rank": 4,
        f"{POLICY}.model.target_modules": ["q_proj"],
        "algorithm.use_kl_in_reward": True,
    }
    text = "\n".join(report(train_config(keys)))
    assert "TP1 PP1 DP1, adapters of rank 4" in text and "the actor's model with adapters off" in text
    lines: list[str] = []
    with raises("config.dry-run-failed"):
        check_parts(TrainDryRun(train_config(keys | {f"{POLICY}.model.target_modules": ["query"]})), lines.append)
    assert any(line.startswith("fail") and "'query'" in line for line in lines), lines


def test_dry_run_of_engines_in_fp8(train_config):
    keys = {f"{POLICY}.rollout.quantization": "fp8"}
    assert "engines quantize linear layers to fp8 as they arrive" in "\n".join(report(train_config(keys)))
    lines: list[str] = []
    with raises("config.dry-run-failed"):
        check_parts(TrainDryRun(train_config(keys | {f"{POLICY}.rollout.name": "sglang"})), lines.append)
    assert any(line.startswith("fail") and "quantization=fp8 with rollout.name=sglang" in line for line in lines), lines


def test_dry_run_of_distillation(train_config, arithmetic):
    teacher = {"distillation.enabled": True, "distillation.teacher_models.big.model_path": str(arithmetic / "model")}
    loss = {"distillation.distillation_loss.use_policy_gradient": True}
    text = "\n".join(report(train_config(teacher | loss)))
    assert re.search(r"teacher big: Qwen2ForCausalLM of .*, TP1 PP1 DP1", text) and "teacher_big working" in text
    server = {"distillation.enabled": True, "distillation.teacher_models.far.server.urls": ["http://far.invalid:30000"]}
    text = "\n".join(report(train_config(server | loss)))
    assert "teacher far: SGLang at http://far.invalid:30000; not asked here" in text and "teacher_far" not in text


LARGE = pytest.mark.release(
    twin="tests/ops/dry_run/test_dry_run_train.py::test_run_scripts_need_only_a_config_json_and_a_tokenizer"
)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[LARGE] if name == "run_671b_grpo" else []) for name in SCRIPTS]
)
def test_run_scripts_need_only_a_config_json_and_a_tokenizer(
    script,
    real_model,
    arithmetic,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("SGLANG_API_KEY", "key of external servers")
    model = next((model for size, model in SIZES.items() if size in script), "Qwen2.5-7B")
    overrides = (
        f"{POLICY}.model.path={real_model(model)}",
        f"data.train_files={arithmetic}/data/train.parquet",
        f"data.val_files={arithmetic}/data/test.parquet",
        "data.train_batch_size=64",
        f"{POLICY}.actor.ppo_mini_batch_size=64",
        "reward.name=arithmetic",
        "actor_rollout_ref.rollout.multi_turn.search.url=http://retriever.invalid/retrieve",
        "trainer.total_training_steps=100",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        "trainer.save_freq=-1",
        "trainer.hardware=h100",
    )
    if not script.startswith("run_"):
        overrides += (f"{POLICY}.rollout.name=sglang", "trainer.nnodes=2", "trainer.device=cuda")
        overrides += tuple(f"{role}.megatron.{kind}_offload=true" for role in ROLES for kind in ("grad", "optimizer"))
        overrides += ("critic.megatron.param_offload=true", f"{POLICY}.actor.max_token_len_per_gpu=4096")
    if "async" in script:
        overrides += ("async_training.sync_interval=1",)
    if "671b" in script:  # its rollout uses external servers
        servers = ",".join(f"http://node-{number}.invalid:30000" for number in range(8))
        overrides += (f"{POLICY}.rollout.engine_kwargs.sglang.urls=[{servers}]",)
    lines: list[str] = []
    check_parts(TrainDryRun(compose(ConfigRequest(TrainConfig, script, overrides))), lines.append)
    text = "\n".join(lines)
    assert "has no weights: not checked" in text and "exactly once" in text
    assert re.search(r"^warn  this machine", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trainer.device": "cuda"}, r"trainer.device=cuda: .*trainer.device=cpu.* \[ray\.no-gpu\]$"),
        (
            {
                "trainer.n_gpus_per_node": 4096,
                "data.train_batch_size": 4096,
                f"{POLICY}.actor.ppo_mini_batch_size": 4096,
            },
            r"trainer.n_gpus_per_node=4096.* \[ray\.too-few-cores\]$",
        ),
        pytest.param(
            {f"{POLICY}.rollout.name": "sglang"},
            r"rollout.name=sglang .*ensure_gpu_environment sglang",
            marks=pytest.mark.skipif(is_installed("sglang"), reason="SGLang is installed"),
        ),
        ({"trainer.logger": ["wandb"]}, r"trackers: trainer.logger='wandb'.* \[tracking\.no-login\]$"),
    ],
    ids=["no GPU", "too many devices", "no SGLang", "no login"],
)
def test_shortages_of_this_machine_fail_the_dry_run(
    changes,
    named,
    train_config,
    monkeypatch,
    tmp_path,
):
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    config = train_config(changes)
    lines: list[str] = []
    with raises("config.dry-run-failed"):
        check_parts(TrainDryRun(config), lines.append)
    assert any(line.startswith("fail") and re.search(named, line) for line in lines), lines


def test_a_dead_cluster_fails_the_dry_run(train_config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with raises("ray.no-cluster", "127.0.0.1:1", "trainer.hardware"):
        list(TrainDryRun(train_config()).machine())


@pytest.mark.parametrize("changes", [{"trainer.nnodes": 2}, {"trainer.hardware": "h100"}])
def test_a_run_for_other_machines_only_warns(changes, train_config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (line,) = TrainDryRun(train_config({"trainer.device": "cuda", **changes})).machine()
    assert line.startswith("warning: trainer.nnodes=")


def test_a_run_that_does_not_seem_to_fit_gets_a_warning_with_a_suggestion(tmp_path):
    small = tmp_path / "small.yaml"
    text = (ROOT / "configs" / "hardware" / "h100.yaml").read_text(encoding="utf-8")
    small.write_text(
        text.replace("name: h100", "name: small").replace("memory_gib: 79.1", "memory_gib: 24"), encoding="utf-8"
    )
    model = (f"{POLICY}.model.path={MODELS / 'Qwen2.5-7B'}", "data.train_files=none")

    def memory(*overrides):
        dry_run = TrainDryRun(compose(ConfigRequest(TrainConfig, "run_8b_grpo", (*model, *overrides))))
        list(dry_run.models())
        return list(dry_run.memory())

    assert any(line.startswith("fits h100: 77.1 GiB of each device are usable") for line in memory())
    own = ("async_training.mode=disaggregated", f"{POLICY}.rollout.nnodes=1", f"{POLICY}.actor.ppo_mini_batch_size=128")
    alone = "fits h100: 78.1 GiB of each device are usable"  # one process less on the trainer's devices
    assert any(line.startswith(alone) for line in memory(*own))
    *_, warning = memory(f"trainer.hardware={small}")
    assert warning.startswith("warning: on small (trainer.hardware)") and " GiB" in warning
    suggestion = warning.partition("all of them needed: ")[2].split()
    assert suggestion and any("fits small" in line for line in memory(f"trainer.hardware={small}", *suggestion))
    with raises("plan.no-hardware-file", "trainer.hardware=h10", "did you mean h100?"):
        memory("trainer.hardware=h10")


def test_all_errors_are_reported_at_once(train_config):
    wrong = {"data.train_files": ["/no.parquet"], "algorithm.adv_estimator": "/no.py:mine"}
    lines: list[str] = []
    with raises("config.dry-run-failed") as caught:
        check_parts(TrainDryRun(train_config(wrong | {"reward.custom_reward_function.path": "/no.py"})), lines.append)
    assert str(caught.value) == "dry run: 3 of 13 parts failed: data, algorithm, rewards [config.dry-run-failed]"
    failed = [line for line in lines if line.startswith("fail")]
    assert failed[0].startswith("fail  data: data.train_files: /no.parquet") and "/no.py" in failed[1]


ALONE = {"critic.megatron.data_parallel_size": 1}


@pytest.fixture
def failing_reward(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    raise KeyError('gold')\n",
        encoding="utf-8",
    )
    return str(file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{POLICY}.model.path": "/nowhere"}, "models and layouts: .*/nowhere"),
        (
            {f"{POLICY}.actor.megatron.tensor_model_parallel_size": 3, "trainer.n_gpus_per_node": 3} | ALONE,
            f"models and layouts: {POLICY}.actor.megatron",
        ),
        ({f"{POLICY}.model.tokenizer_path": "/nowhere"}, "tokenizer: .*/nowhere"),
        ({"data.prompt_key": "question"}, "data: .*'question'"),
        ({"data.max_prompt_length": 1}, "data: "),
        ({f"{POLICY}.actor.policy_loss.loss_mode": "no.such.loss"}, "algorithm: .*loss_mode.*no.such"),
        ({f"{POLICY}.actor.optim.lr_warmup_steps": 99}, r"algorithm: .*lr_warmup_steps.*\[algorithm.warmup-too-long\]"),
        (
            {"reward.name": "code", "reward.num_workers": 0},
            r"rewards: .*num_workers=0.*\[reward\.needs-process\]",
        ),
        ({f"{POLICY}.rollout.agent.default_agent_loop": "/no.py:Loop"}, "conversations: .*/no.py"),
        ({"trainer.save_freq": 1, "trainer.default_local_dir": "/proc/none"}, "checkpoints: trainer.default_local_dir"),
        ({"trainer.resume_mode": "must"}, r"checkpoints: trainer.resume_mode=must.*\[resume\.no-checkpoint\]"),
    ],
)
def test_an_error_in_each_part(changes, named, train_config):
    lines: list[str] = []
    with raises("config.dry-run-failed"):
        check_parts(TrainDryRun(train_config(changes)), lines.append)
    assert any(re.match(f"fail  {named}", line, re.DOTALL) for line in lines), lines


def test_a_failing_reward_function_is_found_by_a_call(train_config, failing_reward):
    lines: list[str] = []
    with raises("config.dry-run-failed", "rewards"):
        check_parts(TrainDryRun(train_config({"reward.custom_reward_function.path": failing_reward})), lines.append)
    (failed,) = (line for line in lines if line.startswith("fail"))
    assert "KeyError" in failed and "gold" in failed


@pytest.mark.parametrize(
    ("score", "warns"),
    [
        ("0.0", True),
        ("float(solution_str == ground_truth)", False),
        (r"float(solution_str == '\\boxed{' + ground_truth + '}')", False),
    ],
)
def test_a_ground_truth_that_scores_nothing_is_a_warning(train_config, tmp_path, score, warns):
    file = tmp_path / "score.py"
    file.write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {score}\n",
        encoding="utf-8",
    )
    lines = report(train_config({"reward.custom_reward_function.path": str(file)}))
    warned = [line for line in lines if "the ground truth itself scores nothing" in line]
    assert len(warned) == warns and any(line.startswith("warn  rewards") for line in lines) == warns
    assert ("every part is fine" in lines[-1]) != warns and ("read the warnings of: rewards" in lines[-1]) == warns


def test_a_folder_with_the_work_of_another_run_fails_the_part_of_checkpoints(train_config, tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}", encoding="utf-8")
    lines: list[str] = []
    with raises("config.dry-run-failed", "checkpoints"):
        check_parts(TrainDryRun(train_config({"trainer.hf_export_dir": str(export)})), lines.append)
    (failed,) = (line for line in lines if line.startswith("fail"))
    assert failed.startswith(f"fail  checkpoints: trainer.hf_export_dir={export} ")
    assert failed.endswith("[disk.folder-of-other-run]")


def test_services_are_listed_but_not_called(train_config):
    judge = {"reward.name": "judge", "reward.judge.base_url": "http://judge.invalid/v1"}
    text = "\n".join(report(train_config(judge | {"reward.judge.model": "m"})))
    assert "would call judge, which uses http://judge.invalid/v1: not called here" in text


def test_a_tokenizer_of_another_model_is_rejected(train_config, arithmetic, tmp_path):
    other = tmp_path / "small"
    shutil.copytree(arithmetic / "model", other, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 7}), encoding="utf-8")
    lines: list[str] = []
    with raises("config.dry-run-failed", "data"):
        check_parts(TrainDryRun(train_config({f"{POLICY}.model.path": str(other)})), lines.append)
    text = "\n".join(lines)
    assert "warn  tokenizer" in text and "the model has room for 7" in text
    assert "fail  data" in text and "vocabulary of 7 tokens" in text


def test_files_that_name_different_ends_of_a_sequence_warn(train_config, arithmetic, tmp_path):
    other = shutil.copytree(arithmetic / "model", tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    text = "\n".join(report(train_config({f"{POLICY}.model.path": str(other)})))
    assert "warn  tokenizer" in text and "generation_config.json: 5, 6" in text


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"), "--num-train", "64")


# The remedy that the error names: verl's bridge turns off the loss that the script weighs.
@pytest.mark.parametrize(
    ("script", "model", "architecture"),
    [
        ("qwen2_5_vl_7b", "Qwen2.5-VL-7B", "Qwen2_5_VL"),
        ("qwen3_vl_8b", "Qwen3-VL-8B", "Qwen3VL"),
        ("qwen3_vl_30b_a3b", "Qwen3-VL-30B-A3B", "Qwen3VLMoe"),
    ],
)
def test_verls_scripts_of_models_with_images(squares, tmp_path, script, model, architecture):
    """Paths and engine change; 64 prompts with pictures stand in for a batch of 512. The towers are trained."""
    facts = json.loads((ROOT / "tests" / "config" / "verl_facts.json").read_text(encoding="utf-8"))
    number = facts["scripts"].index(f"examples/grpo_trainer/run_{script}_megatron.sh")
    overrides = [override for override, users in facts["overrides"].items() if number in users]
    folder = tmp_path / model
    shutil.copytree(squares / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokens = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = json.loads((MODELS / model / "config.json").read_text(encoding="utf-8"))
    raw |= {"image_token_id": tokens["image_token_id"]}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    ours = {
        f"{POLICY}.model.path": folder,
        "data.train_files": f"{squares}/data/train.parquet",
        "data.val_files": f"{squares}/data/test.parquet",
        "data.train_batch_size": 64,
        f"{POLICY}.actor.ppo_mini_batch_size": 64,
        f"{POLICY}.rollout.name": "sglang",
        "reward.name": "arithmetic",
        "trainer.default_local_dir": f"{tmp_path}/checkpoints",
        "trainer.hardware": "h100",
        "trainer.logger": "[console]",
    }
    kept = [override for override in overrides if override.lstrip("+").partition("=")[0] not in ours]
    changed = (*kept, *(f"{key}={value}" for key, value in ours.items()))
    lines: list[str] = []
    check_parts(TrainDryRun(compose(ConfigRequest(TrainConfig, "ppo_megatron_trainer", changed))), lines.append)
    text = "\n".join(lines)
    assert f"{architecture}ForConditionalGeneration of" in text and "exactly once" in text
