"""``trainer.dry_run`` of supervised jobs: their parts, and an error in each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from support.expected_errors import raises
from transformers import AutoTokenizer

from megarl.cli import main as megarl
from megarl.config import RewardTrainingConfig, SFTConfig, SupervisedConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.dry_run.jobs import SupervisedDryRun, run
from megarl.ops.dry_run.parts import check_parts
from megarl.trainer.jobs.supervised_jobs import supervised_job

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "tests" / "ops" / "plan" / "models"
PARTS = [
    "this machine",
    "batches",
    "models and layouts",
    "tokenizer",
    "data",
    "algorithm",
    "memory",
    "checkpoints",
    "trackers",
]
MakeConfig = Callable[..., SupervisedConfig]


def dry_run_of(config):
    return SupervisedDryRun(supervised_job(config))


def report(config):
    lines: list[str] = []
    check_parts(dry_run_of(config), lines.append)
    return lines


def failures(config):
    lines: list[str] = []
    with raises("config.dry-run-failed", f"of {len(PARTS)} parts"):
        check_parts(dry_run_of(config), lines.append)
    return [line for line in lines if line.startswith("fail")]


def first_rows(arithmetic, file, answers):
    """Describe the token counts of a file's first eight rows, computed by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")

    def count(row, answer):
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        return len(tokenizer(text + row[answer] + tokenizer.eos_token, add_special_tokens=False).input_ids)

    rows = pq.read_table(arithmetic / "data" / file).to_pylist()[:8]
    counts = [sum(count(row, answer) for answer in answers) for row in rows]
    return f"{min(counts)} to {max(counts)} tokens, {sum(counts) / 8:.0f} on average"


def test_dry_run_of_fine_tuning(sft_config, arithmetic, tmp_path):
    config = sft_config({"trainer.dry_run": True, "trainer.save_freq": 2, "data.shuffle": False})
    before = sorted(tmp_path.rglob("*"))
    lines = report(config)
    assert [line[6:].split(" (")[0] for line in lines if line.startswith("ok")] == PARTS
    text = "\n".join(lines)
    assert "15 batches per epoch; the run has 15 steps" in text  # 120 lessons by 8
    assert f"first batch: 8 samples of {first_rows(arithmetic, 'sft.parquet', ['response'])}" in text
    assert "no validation" in text and "starts at step 0" in text and "has complete weights" in text
    assert re.search(r"sft: Qwen2ForCausalLM of .*, TP1 PP1 DP1", text) and "update: 0." in text
    run(config)  # the entry point of the command
    assert sorted(tmp_path.rglob("*")) == before and not ray.is_initialized()


def test_dry_run_of_reward_model_training(pair_config, arithmetic, tmp_path):
    config = pair_config({"trainer.dry_run": True, "trainer.test_freq": 2, "data.shuffle": False})
    lines = report(config)
    assert [line[6:].split(" (")[0] for line in lines if line.startswith("ok")] == PARTS
    text, both = "\n".join(lines), ["chosen", "rejected"]
    assert "5 batches per epoch; the run has 5 steps" in text  # 40 pairs by 8
    assert f"first batch: 8 pairs of {first_rows(arithmetic, 'pairs.parquet', both)}" in text
    assert f"first held-out batch: 8 pairs of {first_rows(arithmetic, 'pairs_test.parquet', both)}" in text
    assert "no checkpoints" in text and re.search(r"reward_model: Qwen2ForCausalLM of .*, TP1 PP1 DP1", text)
    run(config)
    assert not ray.is_initialized()
    assert "no validation" in "\n".join(report(pair_config()))


