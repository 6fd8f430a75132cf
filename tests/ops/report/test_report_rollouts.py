"""Selection and shortening of samples in the report."""

import base64
import io
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from report_runs import HOSTILE, sample

from megarl.ops.report.rollouts import MAX_TEXT, read_rollouts, select_evenly, shorten, token_columns
from megarl.ops.report.run_files import RunRecord, read_run
from megarl.tracking.sample_files import SampleFiles, begin_samples, step_files, write_samples
from megarl.tracking.token_columns import TokenValues

PLENTY = 10_000_000


def run_of(folder):
    return RunRecord(folder, "run", [])


def test_samples_are_selected_evenly_and_counted(tmp_path):
    for kind, steps in (("train", (1, 2, 10)), ("validation", (0,))):
        for step in steps:
            path = tmp_path / "samples" / kind / f"{step}.jsonl"
            write_samples(path, [{"input": f"q{n}", "output": "a", "gts": "g", "score": n} for n in range(100)])
            with path.open("a", encoding="utf-8") as file:
                file.write('{"input": "half wri')
    (tmp_path / "samples" / "train" / "notes.jsonl").write_text("not a dump", encoding="utf-8")
    selection = read_rollouts([run_of(tmp_path)], PLENTY, max_rows=40)
    assert selection.total == 400 and len(selection.rows) == 40 and selection.cut == 0
    assert [row["step"] for row in selection.rows[::10]] == [1, 2, 10, 0]
    assert [row["kind"] for row in selection.rows[::10]] == ["train"] * 3 + ["validation"]
    assert [row["score"] for row in selection.rows[:10]] == [float(11 * number) for number in range(10)]
    few = read_rollouts([run_of(tmp_path)], PLENTY, max_rows=3)
    assert [row["step"] for row in few.rows] == [1, 10, 0], "fewer than one of each step"
    assert read_rollouts([run_of(tmp_path / "nowhere")], PLENTY).rows == []
    assert read_rollouts([run_of(tmp_path)], 0).rows == []


def test_runs_share_the_row_limit(make_run):
    runs = [read_run(make_run(name)) for name in ("a", "b")]
    selection = read_rollouts(runs, PLENTY, max_rows=4)
    assert [(row["run"], row["step"]) for row in selection.rows] == [(0, 1), (0, 10), (1, 1), (1, 10)]


def test_row_contains_the_values_of_its_line(make_run):
    line = sample(1, 1, HOSTILE, pred=7, gts={"a": [1]}, advantage=-0.25, masked=[[0, 9]])
    (row,) = read_rollouts([read_run(make_run(samples={1: [line]}))], PLENTY).rows
    assert row["gts"] == '{"a": [1]}' and row["output"] == HOSTILE and row["extra"] == {"pred": "7"}
    assert (row["source"], row["length"], row["score"], row["advantage"]) == ("odd", 5, 1.0, -0.25)
    assert row["masked"] == [[0, 9]] and row["tokens"] == line["tokens"]


def test_incomplete_lines_are_shown(tmp_path):
    lines = [
        '{"input": "q", "score": NaN}',
        '{"score": "high", "masked": [[5, 2]]}',
        "[]",
        '{"tokens": {"characters": 3}}',
    ]
    folder = tmp_path / "samples" / "train"
    folder.mkdir(parents=True)
    (folder / "1.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = read_rollouts([run_of(tmp_path)], PLENTY).rows
    assert len(rows) == 3, "a list is not a sample"
    assert {row["score"] for row in rows} == {None} and all(row["masked"] is row["tokens"] is None for row in rows)
    (folder / "1.jsonl").write_text(json.dumps({"output": "a\u2028b\x85"}, ensure_ascii=False), encoding="utf-8")
    assert read_rollouts([run_of(tmp_path)], PLENTY).rows[0]["output"] == "a\u2028b\x85"


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=1500),
    spans=st.lists(st.integers(0, 40_000), max_size=6, unique=True),
)
def test_long_answer_is_cut_at_token_boundaries(counts, spans):
    """The remaining tokens keep their values and masks."""
    counts = [*counts, 13_000 if sum(counts) % 2 else 7]
    text = "".join(chr(0x4E00 + number) * count for number, count in enumerate(counts))
    values = {"number": np.arange(len(counts)) % 1000}
    borders = sorted(border for border in spans if border <= len(text))
    masked = [list(pair) for pair in zip(borders[::2], borders[1::2], strict=False)]
    line = {"output": text, "tokens": TokenValues.of(counts, values).encoded(), "masked": masked}
    row = _only(line)
    if len(text) <= MAX_TEXT:
        assert row["output"] == text and row["tokens"] == line["tokens"]
        return
    tokens = TokenValues.decode(row["tokens"], len(row["output"]))
    assert tokens is not None and len(row["output"]) <= MAX_TEXT + 60
    at = 0
    for count, value in zip(tokens.characters.tolist(), tokens.columns["number"].tolist(), strict=True):
        piece = row["output"][at : at + count]
        at += count
        if np.isnan(value):
            assert "characters left out" in piece
        elif piece:
            assert len(set(piece)) == 1 and (ord(piece[0]) - 0x4E00) % 1000 == value
    kept = {letter for begin, end in row["masked"] or () for letter in row["output"][begin:end]}
    assert kept <= {letter for begin, end in masked for letter in text[begin:end]}


