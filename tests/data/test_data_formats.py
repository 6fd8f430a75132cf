"""Rows of every file format: values, cache, and errors."""

import json
import os
import pickle
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.expected_errors import raises

from megarl.data import check_files
from megarl.data.rows import RLHF_COLUMNS, Rows, expand_files, reader


def read(files, cache_dir=None):
    return Rows(files, "prompt", RLHF_COLUMNS, cache_dir=cache_dir)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder that even small data sets use."""
    monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def write_lines(tmp_path):
    def write(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in content) + "\n", encoding="utf-8")
        return str(path)

    return write


def saved(folder, content):
    datasets.Dataset.from_list(content).save_to_disk(str(folder))
    return str(folder)


def everything(source):
    return [source[row] for row in range(len(source))]


@pytest.mark.parametrize("small", [True, False])
def test_every_format_gives_the_same_rows(small, write, write_lines, question_rows, tmp_path, monkeypatch):
    if not small:
        monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    content = question_rows(5)
    cached = str(tmp_path / "cache")
    for files in (
        write(content),
        write_lines(content),
        saved(tmp_path / "hf", content),
        [write(content[:2], "a.parquet"), write_lines(content[2:3], "b.jsonl"), saved(tmp_path / "c", content[3:])],
    ):
        source = read(files, cached)
        assert everything(source) == content
        assert list(source.scan("ability")) == ["math"] * 5
        assert source.slice(["data_source"], 1, 4) == [{"data_source": "toy"}] * 3
        assert everything(pickle.loads(pickle.dumps(source))) == content
        assert check_files(files, RLHF_COLUMNS, "data.train_files", "prompt") == 5
    assert (tmp_path / "cache").exists() is not small


def test_slices_cross_record_batches(write, question_rows, cache):
    content = question_rows(2500)
    source = read(write(content), str(cache))
    assert [source[row] for row in (0, 1023, 1024, 2047, 2048, 2499)] == [
        content[row] for row in (0, 1023, 1024, 2047, 2048, 2499)
    ]
    assert source.slice(["extra_info"], 1000, 2100) == [{"extra_info": row["extra_info"]} for row in content[1000:2100]]
    assert source.location(2499).endswith("row 2499")


def test_file_is_converted_once_per_content(write, question_rows, cache):
    path = write(question_rows(3))
    read(path, str(cache))
    (entry,) = cache.glob("*.arrow")
    before = entry.stat().st_mtime_ns
    assert everything(read(path, str(cache))) == question_rows(3)
    assert entry.stat().st_mtime_ns == before
    assert pa.ipc.open_file(pa.memory_map(str(entry))).num_record_batches == 1
    write(question_rows(4))
    os.utime(path, ns=(1, 1))
    assert everything(read(path, str(cache))) == question_rows(4)
    assert len(list(cache.glob("*.arrow"))) == 1, "the old entry is gone"


def test_failed_conversion_leaves_no_file(write, question_rows, cache):
    path = write(question_rows(3))
    with Path(path).open("rb") as file:
        whole = file.read()
    with Path(path).open("wb") as file:
        file.write(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with raises("data.unreadable-file", "train.parquet"):
        read(path, str(cache))
    assert not list(cache.glob("*")) and not list(cache.glob(".*"))


def test_unwritable_cache_folder_is_an_error(write, question_rows, cache, tmp_path):
    (tmp_path / "file").touch()
    with raises("data.cache-unwritable", "data.cache_dir", "file/cache"):
        read(write(question_rows(1)), str(tmp_path / "file" / "cache"))


def test_default_cache_folder(write, question_rows, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    read(write(question_rows(1)))
    assert list((tmp_path / "xdg/megarl/data").glob("train-*.arrow"))


def test_dictionary_columns_are_read(tmp_path, question_rows, cache):
    table = pa.Table.from_pylist(question_rows(3))
    at = table.schema.get_field_index("data_source")
    table = table.set_column(at, "data_source", table.column("data_source").dictionary_encode())
    pq.write_table(table, tmp_path / "train.parquet")
    assert read(str(tmp_path / "train.parquet"), str(cache))[2]["data_source"] == "toy"


def test_json_values_keep_their_types(write_lines, question_rows, cache):
    content = question_rows(3)
    content[0]["reward_model"]["ground_truth"] = {"target": ["a", "b"]}
    content[1]["reward_model"]["ground_truth"] = [1, "two"]
    content[2]["only_here"] = 3.5
    content[1].pop("extra_info")
    source = read(write_lines(content), str(cache))
    assert [source[row]["reward_model"]["ground_truth"] for row in range(3)] == [
        {"target": ["a", "b"]},
        [1, "two"],
        "2",
    ]
    assert [source[row]["only_here"] for row in range(3)] == [None, None, 3.5]
    assert source[1]["extra_info"] is None
    assert len(list(cache.glob("*.npz"))) == 1 and len(list(cache.glob("*.checked"))) == 1


def test_json_list(tmp_path, question_rows):
    (tmp_path / "list.json").write_text(json.dumps(question_rows(3), indent=1), encoding="utf-8")
    assert everything(read(str(tmp_path / "list.json"))) == question_rows(3)
    assert check_files(str(tmp_path / "list.json"), RLHF_COLUMNS, "data.val_files", "prompt") == 3


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"prompt": 4}, "data.column-type", "it is 4"),
        ({"prompt": ""}, "data.empty-prompt", "text"),
        ({"prompt": []}, "data.empty-prompt", "message"),
        ({"prompt": [{"role": "user"}]}, "data.null-value", "'content'"),
        ({"prompt": [{"role": "user", "content": 1}]}, "data.column-type", "'content': 1"),
        ({"data_source": 7}, "data.column-type", "not 7"),
        ({"data_source": None}, "data.null-value", "a value"),
        ({"reward_model": {}}, "data.column-type", '"ground_truth"'),
        ({"reward_model": {"ground_truth": None}}, "data.null-value", "'ground_truth'"),
    ],
)
def test_malformed_json_value_is_named_by_file_column_and_row(write_lines, question_rows, cache, change, code, value):
    content = question_rows(3)
    content[1] |= change
    path = write_lines(content)
    for check in (
        lambda: read(path, str(cache)),
        lambda: check_files(path, RLHF_COLUMNS, "data.train_files", "prompt"),
    ):
        with raises(code, "rows.jsonl", *(f"column {name!r}" for name in change), "row 1", value):
            check()


@pytest.mark.parametrize(("line", "code"), [("{", "data.not-json"), ("[1]", "data.row-not-object")])
def test_malformed_line_is_named(write_lines, question_rows, tmp_path, line, code):
    path = write_lines(question_rows(1))
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with raises(code, path, "line 2"):
        read(path)
    with raises(code, path, "line 2"):
        check_files(path, RLHF_COLUMNS, "data.train_files", "prompt")


def test_json_without_a_column(write_lines):
    with raises("data.missing-column", "'data_source'", "did you mean 'data_sourc'"):
        read(write_lines([{"prompt": [{"role": "user", "content": "a"}], "data_sourc": "b", "reward_model": {}}]))
    with raises("data.no-rows", "none.jsonl"):
        check_files(write_lines([], "none.jsonl"), RLHF_COLUMNS, "data.train_files", "prompt")


def test_folders_of_hugging_face_datasets(tmp_path, question_rows):
    content = question_rows(3)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(content)}).save_to_disk(str(tmp_path / "splits"))
    with raises("data.several-splits", "splits/train"):
        read(str(tmp_path / "splits"))
    assert everything(read(str(tmp_path / "splits/train"))) == content
    with raises("data.unknown-folder", f"{tmp_path}/*.parquet"):
        read(str(tmp_path))
    (tmp_path / "splits/train/state.json").write_text("{}", encoding="utf-8")
    with raises("data.unreadable-file", "state.json"):
        read(str(tmp_path / "splits/train"))


def test_shards_of_a_saved_data_set(tmp_path, question_rows):
    content = question_rows(7)
    datasets.Dataset.from_list(content).select([6, 0, 3, 4]).save_to_disk(str(tmp_path / "hf"), num_shards=2)
    assert everything(read(str(tmp_path / "hf"))) == [content[row] for row in (6, 0, 3, 4)]


def test_expand_files(tmp_path, monkeypatch):
    for name in ("b.parquet", "a.parquet", "deep/c.parquet", "[1].parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", "deep")
    root = str(tmp_path)
    assert expand_files("~/a.parquet") == [f"{root}/a.parquet"]
    assert expand_files(["$HOME/$WHERE/*.parquet", "~/[ab].parquet"]) == [
        f"{root}/deep/c.parquet",
        f"{root}/a.parquet",
        f"{root}/b.parquet",
    ]
    assert expand_files(f"{root}/[1].parquet") == [f"{root}/[1].parquet"], "a file of that name is no pattern"
    assert f"{root}/deep/c.parquet" in expand_files(f"{root}/**/*.parquet")
    with raises("data.pattern-no-match", "~/*.arrow"):
        expand_files("~/*.arrow")
    with raises("data.remote-path", "hdfs://a/b", "hub.enable=true"):
        expand_files("hdfs://a/b")