def test_dry_run_of_preference_optimization(preference_config, arithmetic):
    config = preference_config({"trainer.dry_run": True, "trainer.test_freq": 2, "data.shuffle": False})
    lines = report(config)
    assert [line[6:].split(" (")[0] for line in lines if line.startswith("ok")] == PARTS
    text, both = "\n".join(lines), ["chosen", "rejected"]
    assert "5 batches per epoch; the run has 5 steps" in text  # 40 pairs by 8
    assert f"first batch: 8 pairs of {first_rows(arithmetic, 'pairs.parquet', both)}" in text
    assert f"first held-out batch: 8 pairs of {first_rows(arithmetic, 'pairs_test.parquet', both)}" in text
    assert re.search(r"preference: Qwen2ForCausalLM of .*, TP1 PP1 DP1", text) and "update: 0." in text
    run(config)
    assert not ray.is_initialized()
    sft = [str(arithmetic / "data" / "sft.parquet")]
    assert "'chosen'" in failures(preference_config({"data.train_files": sft}))[0]
    assert re.match("fail  models and layouts: .*/nowhere", failures(preference_config({"model.path": "/nowhere"}))[0])


def test_dry_run_of_kto_on_pairs_and_labelled_rows(preference_config, arithmetic, tmp_path):
    keys = {"trainer.dry_run": True, "loss.type": "kto", "data.shuffle": False}
    text = "\n".join(report(preference_config(keys)))
    assert "10 batches per epoch; the run has 10 steps" in text and "first batch: 8 responses of" in text  # 2 x 40 by 8
    file = tmp_path / "labelled.parquet"
    table = pq.read_table(arithmetic / "data" / "sft.parquet").slice(0, 24)
    labels = [row % 3 == 0 for row in range(24)]
    pq.write_table(table.append_column("label", [labels]), file)
    labelled = keys | {"data.train_files": [str(file)], "data.label_key": "label", "data.val_files": []}
    text = "\n".join(report(preference_config(labelled)))
    assert "3 batches per epoch; the run has 3 steps" in text
    assert "'good'" in failures(preference_config(labelled | {"data.label_key": "good"}))[0]
    pq.write_table(table.append_column("label", [["yes"] * 24]), file)
    assert "column 'label' (data.label_key) is 'yes'" in failures(preference_config(labelled))[0]


def test_weights_are_optional(sft_config, arithmetic, tmp_path):
    """A model of real size, without weights and with another tokenizer."""
    model = tmp_path / "model"
    shutil.copytree(arithmetic / "model", model, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    shutil.copy(MODELS / "Llama-3-70B" / "config.json", model)
    sizes = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "recompute_granularity": "full"}
    machines = {"trainer.nnodes": 4, "trainer.n_gpus_per_node": 8, "trainer.device": "cuda", "model.path": str(model)}
    config = sft_config(machines | {f"megatron.{name}": value for name, value in sizes.items()})
    text = "\n".join(report(config))
    assert "has no weights: not checked" in text and "fits h100" in text
    assert "sft: LlamaForCausalLM of" in text and "TP8 PP2 DP2" in text