def picture(width=20, height=10, color=(200, 30, 30), kind="PNG", **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def test_images_of_the_selected_rows_are_encoded_again(make_run):
    """No byte of a file in the run's folder reaches the page, and what is no small picture is left out."""
    note = PngInfo()
    note.add_text("Comment", "taken")
    large = picture(4000, 4000)
    thumbnails = {"a1": picture(pnginfo=note), "b2": picture(161, 160), "c3": large, "d4": "?", "e5": [], "f6": "AAAA"}
    first = sample(0, 1, images=[*thumbnails, "a1", HOSTILE, 7], thumbnails=thumbnails)
    lines = [first, sample(1, 1, images="a1", thumbnails=[1]), sample(2, 1, images=["a1"], later_images=["g7"])]
    lines.append(sample(3, 1, later_images=["70"], thumbnails={"70": picture()}))
    selection = read_rollouts([read_run(make_run(samples={1: lines}))], PLENTY)
    assert [row["images"] for row in selection.rows] == [[*thumbnails, "a1", "", ""], None, ["a1"], None]
    assert [row["later_images"] for row in selection.rows] == [None, None, [""], ["70"]]
    assert all(row["extra"] == {} for row in selection.rows)
    assert list(selection.thumbnails) == ["a1", "70"]
    shown = base64.b64decode(selection.thumbnails["a1"])
    assert b"taken" in base64.b64decode(thumbnails["a1"]) and b"taken" not in shown
    read = Image.open(io.BytesIO(shown))
    assert (read.format, read.size) == ("WEBP", (20, 10))
    assert np.abs(np.asarray(read, float) - (200, 30, 30)).max() < 8


def test_thumbnails_take_a_quarter_of_the_budget(make_run):
    noise = np.random.default_rng(0).integers(0, 256, (50, 160, 160, 3), dtype=np.uint8)
    lines = []
    for number, pixels in enumerate(noise):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "WEBP")
        stored = {f"{number:x}": base64.b64encode(file.getvalue()).decode()}
        lines.append(sample(number, 1, images=list(stored), thumbnails=stored))
    run = read_run(make_run(samples={1: lines}))
    whole, half = (read_rollouts([run], budget) for budget in (PLENTY, 1_200_000))
    assert len(whole.thumbnails) == len(half.rows) == 50
    assert 0 < len(half.thumbnails) < 50 and sum(map(len, half.thumbnails.values())) <= 300_000
    assert {"0", "31"} <= half.thumbnails.keys(), "an even selection"
    assert read_rollouts([run], 0).thumbnails == {}


def _only(line):
    from megarl.ops.report.rollouts import _row

    return _row(line, 1, "train", 0)[0]


def test_shortened_texts_contain_the_number_of_removed_characters(make_run):
    text = "a" * 10 + "b" * 10
    assert shorten(text, 20) == text
    assert shorten(text, 8) == "aaaa\n[… 12 characters left out …]\nbbbb"
    long = {"input": "q" * 20_000, "output": "ab" * 10_000, "masked": [[0, 8000], [15_000, 16_000]]}
    selection = read_rollouts([read_run(make_run(samples={1: [long]}))], PLENTY)
    (row,) = selection.rows
    assert selection.cut == 1 and "[… 8,000 characters left out …]" in row["output"] and len(row["input"]) < 12_050
    gap = len("\n[… 8,000 characters left out …]\n")
    assert row["masked"] == [[0, 6000], [6000 + gap + 1000, 6000 + gap + 2000]]


@pytest.mark.parametrize("length", [0, 1, 2, 5, 16, 17, 33, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 16])
def test_evenly_spaced(length, count):
    chosen = select_evenly(range(length), count)
    assert len(chosen) == min(length, count) and chosen == sorted(set(chosen))
    if length >= count >= 2:
        assert (chosen[0], chosen[-1]) == (0, length - 1)


def test_colour_range_excludes_the_extremes():
    values = np.concatenate([np.linspace(-1, 1, 1000), [1e4]])
    coded = TokenValues.of([1] * 1001, {"advantage": values, "unknown": values}).encoded()
    (column,) = token_columns([{"tokens": coded, "output": "x" * 1001}, {"tokens": None, "output": ""}])
    assert column["name"] == "advantage" and column["scale"] == "signed"
    assert (column["low"], column["high"]) == pytest.approx((-0.96, 0.96), abs=0.01)


def test_sample_files_stay_within_their_limit(tmp_path):
    files = SampleFiles(tmp_path, limit_bytes=12_000)
    for step in range(1, 101):
        files.add(step, [{"output": "x" * 980}])
        assert sum(path.stat().st_size for path in step_files(tmp_path)) <= 12_000
    steps = [int(path.stem) for path in step_files(tmp_path)]
    assert steps[0] == 1 and steps[-1] == 100 and len(steps) >= 5
    gaps = {after - before for before, after in pairwise(steps[1:-1])}
    assert gaps == {16}, "evenly select_evenly"
    files = SampleFiles(tmp_path, limit_bytes=12_000)  # the run continues
    files.add(101, [{"output": "x" * 980}])
    assert (tmp_path / "101.jsonl").exists()


def test_new_run_replaces_older_samples(tmp_path):
    folder = tmp_path / "samples"
    for step in (1, 2, 3):
        write_samples(folder / "train" / f"{step}.jsonl", [{}])
    begin_samples(folder, resumed_step=2)
    assert [path.name for path in step_files(folder / "train")] == ["1.jsonl", "2.jsonl"]
    begin_samples(folder, resumed_step=None)
    assert not folder.exists() and (tmp_path / "samples.old" / "train" / "1.jsonl").exists()
    begin_samples(folder, None)
