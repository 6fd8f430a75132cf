"""Features of images from a frozen vision tower, transformers' own module.

The weights of a frozen tower never change, so the features of an image are data: actor, reference and critic compute
them once for all passes of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, unpack_ids
from megarl.models.hf_checkpoint import HFReader
from megarl.models.hf_folder import ModelFolder, tensor_entries
from megarl.models.model_config import ModelConfig
from megarl.models.partition import Piece
from megarl.models.tower_class import check_tower_shapes, tower_class

HOST_BYTES = 2 << 30
"""Features that stay in host memory, in bytes, if no current prompt has their image."""


class _Features(NamedTuple):
    """Features of an image, with facts that tell it from another image with the same key.

    Attributes:
        values: ``[tokens, 1 + deepstack, hidden]``.
    """

    columns: int
    file_bytes: int
    values: Tensor


def load_tower(config: ModelConfig, folder: str | Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Load the vision tower of a model folder, frozen.

    Raises:
        ModelError: a tensor of the tower is missing or has another shape.
    """
    assert config.vision is not None, "a model of text only has no tower"
    prefix = config.vision.prefix
    kind = tower_class(config.vision)
    tower: torch.nn.Module = kind(kind.config_class(**config.vision.settings))
    entries = {name: entry for name, entry in tensor_entries(Path(folder)).items() if name.startswith(prefix)}
    check_tower_shapes(folder, config.vision, {name: entry.shape for name, entry in entries.items()})
    reader = HFReader(ModelFolder(Path(folder), config, entries))
    for name, parameter in tower.named_parameters():
        zeros = (0,) * parameter.dim()
        # Buffers, such as rotary frequencies, stay in float32.
        parameter.data = reader.read(Piece(prefix + name, zeros, tuple(parameter.shape), zeros)).to(dtype)
    return tower.to(device).requires_grad_(False).eval()


class ImageFeatures:
    """Features of images by key, computed when an image is first added, one image at a time.

    So the features of an image never depend on others. They are in host memory.

    Args:
        folder: model folder with the tower's weights and the image processor.
        dtype: of the features.
        options: settings of the image processor, as :class:`~megarl.base.image_files.ImageProcessor` has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: str | Path,
        device: torch.device,
        dtype: torch.dtype,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._folder, self._device, self._dtype = config, folder, device, dtype
        self._processor = ImageProcessor(str(folder), options or {})
        self._tower: torch.nn.Module | None = None
        self._features: OrderedDict[int, _Features] = OrderedDict()

    def load(self) -> torch.nn.Module:
        """Return the tower; the first call loads it."""
        if self._tower is None:
            self._tower = load_tower(self._config, self._folder, self._device, self._dtype)
        return self._tower

    def add(self, images: Iterable[Image]) -> None:
        """Compute the features of new images; drop the oldest others above :data:`HOST_BYTES`.

        Raises:
            DataError: an image cannot be processed, has another number of tokens, or shares its key with another one.
        """
        current = set[int]()
        for image in images:
            key = image.key
            known = self._features.get(key)
            if known is not None and (known.columns, known.file_bytes) != (image.columns, len(image.data)):
                raise DataError(
                    f"two images have the key {key:x}, which token ids name them by; remove one of them from the data",
                    code="image.equal-keys",
                )
            self._features[key] = known or _Features(image.columns, len(image.data), self._compute(image))
            self._features.move_to_end(key)
            current.add(key)
        size = sum(features.values.nbytes for features in self._features.values())
        for key in [key for key in self._features if key not in current]:
            if size <= HOST_BYTES:
                break
            size -= self._features.pop(key).values.nbytes

    def offload(self) -> None:
        """Move the tower's weights to host memory, until features are computed again."""
        if self._tower is not None:
            self._tower.to("cpu")

    def __contains__(self, key: int) -> bool:
        return key in self._features

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the features of the image tokens among ``ids [tokens]``, on the host; None without such tokens.

        Returns:
            Indices of the tokens ``[n]`` int64, and features ``[n, 1 + deepstack, hidden]``: those that replace the
            embedding, then those that are added after each of the first decoder layers.

        Raises:
            DataError: the features of an image were not added.
        """
        at = (ids < 0).nonzero()[:, 0]
        if not len(at):
            return None
        keys, rows, columns = unpack_ids(ids[at].numpy())
        assert self._config.vision is not None
        shape = (len(at), 1 + self._config.vision.deepstack, self._config.hidden_size)
        features = torch.empty(shape, dtype=self._dtype)
        for key in np.unique(keys).tolist():
            if key not in self._features:
                text = f"a prompt has tokens of image {key:x}, and the batch lacks the image; keep its column 'images'"
                raise DataError(text, code="image.not-in-batch")
            of_image = torch.from_numpy(keys == key)
            index = torch.from_numpy(rows * self._features[key].columns + columns)[of_image]
            features[of_image] = self._features[key].values[index]
        return at, features

    @torch.no_grad()
    def _compute(self, image: Image) -> Tensor:
        tower = self.load().to(self._device)
        merge = self._processor.merge_size
        patches = torch.from_numpy(self._processor.patches(image)).to(self._device, self._dtype)
        grid = torch.tensor([[1, image.rows * merge, image.columns * merge]], device=self._device)
        output = tower(patches, grid_thw=grid)
        return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())], 1).to("cpu", self._dtype)
