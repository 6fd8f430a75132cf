"""Thumbnails: bounded copies of pictures, without a byte of their files."""

import io

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.expected_errors import raises
from support.vision_models import png

from megarl.base.image_files import THUMBNAIL_SIDE, thumbnail


def opened(data):
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "WEBP"
    return picture


@pytest.mark.parametrize(("height", "width", "size"), [(480, 640, (160, 120)), (640, 16, (4, 160)), (30, 20, (20, 30))])
def test_a_thumbnail_keeps_the_sides_ratio_and_is_never_larger(height, width, size):
    small = thumbnail(png(height, width), "x")
    assert opened(small).size == size
    assert len(small) < 20_000, "the largest are of noise"
    again = thumbnail(small, "x", THUMBNAIL_SIDE**2)
    assert opened(again).size == size


def test_a_thumbnail_has_the_colors_alone():
    pixels = np.zeros((300, 300, 3), np.uint8)
    pixels[:, 150:] = (250, 200, 10)
    note, file = PngInfo(), io.BytesIO()
    note.add_text("Comment", "hidden words")
    Image.fromarray(pixels).save(file, "PNG", pnginfo=note)
    small = thumbnail(file.getvalue(), "x")
    assert b"hidden words" in file.getvalue() and b"hidden words" not in small
    read = np.asarray(opened(small).convert("RGB"), float)
    assert np.abs(read[:, :70] - 0).max() < 12 and np.abs(read[:, 90:] - (250, 200, 10)).max() < 12


def test_damaged_and_large_files_are_refused():
    with raises("image.damaged", "row 3"):
        thumbnail(png(64, 64)[:-2000], "row 3")
    with raises("image.too-many-pixels", "161 x 160", 160**2):
        thumbnail(png(160, 161), "x", 160**2)
