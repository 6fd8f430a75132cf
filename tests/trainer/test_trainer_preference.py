"""Preference optimization of a policy, its export to transformers, and resume."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.arithmetic_task import RUN
from support.documented_metrics import undocumented
from support.dotted_keys import set_keys
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config import PreferenceConfig
from megarl.config.build import build
from megarl.convert.command import main as convert
from megarl.tracking import read_metrics
from megarl.trainer.jobs.supervised_jobs import run

pytestmark = pytest.mark.usefixtures("forked_workers")
BETA, STEPS = 0.1, 40


def log_probs(model, pairs, column):
    """Log-probs of the responses of all pairs, one sequence at a time, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    sums = []
    for row in pq.read_table(pairs).to_pylist():
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = prompt + tokenizer(row[column] + tokenizer.eos_token, add_special_tokens=False).input_ids
        with torch.no_grad():
            rows = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(rows[at - 1, ids[at]] for at in range(len(prompt), len(ids))))
    return torch.stack(sums)


def test_policy_learns_preferences_resumes_and_exports(arithmetic, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    held_out = arithmetic / "data" / "pairs_test.parquet"
    values = {
        "data.train_files": [str(arithmetic / "data" / "pairs.parquet")],
        "data.val_files": [str(held_out)],
        "data.train_batch_size": 20,
        "data.max_length": 40,
        "model.path": str(arithmetic / "model"),
        "optim.lr": 2e-3,
        "loss.beta": BETA,
        "megatron.dtype": "float32",
        **RUN,
        "trainer.save_freq": STEPS // 2,
        "trainer.test_freq": STEPS,
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": STEPS,
        "trainer.default_local_dir": str(tmp_path / "checkpoints"),
    }

    def train(name, changes):
        (tmp_path / name).mkdir()
        keys = {**values, "trainer.hf_export_dir": str(tmp_path / name / "policy"), **changes}
        run(build(PreferenceConfig, set_keys({}, keys)), tmp_path / name)
        return read_metrics(tmp_path / name / "metrics.jsonl")

    steps = train("whole", {})
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)  # policy and reference are one model
    assert steps[0]["train/margin"] == pytest.approx(0, abs=1e-5) and steps[0]["train/accuracy"] < 1
    assert steps[-1]["train/loss"] < 0.5 and steps[-1]["train/accuracy"] > 0.9
    assert {"train/chosen_reward", "train/rejected_reward", "train/chosen_log_prob"} <= steps[-1].keys()

    # The reference is the initial model: transformers computes the validation from both folders.
    margins = torch.zeros(())
    for sign, column in ((1, "chosen"), (-1, "rejected")):
        final, initial = (log_probs(p, held_out, column) for p in (tmp_path / "whole/policy", arithmetic / "model"))
        margins = margins + sign * BETA * (final - initial)
    assert steps[-1]["val/margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert steps[-1]["val/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert steps[-1]["val/loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), abs=1e-4)

    middle = tmp_path / "checkpoints" / f"global_step_{STEPS // 2}"
    capsys.readouterr()
    resumed = train("resumed", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(middle)})
    names = [name for name in steps[-1] if name.startswith(("train/", "val/"))]
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))  # with the rows before the checkpoint
    for row, other in zip(resumed, steps, strict=True):
        assert {name: row.get(name) for name in names} == {name: other.get(name) for name in names}
    output = capsys.readouterr().out
    assert f"step {STEPS // 2 + 1}/{STEPS}" in output and f"step {STEPS // 2}/{STEPS}" not in output
    assert convert(["verify", str(tmp_path / "resumed" / "policy"), str(tmp_path / "checkpoints")]) == 0


def test_kto_trains_on_pairs_and_on_labelled_rows_alike(arithmetic, tmp_path, monkeypatch):
    """Two rows per pair give the metrics of the pairs; validation equals transformers on the exported policy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    files = {name: arithmetic / "data" / f"{name}.parquet" for name in ("pairs", "pairs_test")}
    for name, file in files.items():
        rows = pq.read_table(file).to_pylist()
        made = [
            {"prompt": row["prompt"], "answer": row[column], "good": column == "chosen"}
            for row in rows
            for column in ("chosen", "rejected")
        ]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / f"{name}.parquet")
    weights = {"loss.desirable_weight": 1.25, "loss.undesirable_weight": 0.75}
    values = {
        "data.train_batch_size": 16,
        "data.max_length": 40,
        "model.path": str(arithmetic / "model"),
        "optim.lr": 2e-3,
        "loss.type": "kto",
        **weights,
        "megatron.dtype": "float32",
        **RUN,
        "trainer.test_freq": 6,
        "trainer.total_training_steps": 6,
        "trainer.total_epochs": 2,
    }

    def train(name, keys):
        (tmp_path / name).mkdir()
        folder = {"trainer.hf_export_dir": str(tmp_path / name / "policy")}
        run(build(PreferenceConfig, set_keys({}, {**values, **folder, **keys}), str(tmp_path / name)), tmp_path / name)
        return read_metrics(tmp_path / name / "metrics.jsonl")

    pairs = {"data.train_files": [str(files["pairs"])], "data.val_files": [str(files["pairs_test"])]}
    labels = {
        "data.train_files": [str(tmp_path / "pairs.parquet")],
        "data.val_files": [str(tmp_path / "pairs_test.parquet")],
        "data.label_key": "good",
        "data.response_key": "answer",
    }
    steps, others = train("of_pairs", pairs), train("of_labels", labels)
    names = [name for name in steps[-1] if name.startswith(("train/", "val/"))]
    assert {"train/kl", "train/margin", "train/chosen_log_prob", "val/kl", "val/margin", "val/accuracy"} <= set(names)
    for row, other in zip(steps, others, strict=True):
        assert {name: row.get(name) for name in names} == {name: other.get(name) for name in names}
    assert steps[0]["train/kl"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["train/margin"] > 0.01 and not undocumented(names)

    policy, initial = tmp_path / "of_pairs" / "policy", arithmetic / "model"
    ratios = {
        column: log_probs(policy, files["pairs_test"], column) - log_probs(initial, files["pairs_test"], column)
        for column in ("chosen", "rejected")
    }
    kl = steps[-1]["val/kl"]
    good, bad = torch.sigmoid(BETA * (ratios["chosen"] - kl)), torch.sigmoid(BETA * (kl - ratios["rejected"]))
    loss = torch.cat([1.25 * (1 - good), 0.75 * (1 - bad)]).mean()
    assert steps[-1]["val/loss"] == pytest.approx(loss.item(), abs=1e-4)
    margin = BETA * (ratios["chosen"].mean() - ratios["rejected"].mean())
    assert steps[-1]["val/margin"] == pytest.approx(margin.item(), abs=1e-4)
