import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.base.errors import DataError
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
    ("change", "message"),
    [
        ({"prompt": 4}, r"column 'prompt' must be a text, or a list of chat messages \{\"role\".*it is int64"),
        ({"prompt": [{"role": "user", "text": "2+2"}]}, "column 'prompt' must be a text, or a list of chat messages"),
        ({"prompt": [{"role": "user", "content": [1]}]}, "column 'prompt' must be a text, or a list of chat messages"),
        ({"data_source": 7}, "column 'data_source' must hold strings, it holds int64"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model' must be a struct with \"ground_truth\""),
        ({"reward_model": "4"}, "column 'reward_model' must be a struct with \"ground_truth\", it is string"),
    ],
)
def test_wrong_types_are_found_in_the_schema(write, question_rows, reader, change, message):
    path = write([broken(row, **change) for row in question_rows(2)])
    with pytest.raises(DataError, match=message) as caught:
        reader(path)
    assert path in str(caught.value)


@pytest.mark.parametrize("missing", ["prompt", "data_source", "reward_model"])
def test_missing_column_is_named(write, question_rows, missing):
    path = write([{name: value for name, value in row.items() if name != missing} for row in question_rows(2)])
    for reader in (read, lambda path: check_files(path, RLHF_COLUMNS, "data.train_files", "prompt")):
        with pytest.raises(DataError, match=f"train.parquet: there is no column '{missing}'.*there are"):
            reader(path)


def test_nearest_column_name_is_suggested(write):
    path = write([{"promt": "x"}])
    with pytest.raises(DataError, match=r"data\.train_files: .*did you mean 'promt'"):
        check_files(path, ["prompt"], "data.train_files")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "column 'prompt', row 2 is null; every row needs a text, or a list of chat messages"),
        ({"prompt": []}, "column 'prompt', row 2 has no message"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt', row 2 has a message whose 'content' is null"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": None, "content": "a"}]}, "row 2 has .* 'role' is null"),
        ({"prompt": [None]}, "column 'prompt', row 2 has a message"),
        ({"data_source": None}, "column 'data_source', row 2 is null"),
        ({"reward_model": None}, "column 'reward_model', row 2 is null"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "'reward_model', row 2 has 'ground_truth' null"),
    ],
)
def test_malformed_value_is_named_by_file_column_and_row(write, question_rows, change, message):
    rows = question_rows(4)
    rows[0]["prompt"] = [*rows[0]["prompt"]] * 3  # so that a message's number is not its row's
    rows[2] = broken(rows[2], **change)
    with pytest.raises(DataError, match=message) as caught:
        read([write(question_rows(1), "good.parquet"), write(rows, "bad.parquet", schema_of(question_rows(1)))])
    assert "bad.parquet" in str(caught.value)


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
            with pytest.raises(DataError, match=f"{path}: column '{name}', row 2 is not empty"):
                reader(path)


def test_missing_and_malformed_parquet_files(tmp_path, write, question_rows):
    text = tmp_path / "rows.parquet"
    text.write_text("question,answer\n1,2\n", encoding="utf-8")
    truncated = tmp_path / "cut.parquet"
    whole = write(question_rows(3))
    with open(whole, "rb") as file:
        truncated.write_bytes(file.read()[:-100])
    for path in (text, truncated):
        with pytest.raises(DataError, match=r"data\.val_files: .*not a readable parquet file"):
            check_files([whole, str(path)], [], "data.val_files")
    with pytest.raises(DataError, match=r"data\.val_files: .*nowhere.parquet: there is no such file"):
        check_files(str(tmp_path / "nowhere.parquet"), [], "data.val_files")
    with pytest.raises(DataError, match=r"data\.val_files is empty"):
        check_files([], [], "data.val_files")


def test_empty_data_set(write, question_rows):
    path = write([], schema=schema_of(question_rows(1)))
    with pytest.raises(DataError, match=r"data\.train_files: there is no row in .*train.parquet"):
        check_files([path, path], RLHF_COLUMNS, "data.train_files", "prompt")
    with pytest.raises(DataError, match=r"there is no row in .*train.parquet"):
        read(path)


def test_empty_or_missing_text_prompt_is_named_by_row(write, question_rows):
    for wrong, message in (("", "column 'prompt', row 1 is an empty text"), (None, "column 'prompt', row 1 is null")):
        rows = [broken(row, prompt=text) for row, text in zip(question_rows(2), ("2+2", wrong), strict=True)]
        with pytest.raises(DataError, match=message):
            read(write(rows))
    table = pa.table({"prompt": pa.array(["a", ""]).dictionary_encode()})
    pq.write_table(table, path := write(question_rows(1)))
    with pytest.raises(DataError, match="row 1 is an empty text"):
        read(path, required=())
