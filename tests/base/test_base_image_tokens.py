"""Token ids of images, their positions, and their place in a sequence."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.base.image_tokens import (
    LARGEST_SIDE,
    Image,
    ImageSpan,
    image_key,
    image_spans,
    multimodal_positions,
    shown_images,
    unpack_ids,
    with_placeholders,
)

images = st.builds(Image.of, st.binary(max_size=8), st.integers(1, 6), st.integers(1, 6))
sequences = st.lists(st.one_of(st.integers(0, 2**31 - 1), images), max_size=12)


def ids_of(parts):
    return [number for part in parts for number in (part.token_ids if isinstance(part, Image) else [part])]


def positions_by_hand(parts):
    """Section 2.1 of Qwen2-VL's paper, token by token."""
    rows, following = [], 0
    for part in parts:
        if isinstance(part, Image):
            rows += [
                (following, following + row, following + column)
                for row in range(part.rows)
                for column in range(part.columns)
            ]
            following = max(max(position) for position in rows[-part.rows * part.columns :]) + 1
        else:
            rows.append((following,) * 3)
            following += 1
    return rows


@given(sequences)
def test_images_are_found_where_they_were_put(parts):
    spans, at = [], 0
    for part in parts:
        if isinstance(part, Image):
            spans.append(ImageSpan(at, part.key, part.rows, part.columns))
            at += part.rows * part.columns
        else:
            at += 1
    assert image_spans(ids_of(parts)) == spans


@given(sequences)
def test_positions_equal_those_by_hand(parts):
    positions = multimodal_positions(ids_of(parts))
    assert positions.dtype == np.int64
    assert list(zip(*positions.tolist(), strict=True)) == positions_by_hand(parts)


@given(sequences)
def test_placeholders(parts):
    once = [9 if isinstance(part, Image) else part for part in parts]
    each = ids_of([[9] * len(part.token_ids) if isinstance(part, Image) else [part] for part in parts])
    assert with_placeholders(ids_of(parts), 9, once=True) == once
    assert with_placeholders(ids_of(parts), 9) == [number for part in each for number in part]


@given(st.binary(max_size=8), st.integers(1, LARGEST_SIDE))
def test_an_id_names_image_row_and_column(data, side):
    for image in (Image.of(data, 1, side), Image.of(data, side, 1)):
        ids = np.array(image.token_ids)
        keys, rows, columns = unpack_ids(ids)
        assert (ids < 0).all() and len(set(image.token_ids)) == side
        assert set(keys.tolist()) == {image.key}
        assert rows.tolist() == (list(range(side)) if image.rows == side else [0] * side)
        assert columns.tolist() == (list(range(side)) if image.columns == side else [0] * side)


def test_a_key_is_the_start_of_a_digest():
    digest = hashlib.blake2b(b"picture", digest_size=8).digest()
    assert image_key(b"picture") == int.from_bytes(digest, "little") // 2**23
    assert image_key(b"picture") != image_key(b"another")


@pytest.mark.parametrize("cut", [slice(1, None), slice(0, -1), slice(None, None, -1), slice(0, None, 2)])
def test_a_part_of_an_image_is_refused(cut):
    with pytest.raises(ValueError, match="image"):
        image_spans([5, *Image.of(b"x", 2, 3).token_ids[cut], 6])


def test_text_within_an_image_is_refused():
    ids = Image.of(b"x", 2, 3).token_ids
    with pytest.raises(ValueError, match="image"):
        image_spans([*ids[:3], 7, *ids[3:]])


@given(sequences)
def test_images_without_tokens_are_left_out(parts):
    inside, outside = [part for part in parts if isinstance(part, Image)], Image.of(b"outside of all", 1, 1)
    assert shown_images(ids_of(parts), [*inside, outside]) == inside
