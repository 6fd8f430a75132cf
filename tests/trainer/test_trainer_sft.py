"""Supervised fine-tuning in real processes: saves, and exact resume."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from support.expected_errors import raises
from transformers import AutoTokenizer

from megarl.convert.command import main as convert
from megarl.ops.report.charts import balance_maps
from megarl.ops.report.run_files import read_run
from megarl.tracking import read_metrics
from megarl.tracking.jsonl_files import read_balance
from megarl.trainer.jobs.supervised_jobs import run
from megarl.trainer.state.run_state import checkpoint_store, find_resume
from megarl.trainer.state.stopping import StopCondition

pytestmark = pytest.mark.usefixtures("forked_workers")

STEPS = 5  # the checkpoint is in the first epoch of three steps, its end in the second
CLOCK = ("timing_", "perf/", "checkpoint/")


def rows(folder):
    """Of every step, what two equal runs share."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def balance(folder):
    return read_balance(folder / "balance.jsonl")


def test_a_resumed_run_equals_an_uninterrupted_one(sft_config, tmp_path, monkeypatch):
    def config(name, **trainer):
        common = {
            "data.train_batch_size": 40,
            "optim.lr": 1e-3,
            "optim.lr_warmup_steps": 2,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": 2,
            "trainer.max_ckpt_to_keep": 2,
            "trainer.checkpoint.async_save": True,
            "trainer.default_local_dir": str(tmp_path / name / "checkpoints"),
            "trainer.hf_export_dir": str(tmp_path / name / "hf"),
        }
        return sft_config({**common, **{f"trainer.{key}": value for key, value in trainer.items()}})

    def finish(name, **trainer):
        (tmp_path / name).mkdir(exist_ok=True)
        run(config(name, **trainer), tmp_path / name)
        return tmp_path / name

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = finish("whole")
    store = checkpoint_store(config("whole"))
    assert store.steps() == [4, STEPS]  # the last one whatever its number, and of the others the newest
    assert find_resume(config("whole", resume_mode="disable")) is None
    with raises("resume.no-checkpoint", "trainer.resume_mode=must", "trainer.default_local_dir"):
        find_resume(config("cut", resume_mode="must"))

    # A run that ends after its first step by a request, and one that resumes from there.
    with monkeypatch.context() as patch:
        patch.setattr(StopCondition, "begin", lambda stop: stop.request("SIGTERM"))
        cut = finish("cut")
    assert [row["step"] for row in rows(cut)] == [1] and not (cut / "hf").exists()
    saved = cut / "checkpoints" / "global_step_1"
    shutil.copytree(saved, tmp_path / "elsewhere" / "global_step_1")
    path = tmp_path / "elsewhere" / "global_step_1"
    resumed = finish("resumed", resume_mode="resume_path", resume_from_path=str(path))
    assert rows(resumed) == rows(whole) and len(rows(whole)) == STEPS
    dealt_out = [[lists["sft/tokens"] for lists in balance(folder).values()] for folder in (whole, resumed)]
    assert dealt_out[0] == dealt_out[1] and len(dealt_out[0]) == STEPS
    first, second = (load_file(folder / "hf" / "model.safetensors") for folder in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    assert convert(["verify", str(whole / "hf"), str(whole / "checkpoints")]) == 0


@pytest.fixture
def uneven(arithmetic, tmp_path):
    """Twelve rows, whose lengths ask for one way to deal four at a time to two ranks."""
    prompt = [{"role": "user", "content": "What is 6 + 4?"}]
    digits = [90, 20, 20, 20, *(10, 60, 10, 60), *(40, 40, 70, 20)]
    table = pa.Table.from_pylist([{"prompt": prompt, "response": "1" * count} for count in digits])
    pq.write_table(table, tmp_path / "uneven.parquet")
    return tmp_path / "uneven.parquet"


def test_the_work_of_both_ranks_is_in_balance_file_and_report(
    sft_config,
    uneven,
    arithmetic,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys = {"data.train_files": [str(uneven)], "data.train_batch_size": 4, "data.shuffle": False}
    (tmp_path / "run").mkdir()
    run(sft_config(keys | {"trainer.n_gpus_per_node": 2, "megatron.dtype": "float32"}), tmp_path / "run")

    # What transformers counts of each row.
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    lengths = []
    for row in pq.read_table(uneven).to_pylist():
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(text + row["response"] + tokenizer.eos_token, add_special_tokens=False).input_ids))
    longest, *others = lengths[:4]
    by_hand = {
        1: sorted([longest, sum(others)]),  # the long row on one rank, all others on the other one
        2: [lengths[4] + lengths[5]] * 2,  # a long and a short one on each
        3: sorted([lengths[8] + lengths[9], lengths[10] + lengths[11]]),
    }
    kept = balance(tmp_path / "run")
    assert {step: sorted(lists["sft/tokens"]) for step, lists in kept.items()} == by_hand
    for lists in kept.values():
        work = lists["sft/work"]
        assert len(work) == 2 and sum(work) == pytest.approx(2, abs=2e-3)
        assert len(lists["sft/update_sft_s"]) == 2 and min(lists["sft/update_sft_s"]) > 0
    maps = balance_maps(read_run(tmp_path / "run").balance)
    assert list(maps) == ["sft/tokens", "sft/work", "sft/update_sft_s"] and maps["sft/tokens"]["steps"] == [1, 2, 3]
