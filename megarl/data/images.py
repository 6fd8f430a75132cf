"""Images of prompts and later turns: from entries, placeholders and parts to files and tokens; imports no torch."""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.base.errors import DataError
from megarl.base.image_files import MAX_BYTES, ImageProcessor, check_bytes, image_type, picture_file
from megarl.base.image_tokens import PLACEHOLDER, Image

if TYPE_CHECKING:
    from megarl.data.rows.reader import Rows

IMAGES = "images"
"""Column of a batch with the images of each row, a tuple of :class:`~megarl.base.image_tokens.Image`."""
IMAGE_COUNTS = "image_counts"
"""Column of a batch with the number of images of each row, ``[b]`` int64."""
_PLACEHOLDERS = re.compile("(<image>|<video>)")
_SOURCES = ("bytes", "image", "path")
"""Fields of an entry, or of a part of a message, that have an image; the first that is not null counts."""
_FORM = 'the bytes of a file, its path, {"bytes": ...}, {"path": ...} or {"image": one of these}'
_PART_FIELDS = {"image": ("type", "key", *_SOURCES), "image_url": ("type", "image_url", "url", "detail")}
"""Fields of a part by its type, and of the mappings within it; the chat endpoint has added the key."""
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_TURN_FORM = 'the bytes of a file, a PIL image, or a URL "data:image/png;base64,..."'
_BLOCK = 1024


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows, for a model that takes images.

    Attributes:
        token: the model's image token.
        key: column of a row's images, a list; an entry is one of the forms in verl's data sets.
        was_checked: whether all images were read before, so that their headers are enough.
    """

    processor: ImageProcessor
    token: int
    key: str = IMAGES
    was_checked: bool = False

    def read(
        self, messages: Sequence[Mapping[str, Any]], entries: Any, location: str, folder: str
    ) -> tuple[list[dict[str, Any]], tuple[Image, ...]]:
        """Assign images to the placeholders of chat messages, in order.

        A placeholder is ``<image>`` in a text, or a part of type ``image``, which may have its own image.

        Args:
            entries: value of the row's column :attr:`key`.
            location: file and row, for errors.
            folder: folder of relative paths.

        Returns:
            The messages, with parts ``{"type": "image"}`` without data in place of the placeholders; and the images.

        Raises:
            DataError: an image cannot be read, numbers of placeholders and images differ, an image is in a system
                message, or there is a video.
        """
        shown, sources = list[dict[str, Any]](), list[Any]()
        for number, message in enumerate(messages):
            content = _parts(message["content"], f"{location}, message {number}")
            own = [_own_image(part) for part in content if part["type"] == "image"]
            if own and message["role"] == "system":
                text = f"{location}: there is an image in the system message; move it to a message of the user"
                raise DataError(text, code="image.in-system-message")
            sources += own
            parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
            shown.append({**message, "content": parts} if own else dict(message))
        column, wanted = _entries(entries), sources.count(None)
        if len(column) != wanted:
            raise DataError(
                f"{location}: the prompt has {wanted} placeholders of images ({PLACEHOLDER}, or parts of type image), "
                f"and column {self.key!r} (data.image_key) has {len(column)} images; each needs the other",
                code="image.placeholder-count",
            )
        rest = enumerate(column)
        images = list[Image]()
        for source in sources:
            where = f"{location}, an image in a message"
            if source is None:
                number, source = next(rest)
                where = f"{location}, column {self.key!r}, image {number}"
            images.append(self.processor.read(_load(source, where, folder), where, was_checked=self.was_checked))
        return shown, tuple(images)

    def identity(self, rows: Rows, numbers: Sequence[int], prompt_key: str) -> str:
        """Fingerprint of everything besides the files of ``rows`` that determines the images of some rows.

        Embedded images are not read.
        """
        settings = self.processor.settings_file
        digest = hashlib.blake2b(settings.read_bytes() if settings.is_file() else b"", digest_size=16)
        digest.update(repr(sorted(self.processor.options.items())).encode())
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            for row, values in zip(block, rows.select((self.key, prompt_key), block, has_bytes=False), strict=True):
                for path in self._paths(values, prompt_key, rows.folder(row)):
                    digest.update(_status(path).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def _paths(self, values: Mapping[str, Any], prompt_key: str, folder: str) -> Iterator[Path]:
        prompt = values[prompt_key]
        contents = [] if isinstance(prompt, str) else [message["content"] for message in prompt]
        parts = itertools.chain.from_iterable(content for content in contents if isinstance(content, list))
        for entry in (*_entries(values[self.key]), *parts):
            while isinstance(entry, Mapping):
                entry = _own_image(entry)
            if isinstance(entry, str):
                yield _absolute(entry, folder)


def read_parts(
    messages: Sequence[Mapping[str, Any]], reader: ImageReader | None, location: str, first: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Image]]:
    """Read the images in messages of a tool, a loop or a client by their headers.

    No file and no address is opened. A content is a text, in which ``<image>`` has no meaning, or a list of parts, see
    :func:`part_file`. An image may still be damaged: decode it, once its tokens have room.

    Args:
        reader: of the policy; None = it reads text alone.
        location: a part in errors, with ``{}`` for the numbers of its message and itself.
        first: number of the first message in errors.

    Returns:
        The messages, with one text each, or with parts of type ``image`` without data; and the images by location.

    Raises:
        DataError: an image cannot be read, the policy reads none, or a part has another type.
    """
    shown, images = list[dict[str, Any]](), dict[str, Image]()
    for number, message in enumerate(messages, first):
        content = message.get("content")
        if not isinstance(content, Sequence) or isinstance(content, str):
            shown.append(dict(message))
            continue
        parts, before = list[dict[str, Any]](), len(images)
        for place, part in enumerate(content):
            where = location.format(number, place)
            if (file := part_file(part, where)) is None:
                parts.append({"type": "text", "text": part["text"]})
                continue
            if reader is None:
                raise DataError(f"{where}: the policy reads text alone, and no images", code="image.text-model")
            images[where] = reader.processor.read(file, where, was_checked=True)
            parts.append({"type": "image"})
        has_images = len(images) > before
        shown.append({**message, "content": parts if has_images else "".join(part["text"] for part in parts)})
    return shown, images


def part_file(part: Any, location: str) -> bytes | None:
    """Return the encoded image of a part; None for a text.

    Args:
        part: ``{"type": "text", "text": ...}``; ``{"type": "image", "image": ...}`` with a file's bytes or a PIL image;
            or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``, with the file in a data URL.

    Raises:
        DataError: the part has another type, no image in these forms, or a field that would have no effect.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    source, outer = part if kind in _PART_FIELDS else None, True
    while isinstance(source, Mapping):
        _check_fields(source, kind, location)
        source = _own_image(source) if kind == "image" else source.get("image_url" if outer else "url")
        outer = False
    if source is None:
        text = f'{location}: a part is {{"type": "text", "text": string}}, {{"type": "image", "image": ...}} or'
        raise DataError(f'{text} {{"type": "image_url", ...}}, not {_shown(part)}', code="image.part-type")
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str):
        return _data_url_file(source, location)
    if (file := picture_file(source, location)) is None:
        raise DataError(f"{location}: an image is {_TURN_FORM}, not {_shown(source)}", code="image.entry-type")
    return file


