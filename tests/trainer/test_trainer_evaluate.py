"""Evaluation without processes: sampling description, early errors, and the best answers as SFT data."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from support.expected_errors import raises

from megarl.base.image_tokens import Image
from megarl.config.schema.jobs import BestAnswersConfig
from megarl.data import DataProto, SFTDataset, attention_mask_of, pad_left, pad_right
from megarl.data.tokenizers import load_tokenizer
from megarl.trainer.jobs.early_checks import check_early
from megarl.trainer.jobs.evaluate import BestAnswers, run
from megarl.trainer.jobs.frozen_policy import FrozenPolicy

pytestmark = pytest.mark.usefixtures("forked_workers")

ROLLOUT = "actor_rollout_ref.rollout"
SAMPLED = {f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.temperature": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "step 0: 1 answer per prompt, greedy"),
        (SAMPLED, "step 0: 4 answers per prompt, temperature 0.7, top_p 1, top_k 20"),
    ],
)
def test_description_of_the_sampling(evaluate_config, changes, words, tmp_path):
    config = evaluate_config(changes)
    path = config.actor_rollout_ref.model.path
    assert FrozenPolicy(config, tmp_path).describe() == f"{path}, {words}"


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"actor_rollout_ref.model.path": "/nowhere"}, "convert.no-folder", "actor_rollout_ref.model.path=/nowhere"),
        ({"data.val_files": ["/no.parquet"]}, "data.file-missing", "data.val_files: /no.parquet"),
        ({"data.prompt_key": "question"}, "data.missing-column", "'question'"),
        ({"data.max_prompt_length": 1}, "data.prompt-too-long", "data.max_prompt_length"),
        ({"reward.custom_reward_function.path": "/no.py"}, "config.user-code-file", "/no.py"),
        ({f"{ROLLOUT}.agent.default_agent_loop": "nobody"}, "config.unknown-name", "nobody"),
        ({"actor_rollout_ref.model.tokenizer_path": "/nowhere"}, "tokenizer.cannot-load", "/nowhere"),
    ],
)
def test_errors_come_before_any_process(
    evaluate_config,
    changes,
    code,
    named,
    tmp_path,
):
    config = evaluate_config(changes)
    with raises(code, named):
        check_early(config)
        run(config, tmp_path)
    assert not ray.is_initialized() and not list(tmp_path.iterdir())


def test_an_unknown_agent_loop_names_the_row(evaluate_config, arithmetic, tmp_path):
    rows = pq.read_table(arithmetic / "data" / "test.parquet").to_pylist()
    rows = [{**row, "agent_name": "nobody" if number == 3 else None} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "named.parquet")
    with raises("config.unknown-name", "named.parquet, row 3", "agent_name='nobody'"):
        run(evaluate_config({"data.val_files": [str(tmp_path / "named.parquet")]}), tmp_path)
    assert not ray.is_initialized()


ANSWERS = {
    "1 + 2": [("3", 1.0), ("4", 0.0), ("3", 1.0)],
    "2 + 2": [("999999", 1.0), ("4", 0.5), ("5", None)],  # a limit ended the best one, the last one's reward failed
    "3 + 3": [("7", 0.0), ("8", 0.1), ("9", 0.0)],
}


@pytest.fixture
def tokenizer(arithmetic):
    return load_tokenizer(str(arithmetic / "model"))


@pytest.fixture
def batch(tokenizer):
    """Three answers to each of three prompts; in the first answer to the first, a tool wrote the first token."""
    rows = [(prompt, text, score) for prompt, group in ANSWERS.items() for text, score in group]
    ids = [tokenizer.encode(text, add_special_tokens=False) for _, text, _ in rows]
    ids = [[*row, tokenizer.eos_token_id] for row in ids]
    ids[2].pop()  # a stop string ended this one
    ids[0] = [*tokenizer.encode("12", add_special_tokens=False), *ids[0]]
    written = [[1] * len(row) for row in ids]
    written[0][: len(ids[0]) - 2] = [0] * (len(ids[0]) - 2)
    tensors = {
        "prompts": pad_left([[5]] * len(rows)),
        "responses": pad_right(ids),
        "generated_mask": pad_right(written),
        "response_mask": pad_right([[int(row[2] is not None)] * len(own) for row, own in zip(rows, ids, strict=True)]),
    }
    widths = (1, tensors["responses"].shape[1])
    tensors["attention_mask"] = attention_mask_of([1] * len(rows), list(map(len, ids)), *widths)
    tensors["token_level_scores"] = torch.zeros(tensors["responses"].shape)
    tensors["token_level_scores"][:, 0] = torch.tensor([row[2] or 0.0 for row in rows])
    others = {
        "uid": [row[0] for row in rows],
        "raw_prompt": [[{"role": "user", "content": row[0]}] for row in rows],
        "data_source": ["sums"] * len(rows),
        "finish_reason": ["length" if text == "999999" else "stop" for _, text, _ in rows],
    }
    return DataProto.from_dict(tensors, others)


def test_complete_good_answers_become_sft_data(tokenizer, batch, tmp_path):
    file = tmp_path / "new" / "best.parquet"
    best = BestAnswers(BestAnswersConfig(str(file), keep=2, min_score=0.4), tokenizer)
    best.add(batch[:3])
    best.add(batch[3:])
    assert best.write() == f"best answers: {file}, 3 answers to 3 prompts"
    rows = pq.read_table(file).to_pylist()
    assert [(row["prompt"][0]["content"], row["score"]) for row in rows] == [("1 + 2", 1), ("1 + 2", 1), ("2 + 2", 0.5)]
    assert [piece["role"] for piece in rows[0]["response"]] == ["tool", "assistant"]
    assert rows[1]["response"] == [{"role": "assistant", "content": "3"}]
    learned = SFTDataset(str(file), tokenizer, 64)
    assert [tokenizer.decode(learned[row]["response_ids"], skip_special_tokens=True) for row in (0, 1, 2)] == [
        "123", "3", "4",
    ]  # fmt: skip
    assert learned[0]["response_mask"][0] == 0 and learned[1]["response_mask"][0] == 1


def test_best_answers_have_the_files_of_images(tokenizer, batch, tmp_path):
    """Those of the prompt fit its placeholders, also if a later turn shows another one."""
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    prompts = [[{"role": "user", "content": parts if row < 3 else "x"}] for row in range(len(batch))]
    file, later = Image.of(b"file", 1, 1), Image.of(b"later", 1, 1)
    images = [(file, later) if row == 0 else (file,) if row < 3 else () for row in range(len(batch))]
    ids, responses = batch.tensors["prompts"], batch.tensors["responses"]
    ids[:3], responses[0, 0] = file.token_ids[0], later.token_ids[0]
    best = BestAnswers(BestAnswersConfig(str(tmp_path / "best.parquet"), keep=2), tokenizer)
    best.add(batch.with_columns({"prompts": ids, "responses": responses}, {"raw_prompt": prompts, "images": images}))
    best.write()
    rows = pq.read_table(tmp_path / "best.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == ["<image>?", "<image>?", "x", "x", "x"]
    assert [row["images"] for row in rows] == [[{"bytes": b"file"}]] * 2 + [[]] * 3
    assert [row["later_images"] for row in rows] == [[{"bytes": b"later"}]] + [[]] * 4
    assert rows[0]["response"][0]["content"].count("<image>") == 1


def test_no_good_answer_is_an_error(tokenizer, batch, tmp_path):
    best = BestAnswers(BestAnswersConfig(str(tmp_path / "best.parquet"), min_score=2.0), tokenizer)
    best.add(batch)
    with raises("data.no-best-answer", best.config.file, "3 prompts", "best_answers.min_score=2.0"):
        best.write()
    assert not list(tmp_path.iterdir())
