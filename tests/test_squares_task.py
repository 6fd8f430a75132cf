"""The vision example's task: pictures with the counted squares, equal for equal seeds, and an imperfect warm-up."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
from make_squares import CELL, CELLS, MOST_SQUARES, SIDE
from PIL import Image
from support.squares_task import make_squares_task


def counted(data):
    """Count the cells with a dark pixel."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
    cells = pixels.reshape(CELLS, CELL, CELLS, CELL).min((1, 3))
    return int((cells < 200).sum())


def test_pictures_have_the_counted_squares(tmp_path):
    folders = [make_squares_task(tmp_path / name, "--num-train", "99") for name in ("a", "b")]
    rows, again = (pq.read_table(folder / "data" / "train.parquet").to_pylist() for folder in folders)
    assert rows == again and len({row["images"][0]["bytes"] for row in rows}) == len(rows)
    answers = [int(row["reward_model"]["ground_truth"]) for row in rows]
    assert [counted(row["images"][0]["bytes"]) for row in rows] == answers
    assert set(answers) == set(range(1, MOST_SQUARES + 1))
    assert {row["prompt"][0]["content"] for row in rows} == {"<image>How many squares?"}
    picture = Image.open(io.BytesIO(rows[0]["images"][0]["bytes"]))
    assert picture.size == (SIDE, SIDE) and picture.mode == "RGB"


def test_the_warm_up_leaves_room(tmp_path, capsys):
    folder = make_squares_task(tmp_path / "task", "--num-test", "200", "--hidden", "64", "--warm-up", "200")
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["out"] == str(folder) and 0.25 < report["accuracy"] < 0.6
