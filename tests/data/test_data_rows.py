import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.expected_errors import raises

from megarl.data import check_files
from megarl.data.rows import RLHF_COLUMNS, Rows


def read(path, **changes):
    arguments = {"prompt_key": "prompt", "required": RLHF_COLUMNS, "optional": ("ability", "extra_info")}
    return Rows(path, **{**arguments, **changes})


def test_row_numbers_continue_over_files(write, question_rows):
    rows = question_rows(5)
    without_extras = [{k: v for k, v in row.items() if k not in ("extra_info", "ability")} for row in rows[3:]]
    source = read(
        [write(rows[:3], "a.parquet"), write([], "none.parquet", schema_of(rows)), write(without_extras, "b.parquet")]
    )
    assert len(source) == 5
    assert [source[row]["reward_model"]["ground_truth"] for row in range(5)] == ["0", "1", "2", "3", "4"]
    assert source[1]["extra_info"] == {"split": "train", "index": 1}
    assert source[3]["extra_info"] is None
    assert source.location(4).endswith("b.parquet, row 1")
    assert list(source.scan("prompt")) == [row["prompt"] for row in rows]
    with pytest.raises(IndexError):
        source[5]


def schema_of(rows):
    return pa.Table.from_pylist(rows).schema


def test_check_counts_rows(write, question_rows):
    files = [write(question_rows(3), "a.parquet"), write(question_rows(2), "b.parquet")]
    assert check_files(files, RLHF_COLUMNS, "data.train_files", "prompt") == 5
    assert check_files(files[0], [], "data.train_files") == 3


def test_check_imports_no_torch(write, question_rows):
    path = write(question_rows(1))
    code = (
        "import sys; from megarl.data import check_files;"
        f"assert check_files([{path!r}], ['prompt'], 'data.train_files') == 1;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def broken(row, **changes):
    return {**row, **changes}


@pytest.mark.parametrize("reader", [read, lambda path: check_files(path, RLHF_COLUMNS, "data.train_files", "prompt")])
@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"prompt": 4}, ("column 'prompt'", "chat messages", "int64")),
        ({"prompt": [{"role": "user", "text": "2+2"}]}, ("column 'prompt'", "text: string")),
        ({"prompt": [{"role": "user", "content": [1]}]}, ("column 'prompt'", "content: list")),
        ({"data_source": 7}, ("column 'data_source'", "int64")),
        ({"reward_model": {"style": "rule"}}, ("column 'reward_model'", '"ground_truth"')),
        ({"reward_model": "4"}, ("column 'reward_model'", '"ground_truth"', "string")),
    ],
)
def test_wrong_types_are_found_in_the_schema(write, question_rows, reader, change, values):
    path = write([broken(row, **change) for row in question_rows(2)])
    with raises("data.column-type", path, *values):
        reader(path)


@pytest.mark.parametrize("missing", ["prompt", "data_source", "reward_model"])
def test_missing_column_is_named(write, question_rows, missing):
    path = write([{name: value for name, value in row.items() if name != missing} for row in question_rows(2)])
    for reader in (read, lambda path: check_files(path, RLHF_COLUMNS, "data.train_files", "prompt")):
        with raises("data.missing-column", "train.parquet", f"'{missing}'"):
            reader(path)


def test_nearest_column_name_is_suggested(write):
    path = write([{"promt": "x"}])
    with raises("data.missing-column") as caught:
        check_files(path, ["prompt"], "data.train_files")
    assert str(caught.value) == (
        f"data.train_files: {path} has no column 'prompt' (did you mean 'promt'?); it has ['promt'] "
        "[data.missing-column]"
    )


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"prompt": None}, "data.null-value", "a list of chat messages"),
        ({"prompt": []}, "data.empty-prompt", "a list of chat messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "data.null-value", "'content'"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": None, "content": "a"}]}, "data.null-value", "'role'"),
        ({"prompt": [None]}, "data.null-value", "message"),
        ({"data_source": None}, "data.null-value", "a value"),
        ({"reward_model": None}, "data.null-value", "a value"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "data.null-value", "'ground_truth'"),
    ],
)
def test_malformed_value_is_named_by_file_column_and_row(write, question_rows, change, code, value):
    rows = question_rows(4)
    rows[0]["prompt"] = [*rows[0]["prompt"]] * 3  # so that a message's number is not its row's
    rows[2] = broken(rows[2], **change)
    with raises(code, "bad.parquet", *(f"column {name!r}" for name in change), "row 2", value):
        read([write(question_rows(1), "good.parquet"), write(rows, "bad.parquet", schema_of(question_rows(1)))])


@pytest.mark.parametrize("name", ["images", "image"])
def test_data_that_a_text_model_does_not_read_is_refused(write, question_rows, tmp_path, name):
    """At the start already; empty lists, as in the text rows of a mixed data set, are none."""
    rows = [{**row, name: []} for row in question_rows(3)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for path in (write(rows), str(lines)):
        assert check_files(path, RLHF_COLUMNS, "data.train_files", "prompt") == len(read(path)) == 3
    rows[2] = {**rows[2], name: [{"bytes": "x"}], "prompt": [{"role": "user", "content": "<image> What?"}]}
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for path in (write(rows), str(lines)):
        for reader in (read, lambda path: check_files(path, RLHF_COLUMNS, "data.train_files", "prompt")):
            with raises("data.media-column", path, f"'{name}'", "row 2"):
                reader(path)


def test_missing_and_malformed_parquet_files(tmp_path, write, question_rows):
    text = tmp_path / "rows.parquet"
    text.write_text("question,answer\n1,2\n", encoding="utf-8")
    truncated = tmp_path / "cut.parquet"
    whole = write(question_rows(3))
    with Path(whole).open("rb") as file:
        truncated.write_bytes(file.read()[:-100])
    for path in (text, truncated):
        with raises("data.unreadable-file", "data.val_files", path):
            check_files([whole, str(path)], [], "data.val_files")
    with raises("data.file-missing") as caught:
        check_files(f"{tmp_path}/nowhere.parquet", [], "data.val_files")
    assert str(caught.value) == (
        f"data.val_files: {tmp_path}/nowhere.parquet: there is no such file; name a parquet or JSONL file "
        "[data.file-missing]"
    )
    with raises("data.no-file-named", "data.val_files"):
        check_files([], [], "data.val_files")


def test_empty_data_set(write, question_rows):
    path = write([], schema=schema_of(question_rows(1)))
    with raises("data.no-rows", "data.train_files", "train.parquet"):
        check_files([path, path], RLHF_COLUMNS, "data.train_files", "prompt")
    with raises("data.no-rows", "train.parquet"):
        read(path)


def test_empty_or_missing_text_prompt_is_named_by_row(write, question_rows):
    for wrong, code in (("", "data.empty-prompt"), (None, "data.null-value")):
        rows = [broken(row, prompt=text) for row, text in zip(question_rows(2), ("2+2", wrong), strict=True)]
        with raises(code, "'prompt'", "row 1"):
            read(write(rows))
    table = pa.table({"prompt": pa.array(["a", ""]).dictionary_encode()})
    pq.write_table(table, path := write(question_rows(1)))
    with raises("data.empty-prompt", "row 1"):
        read(path, required=())
