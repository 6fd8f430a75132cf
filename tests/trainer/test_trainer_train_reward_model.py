"""Reward-model training, its export to transformers, and its scores for a policy."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from listening_callback import FILE
from support.arithmetic_task import RUN, make_task
from support.dotted_keys import set_keys
from support.listeners import assert_on_loopback
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.config import RewardTrainingConfig
from megarl.config.build import build
from megarl.convert.command import main as convert
from megarl.tracking import read_metrics
from megarl.tracking.jsonl_files import read_balance
from megarl.trainer.jobs.supervised_jobs import run
from megarl.trainer.jobs.train import run as train

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Sums of two numbers up to 3, whose right answers a small model soon separates from wrong ones."""
    options = ("--largest", "3", "--num-test", "2", "--lessons", "8", "8", "--pairs", "1280", "24")
    return make_task(tmp_path_factory.mktemp("pairs"), *options)


def sequences(tokenizer, pairs, column):
    """Prompts with one of their answers, as transformers renders them."""
    return [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        + row[column]
        + tokenizer.eos_token
        for row in pq.read_table(pairs).to_pylist()
    ]


def rewards(model, pairs, column):
    """Rewards of transformers for the sequences of the first pairs, padded at the right."""
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right")
    texts = sequences(tokenizer, pairs, column)[:24]
    with torch.no_grad():
        return network(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits[:, 0]


def tokens_of(task):
    """Tokens of all pairs, both sequences of each, as transformers counts them."""
    tokenizer, pairs = AutoTokenizer.from_pretrained(task / "model"), task / "data" / "pairs.parquet"
    texts = [*sequences(tokenizer, pairs, "chosen"), *sequences(tokenizer, pairs, "rejected")]
    return sum(map(len, tokenizer(texts, add_special_tokens=False).input_ids))


def test_reward_model_trains_exports_and_scores_a_policy(task, train_config, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    values = {
        "data.train_files": [str(task / "data" / "pairs.parquet")],
        "data.val_files": [str(task / "data" / "pairs.parquet")],
        "data.train_batch_size": 32,
        "data.max_length": 24,
        "model.path": str(task / "model"),
        "optim.lr": 3e-3,
        "megatron.dtype": "float32",
        **RUN,
        "trainer.save_freq": 40,
        "trainer.test_freq": 40,
        "trainer.hf_export_dir": str(tmp_path / "reward"),
        "trainer.default_local_dir": str(tmp_path / "checkpoints"),
    }
    (tmp_path / "run").mkdir()
    run(build(RewardTrainingConfig, set_keys({}, values)), tmp_path / "run")
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 40 and steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)  # the new head gives 0
    kept = read_balance(tmp_path / "run" / "balance.jsonl")
    assert sum(lists["reward_model/tokens"][0] for lists in kept.values()) == tokens_of(task)  # each pair once
    assert [step for step, lists in kept.items() if "reward_model/score_pairs_s" in lists] == [40]  # the validation
    early, late = (sum(row["train/accuracy"] for row in part) / 5 for part in (steps[:5], steps[-10::2]))
    assert early < 0.75 and late > 0.8 and steps[-1]["val/accuracy"] > 0.8
    assert {"train/margin", "train/grad_norm", "train/lr", "val/loss", "val/margin"} <= steps[-1].keys()

    # Plain transformers reads it, and puts the pairs into the same order.
    chosen, rejected = (
        rewards(tmp_path / "reward", task / "data" / "pairs.parquet", c) for c in ("chosen", "rejected")
    )
    assert (chosen > rejected).float().mean() > 0.8
    assert convert(["verify", str(tmp_path / "reward"), str(tmp_path / "checkpoints")]) == 0
    converted = tmp_path / "converted"
    assert convert(["megatron-to-hf", str(tmp_path / "checkpoints"), str(converted)]) == 0
    assert torch.equal(rewards(converted, task / "data" / "pairs.parquet", "chosen"), chosen)

    policy = {
        "actor_rollout_ref.model.path": str(task / "model"),
        "data.train_files": [str(task / "data" / "train.parquet")],
        "data.val_files": [str(task / "data" / "test.parquet")],
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 2,
        "algorithm.adv_estimator": "grpo",
        "reward.model.enable": True,
        "reward.model.path": str(tmp_path / "reward"),
        "reward.model.megatron.dtype": "float32",
        "reward.model.nnodes": 1,  # a device of its own
        "reward.model.n_gpus_per_node": 1,
        "reward.function_weight": 0.5,
        "reward.model.weight": 2.0,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 2,
        "trainer.callbacks": [f"{Path(__file__).with_name('listening_callback.py')}:RecordListeners"],
    }
    (tmp_path / "policy").mkdir()
    train(train_config(policy), tmp_path / "policy")
    rows = read_metrics(tmp_path / "policy" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        parts = 2.0 * row["reward/rm_score/mean"] + 0.5 * row["reward/function_score/mean"]
        assert row["critic/score/mean"] == pytest.approx(parts, abs=1e-4) and row["reward/rm_truncated"] == 0
    listeners = json.loads((tmp_path / "policy" / FILE).read_text(encoding="utf-8"))
    assert {"reward_model-0", "actor-0", "rollout-0", "agents-0", "reward-0"} <= listeners.keys()
    assert_on_loopback([(role, ip) for role in listeners for _, ip in listeners[role]], "Ray", "reward_model", "agents")
    validated = rows[-1]["val-core/arithmetic/reward/mean@1"]
    assert validated == pytest.approx(
        2.0 * rows[-1]["val-aux/arithmetic/rm_score/mean@1"]
        + 0.5 * rows[-1]["val-aux/arithmetic/function_score/mean@1"],
        abs=1e-4,
    )
