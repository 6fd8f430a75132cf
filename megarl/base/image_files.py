"""Encoded images: bounded decoding, and transformers' image processor of a model.

The processor's grid of patches decides the number of an image's tokens. It is computed where prompts are encoded, and
again, from the same file, where features are computed; both must agree.
"""

from __future__ import annotations

import difflib
import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.base.errors import DataError
from megarl.base.image_tokens import LARGEST_SIDE, Image

if TYPE_CHECKING:
    import PIL.Image

MAX_BYTES = 32 << 20
"""Largest encoded image, in bytes."""
MAX_PIXELS = 64 << 20
"""Most pixels of an image before it is resized."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Formats that are read; the decoders of others are not needed, and increase what a hostile file can attack."""
_PLAIN_CHUNKS = (b"IHDR", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"IDAT", b"IEND")
"""Chunks of a PNG that PIL applies to no pixel; tRNS makes some transparent, and SGLang may turn pictures by eXIf."""
_MODES = ("RGB", "RGBA", "L", "LA", "P", "1")
THUMBNAIL_SIDE = 160
"""Longest side of a thumbnail, in pixels."""


def decode_image(data: bytes, location: str, most_pixels: int = MAX_PIXELS) -> PIL.Image.Image:
    """Decode an image to RGB, after its header has passed the limits; transparency becomes white.

    Args:
        location: row and column of the image, for errors.

    Raises:
        DataError: the file is damaged, too large, animated, or of another format or color mode.
    """
    from PIL import Image as pil

    image = _open(data, location, most_pixels)
    try:
        image.load()
    except Exception as error:
        text = f"{location}: the image is truncated or damaged ({error!s:.120})"
        raise DataError(text, code="image.damaged") from error
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = pil.new("RGBA", image.size, "white")
        image = pil.alpha_composite(ground, image)
    return image.convert("RGB")


def _open(data: bytes, location: str, most_pixels: int = MAX_PIXELS) -> PIL.Image.Image:
    """Open an image by its header, which must pass the limits; errors as in :func:`decode_image`."""
    from PIL import Image as pil

    check_bytes(len(data), location)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PIL's own limit, which is higher
            image: PIL.Image.Image = pil.open(io.BytesIO(data), formats=FORMATS)
    except pil.DecompressionBombError as error:
        text = f"{location}: the image has more than {most_pixels} pixels; resize it ({error!s:.120})"
        raise DataError(text, code="image.too-many-pixels") from error
    except Exception as error:  # a decoder may raise any error for a damaged file
        text = f"{location}: no image in the formats {', '.join(FORMATS)} ({type(error).__name__}: {error!s:.120})"
        raise DataError(text, code="image.unknown-format") from error
    _check_pixels(image, location, most_pixels)
    if getattr(image, "n_frames", 1) > 1:
        text = f"{location}: the image has {getattr(image, 'n_frames')} frames, expected a single picture"  # noqa: B009
        raise DataError(text, code="image.animated")
    # PIL reads 16 bits per channel of a PNG as 8; only its decoder's argument has the depth.
    stored = [str(tile.args) for tile in getattr(image, "tile", ())] if image.format == "PNG" else []
    mode = next((mode for mode in stored if ";16" in mode), image.mode)
    if mode not in _MODES:
        text = f"{location}: the image has the color mode {mode!r}, expected one of {', '.join(_MODES)}, of 8 bits"
        raise DataError(text, code="image.color-mode")
    return image


def check_bytes(size: int, location: str) -> None:
    """Refuse an encoded image of more than :data:`MAX_BYTES` bytes; raises DataError."""
    if size > MAX_BYTES:
        text = f"{location}: the image has {size} bytes, at most {MAX_BYTES} are read; resize it, or encode it as JPEG"
        raise DataError(text, code="image.too-many-bytes")


def _check_pixels(image: PIL.Image.Image, location: str, most_pixels: int = MAX_PIXELS) -> None:
    if image.width * image.height > most_pixels:
        size = f"{image.width} x {image.height}"
        text = f"{location}: the image has {size} pixels, at most {most_pixels} are read; resize it"
        raise DataError(text, code="image.too-many-pixels")


def lossless_png(data: bytes, location: str) -> bytes:
    """Encode the pixels of :func:`decode_image` as a PNG that every reader decodes to the same ones.

    Returns:
        The file itself if it is such a PNG already.
    """
    if _is_plain_png(data):
        return data
    picture, file = decode_image(data, location), io.BytesIO()
    picture.info.clear()  # color profiles would be stored
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def picture_file(picture: Any, location: str) -> bytes | None:
    """Encode a PIL image as a PNG with the same pixels; None for another object.

    Raises:
        DataError: a PNG of 8 bits per channel cannot have its pixels, or there are too many.
    """
    from PIL import Image as pil

    if not isinstance(picture, pil.Image):
        return None
    if picture.mode not in _MODES:
        text = f"{location}: the image has the color mode {picture.mode!r}, expected one of {', '.join(_MODES)}"
        raise DataError(f'{text}; convert it, as with picture.convert("RGB")', code="image.color-mode")
    _check_pixels(picture, location)
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    check_bytes(file.tell(), f"{location}, encoded as PNG")
    return file.getvalue()