def test_a_run_that_does_not_seem_to_fit_gets_a_warning_with_a_suggestion(tmp_path):
    small = tmp_path / "small.yaml"
    text = (ROOT / "configs" / "hardware" / "h100.yaml").read_text(encoding="utf-8")
    small.write_text(
        text.replace("name: h100", "name: small").replace("memory_gib: 79.1", "memory_gib: 32"), encoding="utf-8"
    )

    def memory(schema, name, *overrides):
        model = (f"model.path={MODELS / 'Qwen2.5-7B'}", "data.train_files=none", "trainer.device=cuda")
        parts = dry_run_of(compose(ConfigRequest(schema, name, (*model, *overrides))))
        list(parts.models())
        return list(parts.memory())

    for schema, name in ((SFTConfig, "sft"), (RewardTrainingConfig, "reward_model")):
        changes = ["megatron.recompute_granularity=full", "data.max_token_len_per_gpu=8192"]
        assert any(line.startswith("fits h100") for line in memory(schema, name, *changes))
        *_, warning = memory(schema, name, *changes, f"trainer.hardware={small}")
        assert warning.startswith("warning: on small (trainer.hardware)") and "update" in warning
        suggestion = re.search(r"it would fit with .*?: (.*)$", warning)
        assert suggestion is not None, warning
        changes += [*suggestion[1].split(), f"trainer.hardware={small}"]
        assert any("fits small" in line for line in memory(schema, name, *changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.path": "/nowhere"}, "models and layouts: .*/nowhere"),
        (
            {"megatron.tensor_model_parallel_size": 3, "trainer.n_gpus_per_node": 3},
            "models and layouts: megatron.tensor_model_parallel_size",
        ),
        ({"model.tokenizer_path": "/nowhere"}, "tokenizer: .*/nowhere"),
        ({"data.train_files": ["/no.parquet"]}, "data: data.train_files: /no.parquet"),
        ({"data.prompt_key": "question"}, "data: .*'question'"),
        ({"data.max_length": 3}, "data: .*data.max_length"),
        ({"optim.lr_warmup_steps": 99}, r"algorithm: .*optim.lr_warmup_steps.*\[algorithm\.warmup-too-long\]"),
        ({"trainer.hardware": "h10"}, r"memory: trainer.hardware=h10\b.*\[plan\.no-hardware-file\]"),
        ({"trainer.save_freq": 1, "trainer.default_local_dir": "/proc/none"}, "checkpoints: trainer.default_local_dir"),
        ({"trainer.resume_mode": "must"}, r"checkpoints: trainer.resume_mode=must.*\[resume\.no-checkpoint\]"),
        ({"trainer.logger": ["no.such:Tracker"]}, "trackers: .*no.such"),
    ],
)
def test_an_error_in_each_part(changes, named, sft_config, pair_config):
    for make in (sft_config, pair_config):
        lines = failures(make(changes))
        assert any(re.match(f"fail  {named}", line, re.DOTALL) for line in lines), lines


def test_columns_of_each_job(sft_config, pair_config, arithmetic):
    sft, pairs = ([str(arithmetic / "data" / f"{name}.parquet")] for name in ("sft", "pairs"))
    assert "'response'" in failures(sft_config({"data.train_files": pairs}))[0]
    assert "'chosen'" in failures(pair_config({"data.train_files": sft}))[0]
    assert "data.val_files" in failures(pair_config({"data.val_files": sft}))[0]


def test_all_errors_are_reported_at_once(sft_config):
    wrong = {"data.train_files": ["/no.parquet"], "trainer.resume_mode": "must", "model.tokenizer_path": "/nowhere"}
    failed = [line.split(": ")[0] for line in failures(sft_config(wrong))]
    assert failed == ["fail  tokenizer", "fail  data", "fail  algorithm", "fail  checkpoints"]


@pytest.mark.parametrize(
    ("name", "file", "job"),
    [("sft", "sft", "sft"), ("reward_model", "pairs", "reward-model"), ("preference", "pairs", "preference")],
)
def test_exit_codes(
    name,
    file,
    job,
    arithmetic,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    keys = [f"model.path={arithmetic}/model", "data.train_batch_size=8", "trainer.n_gpus_per_node=1"]
    keys += [f"data.train_files={arithmetic}/data/{file}.parquet", "trainer.device=cpu", "trainer.dry_run=true"]
    assert megarl([job, "--config-name", name, *keys]) == 0
    assert "dry run: every part is fine" in capsys.readouterr().out
    (folder,) = (tmp_path / "outputs" / name).iterdir()
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {"config.yaml", "run.json", "logs/driver.log"}
    assert megarl([job, "--config-name", name, *keys, "trainer.resume_mode=must"]) == 2
    assert capsys.readouterr().err == "dry run: 1 of 9 parts failed: checkpoints [config.dry-run-failed]\n"
    assert megarl([job, "--config-name", name, *keys, "data.train_batch_size=0"]) == 2
