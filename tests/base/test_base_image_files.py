"""Images from their headers, and thumbnails: bounded copies of pictures, without a byte of their files."""

import io
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.expected_errors import raises
from support.vision_models import PROCESSOR, png

from megarl.base.errors import DataError
from megarl.base.image_files import THUMBNAIL_SIDE, ImageProcessor, picture_file, thumbnail


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processor")
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return str(path)


SIDES, AREAS = st.integers(1, 420), st.integers(1, 300) | st.integers(1, 90_000)


@settings(max_examples=60, deadline=None)
@given(
    height=SIDES, width=SIDES, patch=st.sampled_from((14, 16)), merge=st.integers(1, 3), areas=st.tuples(AREAS, AREAS)
)
@example(height=1, width=200, patch=14, merge=2, areas=(1, 50_000))
@example(height=1, width=201, patch=14, merge=2, areas=(1, 50_000))
@example(height=402, width=2, patch=14, merge=2, areas=(1, 50_000))
def test_a_header_gives_the_grid_of_the_decoded_picture(folder, height, width, patch, merge, areas):
    limits = {"min_pixels": min(areas), "max_pixels": max(areas)}
    processor = ImageProcessor(folder, {"patch_size": patch, "merge_size": merge, **limits})
    file, grids = io.BytesIO(), []
    Image.new("L", (width, height)).save(file, "PNG")
    for was_checked in (False, True):
        try:
            grids.append(processor.read(file.getvalue(), "row 0", was_checked=was_checked))
        except DataError as error:
            grids.append((error.code, str(error)))
    assert grids[0] == grids[1]


def test_a_header_passes_the_same_limits(folder):
    file = io.BytesIO()
    Image.new("CMYK", (64, 64)).save(file, "JPEG")
    for data, code in ((file.getvalue(), "image.color-mode"), (b"no picture", "image.unknown-format")):
        with raises(code, "row 7"):
            ImageProcessor(folder).read(data, "row 7", was_checked=True)


def test_a_processor_that_does_not_resize_reads_the_picture(folder):
    fixed = ImageProcessor(folder, {"do_resize": False})
    image = fixed.read(png(56, 84), "x", was_checked=True)
    assert (image.data, image.rows, image.columns) == (png(56, 84), 2, 3)


def test_a_picture_is_encoded_within_the_limits(monkeypatch):
    with raises("image.too-many-pixels", "part 1", "8193 x 8192", "resize it"):
        picture_file(Image.new("1", (8193, 8192)), "part 1")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    size = len(picture_file(noise, "part 1"))
    assert size > 40 * 40 * 3
    monkeypatch.setattr("megarl.base.image_files.MAX_BYTES", size - 1)
    with raises("image.too-many-bytes", "part 1, encoded as PNG", size, "resize it, or encode it as JPEG"):
        picture_file(noise, "part 1")