def _check_fields(entry: Mapping[str, Any], kind: Any, location: str) -> None:
    for name, value in entry.items():
        if value is not None and (name not in _PART_FIELDS[kind] or (name == "detail" and value != "auto")):
            text = f"{location}: {name}={value!r:.80} of an image would have no effect; leave it out"
            raise DataError(f"{text} (data.mm_processor_kwargs sets the size of images)", code="image.part-field")


def data_url(image: Image) -> str:
    """Return the file of an image as a data URL, in the form of OpenAI's ``image_url`` parts."""
    data = image.data
    return f"data:{image_type(data)};base64,{base64.b64encode(data).decode('ascii')}"


def with_image_tokens(ids: list[int], images: Sequence[Image], token: int, location: str) -> list[int]:
    """Replace each image token by the tokens of its image.

    Raises:
        DataError: the numbers of image tokens and images differ.
    """
    places = [place for place, number in enumerate(ids) if number == token]
    if len(places) != len(images):
        raise DataError(
            f"{location}: the chat template writes {len(places)} image tokens (number {token}) for {len(images)} "
            "images; use the chat template of the model, which writes one for each part of type image",
            code="image.template-count",
        )
    expanded, done = list[int](), 0
    for place, image in zip(places, images, strict=True):
        expanded += [*ids[done:place], *image.token_ids]
        done = place + 1
    return expanded + ids[done:] if places else ids