def image_type(data: bytes) -> str:
    """Return the media type of an encoded image, such as ``image/png``."""
    from PIL import Image as pil

    return pil.MIME[str(_open(data, "an image").format)]


def _is_plain_png(data: bytes) -> bool:
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[24:26] != b"\x08\x02":  # 8 bits, RGB
        return False
    place = 8
    while data[place + 4 : place + 8] in _PLAIN_CHUNKS:
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return place == len(data)


def thumbnail(data: bytes, location: str, most_pixels: int = MAX_PIXELS) -> bytes:
    """Encode a small copy of an image as WebP, from its pixels alone; errors as in :func:`decode_image`."""
    picture, file = decode_image(data, location, most_pixels), io.BytesIO()
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    picture.save(file, "WEBP", quality=80)
    return file.getvalue()


@dataclass(frozen=True)
class ImageProcessor:
    """The image processor of a model folder, in its variant without torchvision on every machine.

    Attributes:
        folder: model folder with ``preprocessor_config.json``.
        options: settings that replace those of the folder, such as ``max_pixels``.
    """

    folder: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, data: bytes, location: str, *, was_checked: bool = False) -> Image:
        """Decode an image completely, and find its grid of tokens; errors as in :func:`decode_image`.

        Args:
            was_checked: whether the image was read before; its header is enough then.

        Raises:
            DataError: the processor refuses the picture, for its aspect ratio for example, or it has too many tokens.
        """
        grid = self._resized_grid(data, location) if was_checked else None
        return Image.of(data, *(grid or self._process(data, location)[1:]))

    def patches(self, image: Image) -> np.ndarray:
        """Compute the input of the vision tower, ``[patches, values]`` float32.

        Raises:
            DataError: the grid differs from the image's tokens.
        """
        location = f"image {image.key:x}"
        values, rows, columns = self._process(image.data, location)
        if (rows, columns) != (image.rows, image.columns):
            raise DataError(
                f"{location}: the image processor of {self.folder} makes {rows} x {columns} tokens, but the prompt has "
                f"{image.rows} x {image.columns}; prompts and features need the same image processor",
                code="image.token-count",
            )
        return values

    @property
    def settings_file(self) -> Path:
        """File of the folder with its settings."""
        return Path(self.folder) / "preprocessor_config.json"

    @cached_property
    def merge_size(self) -> int:
        """Patches along each side of the square that becomes a token."""
        return int(self._processor.merge_size)

    def _process(self, data: bytes, location: str) -> tuple[np.ndarray, int, int]:
        picture = decode_image(data, location)
        with _named_refusal(picture, location):
            output = self._processor(images=[picture], return_tensors="np")
        _, height, width = output["image_grid_thw"][0].tolist()
        rows, columns = height // self.merge_size, width // self.merge_size
        _check_side(rows, columns, location)
        return output["pixel_values"], rows, columns

    def _resized_grid(self, data: bytes, location: str) -> tuple[int, int] | None:
        """Compute rows and columns from the header; None if the processor's module has no rule of Qwen's processors."""
        processor = self._processor
        resize = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
        if resize is None or not processor.do_resize:
            return None
        picture = _open(data, location)
        factor, size = processor.patch_size * self.merge_size, processor.size
        with _named_refusal(picture, location):
            height, width = resize(picture.height, picture.width, factor, size["shortest_edge"], size["longest_edge"])
        rows, columns = height // factor, width // factor
        _check_side(rows, columns, location)
        return rows, columns

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        if not self.settings_file.is_file():
            text = f"{self.folder} has no {self.settings_file.name}, which a model with images needs; copy it there"
            raise DataError(text, code="image.no-processor")
        processor = AutoImageProcessor.from_pretrained(
            self.folder, backend="pil", local_files_only=True, trust_remote_code=False, **self.options
        )
        known = sorted(processor.valid_kwargs.__annotations__)
        if unknown := sorted(self.options.keys() - known):  # transformers ignores them
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            text = (
                f"the image processor of {self.folder} has no setting {unknown[0]!r} (data.mm_processor_kwargs){hint}"
            )
            raise DataError(text, code="image.unknown-setting")
        return processor


@contextmanager
def _named_refusal(picture: PIL.Image.Image, location: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        text = f"{location}: the image processor refuses a picture of {picture.width} x {picture.height} pixels"
        raise DataError(f"{text}: {error}", code="image.processor-refuses") from error


def _check_side(rows: int, columns: int, location: str) -> None:
    if max(rows, columns) > LARGEST_SIDE:
        text = f"{location}: the image has {rows} x {columns} tokens, at most {LARGEST_SIDE} on a side; set max_pixels"
        raise DataError(text, code="image.too-many-tokens")
