"""The zoom example: a small picture hides its squares, a crop shows them, and the loop rewards the right answer."""

import asyncio
import io
import json
import random

import numpy as np
import pytest
from make_squares import CELL, IMAGE, SIDE
from make_zoom import BOX, GREY, MOST_SQUARES, TINT, demonstrations, draw_picture, main, picture_row
from PIL import Image
from transformers import AutoTokenizer

from examples.zoom_agent import ZoomAgent, quarter
from megarl.agents import Conversation
from megarl.agents.runner import lead_conversation
from megarl.base.image_files import ImageProcessor
from megarl.data.images import IMAGES, ImageReader
from megarl.rewards import AGENT_RESULT
from megarl.rollout.interface import Completion, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoom")
    main(["--out", str(path), "--num-train", "4", "--num-test", "4", "--hidden", "32", "--warm-up", "1"])
    return path / "model"


@pytest.fixture(scope="module")
def pictures():
    rng = random.Random(3)
    return [draw_picture(rng) for _ in range(40)]


def test_a_small_picture_hides_the_squares_and_a_crop_shows_them(pictures):
    for picture in pictures:
        small = np.asarray(Image.open(io.BytesIO(picture.png)).resize((SIDE, SIDE), BOX))
        for number, squares in enumerate(picture.squares):
            top, left = (SIDE // 2 * at for at in divmod(number, 2))
            shown = small[top : top + SIDE // 2, left : left + SIDE // 2].reshape(-1, 3)
            assert (shown == (TINT if number == picture.tinted else GREY)).all()
            crop = np.asarray(quarter(picture.png, number), np.int64)
            cells = crop.reshape(SIDE // CELL, CELL, SIDE // CELL, CELL, 3)
            assert int((np.ptp(cells, axis=(1, 3)).max(-1) > 100).sum()) == squares
    assert {int(picture.answer) for picture in pictures} == set(range(1, MOST_SQUARES + 1))


def test_equal_seeds_draw_equal_pictures():
    first, second = (draw_picture(random.Random(5)) for _ in range(2))
    assert first == second


def test_demonstrations_target_the_policys_turns(folder, pictures):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs, targets = demonstrations(folder, tokenizer, pictures[:3], [1, 0, 3])
    assert (inputs["input_ids"] == tokenizer.convert_tokens_to_ids(IMAGE)).sum() == 3 * 2 * 4
    for picture, zoom, row in zip(pictures, [1, 0, 3], targets.tolist(), strict=False):
        written = tokenizer.decode([number for number in row if number >= 0])
        assert written == f"{zoom + 1}<|im_end|>{picture.squares[zoom]}<|im_end|>"


@pytest.mark.parametrize(("turns", "score", "shown"), [("right", 1.0, 1), ("wrong", 0.0, 1), ("lost", 0.0, 0)])
def test_the_loop_shows_the_named_quarter(folder, pictures, turns, score, shown):
    picture, tokenizer = pictures[0], AutoTokenizer.from_pretrained(folder)
    reader = ImageReader(ImageProcessor(str(folder)), tokenizer.convert_tokens_to_ids(IMAGE))
    image = reader.processor.read(picture.png, "picture")
    assert image.rows * image.columns == 4
    other = str(MOST_SQUARES + 1 - int(picture.answer))
    texts = {"right": [str(picture.tinted + 1), picture.answer], "wrong": ["2", other], "lost": ["H"]}[turns]
    replies = iter(texts)

    async def generate(prompt_ids, params, *, seed, key):
        ids = tokenizer(f"{next(replies)}<|im_end|>", add_special_tokens=False)["input_ids"]
        assert params.max_new_tokens == 2
        return Completion("r", ids, [-1.0] * len(ids), "stop", 0)

    facts = {IMAGES: (image,), "reward_model": picture_row(picture, "test", 0)["reward_model"]}
    conversation = Conversation(
        [], SamplingParams(32), [*image.token_ids, 5], facts=facts, image_reader=reader, images=[image]
    )
    trajectory = asyncio.run(lead_conversation(conversation, ZoomAgent(tokenizer), generate))
    assert trajectory.error is None and len(trajectory.images) == shown
    assert trajectory.fields[AGENT_RESULT] == {"score": score} and trajectory.metrics == {"zoomed": float(shown)}
    if shown:
        crop = np.asarray(Image.open(io.BytesIO(trajectory.images[0].data)))
        assert (crop == np.asarray(quarter(picture.png, int(texts[0]) - 1))).all()


def test_settings_hide_the_squares(folder):
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert settings["max_pixels"] == settings["min_pixels"] == SIDE * SIDE and settings["resample"] == BOX