def stored_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text, and ``<image>`` for each image, as data files have it."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(PLACEHOLDER if part["type"] == "image" else part["text"] for part in content)
    return {**message, "content": content}


def stored_images(images: Sequence[Image]) -> list[dict[str, bytes]]:
    """Return images as data files have them."""
    return [{"bytes": image.data} for image in images]


def _parts(content: Any, location: str) -> list[dict[str, Any]]:
    """Split a text at its placeholders, or check the parts of a content."""
    parts: list[dict[str, Any]] = content
    if isinstance(content, str):
        names = {PLACEHOLDER: "image", "<video>": "video"}
        pieces = filter(None, _PLACEHOLDERS.split(content))
        parts = [{"type": names[s]} if s in names else {"type": "text", "text": s} for s in pieces]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "video":
            text = f"{location}: there is a video, which megarl does not read; leave the row out"
            raise DataError(text, code="image.video")
        if kind != "image" and not (kind == "text" and isinstance(part.get("text"), str)):
            text = f'{location}: a part of a content is {{"type": "text", "text": string}} or {{"type": "image"}}, not'
            raise DataError(f"{text} {_shown(part)}", code="image.part-type")
    return parts


def _data_url_file(url: str, location: str) -> bytes:
    if (start := _DATA_URL.match(url)) is None:
        raise DataError(f"{location}: {url:.80} is not opened; an image is {_TURN_FORM}", code="image.remote")
    check_bytes((len(url) - start.end()) * 3 // 4 - url.count("=", -2), location)
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{location}: the data URL is not valid base64 ({error})", code="image.data-url") from error


def _own_image(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in _SOURCES if part.get(name) is not None), None)


def _entries(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _load(entry: Any, location: str, folder: str) -> bytes:
    """Read the encoded image of an entry, up to a byte above the limit."""
    source = entry
    while isinstance(source, Mapping):
        source = _own_image(source)
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str):
        raise DataError(f"{location}: an image is {_FORM}, not {_shown(entry)}", code="image.entry-type")
    if source.startswith("data:") or ("://" in source and not source.startswith("file://")):
        text = f"{location}: {source:.80} is no file; only files of this machine are read, download it"
        raise DataError(text, code="image.remote")
    path = _absolute(source, folder)
    try:
        if path.is_file():  # a pipe or device would be read without end
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{location}: {path!s:.200} cannot be read ({error})", code="image.unreadable") from error
    text = f"{location}: there is no file {path!s:.200}; relative paths are below {folder}"
    raise DataError(text, code="image.missing")


def _absolute(path: str, folder: str) -> Path:
    return Path(folder, path.removeprefix("file://"))


def _status(path: Path) -> str:
    try:
        status = path.stat()
    except (OSError, ValueError):  # reading the row names it
        return f"{path}\n"
    return f"{path}|{status.st_size}|{status.st_mtime_ns}\n"


def _shown(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, str | int | float | Mapping) else f"a {type(value).__name__}"
