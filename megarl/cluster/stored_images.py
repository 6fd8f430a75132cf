"""Encoded files of images in Ray's object store, so that prompts, requests and batches carry references to them.

The driver writes the files of a prompt once. A process reads a file when it needs it: an engine or a first pipeline
stage for the features, the driver for a thumbnail or a checkpoint. The driver owns the files, so they outlive every
other process; they are freed with the last prompt, request or batch that refers to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.base.image_tokens import Image, RemoteFile
from megarl.cluster.stored_chunks import StoredChunk

FILES = "image_files"
"""Name of the bytes in a chunk."""


@dataclass(frozen=True, slots=True)
class StoredFile(RemoteFile):
    """A file in a chunk of the object store.

    Attributes:
        begin: position of its first byte in the chunk.
    """

    chunk: StoredChunk
    begin: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """Copy the file out of the chunk, from another node if necessary.

        Raises:
            WorkerError: the chunk is lost.
        """
        [chunk] = StoredChunk.fetch([self.chunk])
        return chunk[FILES][self.begin : self.begin + self.size].tobytes()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredFile:
        return self  # Ray alone may copy a reference


def store_images(images: Sequence[Image]) -> tuple[Image, ...]:
    """Write the files of a prompt's images to the object store, as one chunk; return the images with references."""
    files = [image.data for image in images]
    chunk = StoredChunk.write({FILES: np.frombuffer(b"".join(files), np.uint8)})
    begins = np.cumsum([0, *map(len, files)]).tolist()
    return tuple(
        replace(image, file=StoredFile(chunk, begin, len(file)))
        for image, begin, file in zip(images, begins, files, strict=False)
    )
