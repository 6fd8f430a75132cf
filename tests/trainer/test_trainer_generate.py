"""Generation without processes: prompts, output files and early errors."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
import torch
from support.expected_errors import raises
from transformers import AutoTokenizer

from megarl.base.image_tokens import Image
from megarl.config import GenerateConfig
from megarl.config.build import build
from megarl.config.keys import with_values
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.trainer.jobs.generate import answer_rows, answers_line, prompt_files, run, write_answers
from megarl.trainer.phases.data_loading import generation_loader

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def config(arithmetic, tmp_path):
    def make(**data):
        rollout = data.pop("rollout", {})
        values = {
            "data": {"prompts": ["What is 1 + 2?"], "max_prompt_length": 32, "max_response_length": 6, **data},
            "actor_rollout_ref": {"model": {"path": str(arithmetic / "model")}, "rollout": rollout},
            "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": 1},
        }
        return build(GenerateConfig, values, str(tmp_path))

    return make


def test_prompts_are_written_to_a_file(tmp_path):
    (file,) = prompt_files(["Why?", "Où?"], tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": [{"role": "user", "content": text}]} for text in ("Why?", "Où?")]
    assert prompt_files([], tmp_path / "none.jsonl") == [] and not (tmp_path / "none.jsonl").exists()


def test_a_prompt_is_printed_on_one_line():
    row = {"prompt": [{"role": "user", "content": "What is\n1 + 2?"}], "responses": ["\n3\r", None, "three\n\nor 3"]}
    assert answers_line(row) == "What is 1 + 2?  ->  3 | None | three or 3"


def test_standard_input_lines_become_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  two  \n"))
    (file,) = prompt_files(["-"], tmp_path / "prompts.jsonl")
    assert [
        json.loads(line)["prompt"][0]["content"] for line in Path(file).read_text(encoding="utf-8").splitlines()
    ] == ["one", "two"]
    with raises("data.no-stdin-line", "data.prompts=[-]"):
        prompt_files(["-"], tmp_path / "prompts.jsonl")


def test_rows_need_only_a_prompt_and_keep_all_columns(config, arithmetic, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    rows = [{"prompt": [{"role": "user", "content": "What is 1 + 2?"}], "level": 3}]
    rows += [{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "level": 5}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (prompts,) = generation_loader(config(), [str(tmp_path / "prompts.jsonl")], tokenizer)
    texts = ["3", "4", "7", "9"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    pad, repeated = tokenizer.pad_token_id, prompts.tensors["prompts"].repeat_interleave(2, 0)
    responses = torch.tensor([[*own, tokenizer.eos_token_id, pad][:3] for own in ids])
    mask = torch.cat([prompts.tensors["attention_mask"].repeat_interleave(2, 0), (responses != pad).long()], 1)
    columns = {"agent_error": [None, None, None, "lost"]}
    answers = DataProto.from_dict({"prompts": repeated, "responses": responses, "attention_mask": mask}, columns)
    found = answer_rows(prompts, answers, 2, tokenizer)
    assert [row["responses"] for row in found] == [["3", "4"], ["7", None]]
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]
    assert [row["level"] for row in found] == [3, 5] and "uid" not in found[0] and "data_source" not in found[0]


def test_files_of_later_turns_are_in_a_column_of_their_own(arithmetic, tmp_path):
    """Two samples of a prompt with a picture; the second one's tool shows another, and the first again."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    first, later = Image.of(b"first", 1, 1), Image.of(b"later", 1, 1)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    prompts = DataProto.from_dict({}, {"raw_prompt": [[message]], "images": [(first,)]})
    responses = [tokenizer("4").input_ids, [*later.token_ids, *first.token_ids, *tokenizer("4").input_ids]]
    lengths = [1, 1], [len(ids) for ids in responses]
    tensors = {
        "prompts": pad_left([list(first.token_ids)] * 2),
        "responses": pad_right(responses),
        "attention_mask": attention_mask_of(*lengths, 1, max(lengths[1])),
    }
    batch = DataProto.from_dict(tensors, {"images": [(first,), (first, later, first)]})
    rows = answer_rows(prompts, batch, 2, tokenizer)
    write_answers(tmp_path / "answers.parquet", rows)
    write_answers(tmp_path / "answers.jsonl", rows)
    texts = {"prompt": [{"role": "user", "content": "<image>?"}], "responses": ["4", "<image><image>4"]}
    files = {"images": [{"bytes": b"first"}], "later_images": [[], [{"bytes": b"later"}, {"bytes": b"first"}]]}
    assert pq.read_table(tmp_path / "answers.parquet").to_pylist() == [texts | files]
    assert json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8")) == texts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_answers_are_written_atomically(tmp_path, suffix):
    rows = [{"prompt": [{"role": "user", "content": "ü?"}], "responses": ["1", None]}]
    target = tmp_path / "new" / f"answers.{suffix}"
    write_answers(target, rows)
    text = target.read_text(encoding="utf-8") if suffix == "jsonl" else ""
    found = [json.loads(line) for line in text.splitlines()] if text else pq.read_table(target).to_pylist()
    assert found == rows and [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"val_files": ["/no.parquet"]}, "data.file-missing", "/no.parquet"),
        ({"max_prompt_length": 1}, "data.prompt-too-long", "data.max_prompt_length"),
        ({"rollout": {"agent": {"default_agent_loop": "nobody"}}}, "config.unknown-name", "nobody"),
    ],
)
def test_errors_come_before_any_process(config, changes, code, named, tmp_path):
    with raises(code, named):
        run(config(**changes), tmp_path)
    assert not ray.is_initialized()


def test_a_missing_model_is_named(config, tmp_path):
    wrong = with_values(config(), {"actor_rollout_ref.model.path": "/nowhere"})
    with raises("convert.no-folder", "actor_rollout_ref.model.path=/nowhere"):
        run(wrong, tmp_path)
