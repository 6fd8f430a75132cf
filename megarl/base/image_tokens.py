"""Token ids of images.

A prompt has one token for each patch of an image that the language model sees. The id of such a token is negative. It
names the image, by a digest of its file, and the row and column of the patch. So token ids alone identify a prompt with
its images: shared prompts, prefix caches and routers compare ids and need nothing else. Positions follow from the ids,
too (:func:`multimodal_positions`), and a slice of a sequence still names the features of its tokens.

The digest has 41 bits: among 10,000 images, two have the same one with a probability of 2e-5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from megarl.base.errors import DataError

_SIDE_BITS = 11
_SIDE_MASK = (1 << _SIDE_BITS) - 1
_KEY_BITS = 63 - 2 * _SIDE_BITS
LARGEST_SIDE = 1 << _SIDE_BITS
"""Most rows, and most columns, of an image's tokens."""

PLACEHOLDER = "<image>"
"""Text that stands for an image, as in verl's data sets."""


class RemoteFile(ABC):
    """An encoded file in a store, which keeps it as long as a reference to it exists."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the size in bytes; reads nothing."""

    @abstractmethod
    def read(self) -> bytes:
        """Copy the file into this process."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt; :meth:`of` computes its key. Two images with one key and shape are equal.

    Attributes:
        file: the encoded file, such as a PNG, or a reference to it; ``len(file)`` is its size in both cases.
        rows: rows of its tokens; a row has ``columns`` tokens.
        key: digest of the file (:func:`image_key`), as the ids of its tokens contain it.
    """

    file: bytes | RemoteFile = field(compare=False, repr=False)
    rows: int
    columns: int
    key: int

    @classmethod
    def of(cls, data: bytes, rows: int, columns: int) -> Image:
        """Build the image of an encoded file."""
        return cls(data, rows, columns, image_key(data))

    @property
    def data(self) -> bytes:
        """The encoded file; each access reads a remote one."""
        return self.file.read() if isinstance(self.file, RemoteFile) else self.file

    @property
    def fields(self) -> tuple[bytes, int, int, int]:
        """Arguments that build the image again, with its file; checkpoints store them."""
        return self.data, self.rows, self.columns, self.key

    @property
    def token_ids(self) -> list[int]:
        """Ids of its tokens, row after row."""
        row, column = np.divmod(np.arange(self.rows * self.columns, dtype=np.int64), self.columns)
        ids: list[int] = (-1 - (self.key << 2 * _SIDE_BITS | row << _SIDE_BITS | column)).tolist()
        return ids


class ImageSpan(NamedTuple):
    """The tokens of an image in a sequence: ``[start, start + rows * columns)``."""

    start: int
    key: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """End of the tokens, exclusive."""
        return self.start + self.rows * self.columns


def image_key(data: bytes) -> int:
    """Compute the digest of an image's file, of 41 bits."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> (64 - _KEY_BITS)


def equal_keys_error(key: int) -> DataError:
    """Return the error of two different images with one key."""
    text = f"two images have the key {key:x}, which token ids name them by; encode the file of one of them anew"
    return DataError(text, code="image.equal-keys")


def unpack_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the image keys, rows and columns of negative token ids ``[n]``."""
    packed = -1 - ids.astype(np.int64)
    return packed >> 2 * _SIDE_BITS, packed >> _SIDE_BITS & _SIDE_MASK, packed & _SIDE_MASK


def shown_images(ids: Sequence[int] | np.ndarray, images: Sequence[Image]) -> list[Image]:
    """Return the images of which a sequence has tokens."""
    if not images:
        return []
    values = np.asarray(ids, dtype=np.int64)
    keys = set(unpack_ids(values[values < 0])[0].tolist())
    return [image for image in images if image.key in keys]


def image_spans(ids: Sequence[int] | np.ndarray) -> list[ImageSpan]:
    """Find the images in a sequence of token ids.

    Raises:
        ValueError: the tokens of an image are incomplete or out of order.
    """
    values = np.asarray(ids, dtype=np.int64)
    at = np.flatnonzero(values < 0)
    if not len(at):
        return []
    keys, rows, columns = unpack_ids(values[at])
    first = np.flatnonzero((rows == 0) & (columns == 0))
    if not len(first) or first[0]:
        raise ValueError(f"the sequence begins within an image, at token {at[0]}")
    spans = []
    for begin, end in zip(first, [*first[1:], len(at)], strict=True):
        width = int(columns[begin:end].max()) + 1
        span = ImageSpan(int(at[begin]), int(keys[begin]), (end - begin) // width, width)
        row, column = np.divmod(np.arange(end - begin), width)
        in_order = (keys[begin:end] == span.key) & (rows[begin:end] == row) & (columns[begin:end] == column)
        if span.stop - span.start != end - begin or at[end - 1] != span.stop - 1 or not in_order.all():
            raise ValueError(f"the tokens of the image at token {span.start} are incomplete or out of order")
        spans.append(span)
    return spans


def multimodal_positions(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Compute the positions of a sequence's tokens in time, height and width: ``[3, tokens]`` int64.

    Multimodal rotary position embedding (M-RoPE) of Qwen2-VL, section 2.1 of https://arxiv.org/abs/2409.12191: the
    three positions of a text token are equal. The tokens of an image share the first position after the text before
    it, plus row and column; the text after it continues at the largest of them plus one.
    """
    positions = np.empty((3, len(ids)), dtype=np.int64)
    done, following = 0, 0
    for span in image_spans(ids):
        text = span.start - done
        positions[:, done : span.start] = np.arange(following, following + text)
        start = following + text
        row, column = np.divmod(np.arange(span.stop - span.start), span.columns)
        positions[0, span.start : span.stop] = start
        positions[1, span.start : span.stop] = start + row
        positions[2, span.start : span.stop] = start + column
        done, following = span.stop, start + max(span.rows, span.columns)
    positions[:, done:] = np.arange(following, following + len(ids) - done)
    return positions


def with_placeholders(ids: Sequence[int], placeholder: int, *, once: bool = False) -> list[int]:
    """Replace the tokens of images by a token of the vocabulary.

    Args:
        placeholder: the model's image token.
        once: one placeholder for an image, not one for each of its tokens.
    """
    if not once:
        return [placeholder if number < 0 else number for number in ids]
    replaced, done = list[int](), 0
    for span in image_spans(ids):
        replaced += [*ids[done : span.start], placeholder]
        done = span.stop
    return [*replaced, *ids[done:]]
