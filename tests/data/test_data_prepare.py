"""Small files in the formats of the published data sets."""

import json

import prepare_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_data import boxed_ground_truth, main

from megarl.data import check_files
from megarl.data.rows import RLHF_COLUMNS

GSM8K = [
    {"question": "Ann has 3 boxes of 400 pens. How many?", "answer": "3*400=<<3*400=1200>>1200\n#### 1,200"},
    {"question": "How much colder?", "answer": "It is -5 now.\n#### -5"},
]
MATH = {
    "problem": "Compute $\\frac12+\\frac12\\cdot 0$.",
    "level": "Level 3",
    "type": "Algebra",
    "solution": "First \\boxed{no}, then $\\boxed{\\frac{1}{2}}$.",
}


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command; return exit status, rows by split, and error output."""

    def run_command(*arguments):
        status = main([*map(str, arguments), "--out", str(tmp_path / "out")])
        files = sorted((tmp_path / "out").glob("*.parquet"))
        rows = {file.stem: pq.read_table(file).to_pylist() for file in files}
        for file in files:
            assert check_files(str(file), RLHF_COLUMNS, "data.train_files", "prompt") == len(rows[file.stem])
        return status, rows, capsys.readouterr().err

    return run_command


def lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_gsm8k(run, tmp_path):
    status, rows, _ = run("gsm8k", "--train", lines(tmp_path / "a.jsonl", GSM8K), "--instruction", "Go.")
    assert status == 0 and set(rows) == {"train"}
    assert rows["train"][0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Ann has 3 boxes of 400 pens. How many? Go."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": GSM8K[0]["question"],
            "answer": GSM8K[0]["answer"],
        },
    }
    assert rows["train"][1]["reward_model"]["ground_truth"] == "-5"


def test_prompt_options(run, tmp_path):
    file = lines(tmp_path / "a.jsonl", GSM8K[:1])
    prompt = run("gsm8k", "--test", file)[1]["test"][0]["prompt"]
    assert len(prompt) == 1 and "####" in prompt[0]["content"]
    prompt = run("gsm8k", "--test", file, "--system-prompt", "Be brief.", "--instruction", "")[1]["test"][0]["prompt"]
    assert prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": GSM8K[0]["question"]},
    ]


def test_math_as_folders_and_as_parquet(run, tmp_path):
    for number, subject in ((10, "algebra"), (2, "algebra"), (1, "geometry")):
        file = tmp_path / "MATH/train" / subject / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**MATH, "problem": f"{subject} {number}", "level": "Level ?"}), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([MATH]), tmp_path / "test.parquet")
    status, rows, _ = run("math", "--train", tmp_path / "MATH/train", "--test", tmp_path / "test.parquet")
    assert status == 0
    asked = [row["extra_info"]["question"] for row in rows["train"]]
    assert asked == ["algebra 2", "algebra 10", "geometry 1"]
    assert [row["extra_info"]["index"] for row in rows["train"]] == [0, 1, 2]
    (row,) = rows["test"]
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    assert row["extra_info"]["difficulty"] == 3 and rows["train"][0]["extra_info"]["difficulty"] == 0
    assert "\\boxed{}" in row["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{1} or \boxed{\text{a {b}}}", r"\text{a {b}}"),
        (r"so \fbox{4}.", "4"),
        (r"is $\boxed 7$", "7"),
    ],
)
def test_boxed_ground_truth(solution, answer):
    assert boxed_ground_truth(solution) == answer


def test_questions_of_search_r1_and_original_files(run, tmp_path):
    search_r1 = lines(
        tmp_path / "nq.jsonl",
        [{"id": "a", "question": "who was first", "golden_answers": ["Ann", "A. B."], "metadata": None}],
    )
    original = lines(tmp_path / "NQ-open.jsonl", [{"question": "where is it?", "answer": ["here"]}])
    status, rows, _ = run("nq", "--train", search_r1, original)
    assert status == 0
    truths = [row["reward_model"]["ground_truth"] for row in rows["train"]]
    assert truths == [{"target": ["Ann", "A. B."]}, {"target": ["here"]}]
    assert [row["extra_info"]["question"] for row in rows["train"]] == ["who was first?", "where is it?"]
    content = rows["train"][0]["prompt"][0]["content"]
    assert content.endswith("who was first?") and "<search>" in content and "<answer>" in content

    hotpot = tmp_path / "hotpot.json"
    entry = {"_id": "1", "question": "Is it so?", "answer": "yes", "level": "hard", "type": "comparison", "context": []}
    hotpot.write_text(json.dumps([entry]), encoding="utf-8")
    status, rows, _ = run("hotpotqa", "--test", hotpot)
    assert rows["test"][0]["data_source"] == "hotpotqa"
    assert rows["test"][0]["reward_model"]["ground_truth"] == {"target": ["yes"]}
    assert rows["test"][0]["extra_info"]["level"] == "hard"


@pytest.mark.parametrize(
    ("data_set", "content", "code", "values"),
    [
        ("gsm8k", '{"question": "a", "answer": "12"}', "data.entry-malformed", ("line 1", "openai/gsm8k", "####")),
        ("gsm8k", '{"answer": "#### 1"}', "data.entry-malformed", ("line 1", "openai/gsm8k", "KeyError('question')")),
        ("gsm8k", "{", "data.not-json", ("line 1",)),
        ("gsm8k", "", "data.no-rows", ()),
        ("math", '{"problem": "a", "solution": "b"}', "data.entry-malformed", ("boxed",)),
        ("math", '{"problem": "a", "solution": "\\\\boxed{b"}', "data.entry-malformed", ("boxed",)),
        ("nq", '{"question": "a", "answer": []}', "data.entry-malformed", ("no answer",)),
        ("nq", '{"question": "a"}', "data.entry-malformed", ("golden_answers",)),
    ],
)
def test_malformed_entry_is_named(run, tmp_path, data_set, content, code, values):
    file = tmp_path / "a.jsonl"
    file.write_text(content, encoding="utf-8")
    status, rows, complaint = run(data_set, "--train", file)
    assert status == 2 and not rows
    assert f"[{code}]" in complaint and all(value in complaint for value in ("a.jsonl", *values)), complaint


def test_download_only_on_request(run, tmp_path, monkeypatch):
    status, _, complaint = run("gsm8k")
    assert status == 2
    assert complaint == "error: name files with --train and --test, or use --download [data.no-file-named]\n"
    status, _, complaint = run("math", "--download")
    assert status == 2 and "[data.no-download]" in complaint
    served = lines(tmp_path / "train.jsonl", GSM8K)
    monkeypatch.setitem(prepare_data.ORIGINS["gsm8k"].urls, "train", served.as_uri())
    status, rows, _ = run("gsm8k", "--test", served, "--download")
    assert status == 0 and len(rows["train"]) == len(rows["test"]) == 2
    assert (tmp_path / "out/original/train.jsonl").read_text(encoding="utf-8") == served.read_text(encoding="utf-8")
    monkeypatch.setitem(prepare_data.ORIGINS["gsm8k"].urls, "test", (tmp_path / "nowhere.jsonl").as_uri())
    status, _, complaint = run("gsm8k", "--download")
    assert status == 2 and "[data.download-failed]" in complaint and "--test" in complaint
