"""Features of images from a vision tower, transformers' own module.

The weights of a frozen tower never change, so the features of an image are data: actor, reference and critic compute
them once for all passes of a step. Those of a trained tower last until its next update, and a pass with gradients
computes them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, equal_keys_error, unpack_ids
from megarl.models.hf_checkpoint import HFReader
from megarl.models.hf_folder import ModelFolder, tensor_entries
from megarl.models.model_config import ModelConfig, Vision
from megarl.models.partition import Piece
from megarl.models.tower_class import check_tower_shapes, tower_class

HOST_BYTES = 2 << 30
"""Features that stay in host memory, in bytes, if no current prompt has their image."""


ImageRows = tuple[Tensor, Sequence[Tensor] | Tensor]
"""Indices ``[n]`` of tokens of images, and their features, ``[n, hidden]`` for each level, the embedding's first."""


class _Features(NamedTuple):
    """Features of an image, with facts that tell it from another image with the same key.

    Attributes:
        values: ``[tokens, 1 + deepstack, hidden]``.
    """

    columns: int
    file_bytes: int
    values: Tensor


class TowerInput(NamedTuple):
    """Input of a vision tower for the tokens of images that a rank embeds.

    Without such tokens it is a blank image, so that every rank computes the gradients of the tower.

    Attributes:
        at: ``[n]`` int64, indices of the tokens.
        patches: ``[patches, values]`` of each image.
        grids: rows and columns of each image's patches.
        rows: ``[n]`` int64, row of each token in the features of all images, end to end.
    """

    at: Tensor
    patches: tuple[Tensor, ...]
    grids: tuple[tuple[int, int], ...]
    rows: Tensor


def build_tower(vision: Vision, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Build a vision tower with unset weights; buffers, such as rotary frequencies, are set and stay in float32."""
    kind = tower_class(vision)
    with device:
        tower: torch.nn.Module = kind(kind.config_class(**vision.settings))
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower


def load_tower(config: ModelConfig, folder: str | Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Load the vision tower of a model folder, frozen.

    Raises:
        ModelError: a tensor of the tower is missing or has another shape.
    """
    assert config.vision is not None, "a model of text only has no tower"
    prefix = config.vision.prefix
    tower = build_tower(config.vision, torch.device("cpu"), dtype)
    entries = {name: entry for name, entry in tensor_entries(Path(folder)).items() if name.startswith(prefix)}
    check_tower_shapes(folder, config.vision, {name: entry.shape for name, entry in entries.items()})
    reader = HFReader(ModelFolder(Path(folder), config, entries))
    for name, parameter in tower.named_parameters():
        zeros = (0,) * parameter.dim()
        parameter.data = reader.read(Piece(prefix + name, zeros, tuple(parameter.shape), zeros)).to(dtype)
    return tower.to(device).requires_grad_(False).eval()


def tower_features(tower: torch.nn.Module, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute the features of an image.

    Args:
        patches: ``[patches, values]`` on the tower's device.
        grid: rows and columns of the patches.

    Returns:
        ``[tokens, 1 + deepstack, hidden]``.
    """
    output = tower(patches, grid_thw=torch.tensor([[1, *grid]], device=patches.device))
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())], 1)


class StoredTower(torch.nn.Module):
    """A vision tower whose weights are elsewhere, and may be freed and allocated again.

    Args:
        weights: returns the weights by their names in the weight map.
    """

    def __init__(
        self, vision: Vision, weights: Callable[[], Mapping[str, Tensor]], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._prefix, self._weights = vision.prefix, weights
        self._tower = build_tower(vision, device, dtype).eval()
        self._names = [name for name, _ in self._tower.named_parameters()]
        for parameter in self._tower.parameters():
            parameter.data = parameter.data.new_empty(0)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Any:
        """Compute the features of images, as the tower does."""
        weights = self._weights()
        own = {name: weights[self._prefix + name] for name in self._names}
        return torch.func.functional_call(self._tower, own, (patches,), {"grid_thw": grid_thw})


class ImageFeatures:
    """Features of images by key, computed once, one image at a time.

    So the features of an image never depend on others. They are in host memory.

    Args:
        folder: model folder with the tower's weights and the image processor.
        dtype: of the features.
        options: settings of the image processor, as :class:`~megarl.base.image_files.ImageProcessor` has them.
        tower: the trained tower; None = the frozen one of the folder.

    Attributes:
        is_trained: whether the tower is trained, so that features last until its next update.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: str | Path,
        device: torch.device,
        dtype: torch.dtype,
        options: Mapping[str, Any] | None = None,
        tower: torch.nn.Module | None = None,
    ) -> None:
        self._config, self._folder, self._device, self._dtype = config, folder, device, dtype
        self._processor = ImageProcessor(str(folder), options or {})
        self.is_trained, self._tower = tower is not None, tower
        self._images: dict[int, Image] = {}
        self._patches: dict[int, Tensor] = {}  # of a trained tower, for all passes over the same images
        self._features: OrderedDict[int, _Features] = OrderedDict()

    def load(self) -> torch.nn.Module:
        """Return the tower; the first call loads it."""
        if self._tower is None:
            self._tower = load_tower(self._config, self._folder, self._device, self._dtype)
        return self._tower

    def register(self, images: Iterable[Image]) -> None:
        """Take images in place of earlier ones; drop the oldest other features above :data:`HOST_BYTES`.

        :meth:`rows` computes the features that are not there.

        Raises:
            DataError: an image shares its key with another one.
        """
        current: dict[int, Image] = {}
        for image in images:
            known, same = self._features.get(image.key), current.setdefault(image.key, image)
            facts = (image.columns, len(image.file))
            if facts != ((same.columns, len(same.file)) if known is None else (known.columns, known.file_bytes)):
                raise equal_keys_error(image.key)
            if known is not None:
                self._features.move_to_end(image.key)
        size = sum(features.values.nbytes for features in self._features.values())
        for key in [key for key in self._features if key not in current]:
            if size <= HOST_BYTES:
                break
            size -= self._features.pop(key).values.nbytes
        self._images = {k: image for k, image in current.items() if self.is_trained or k not in self._features}
        self._patches = {key: patches for key, patches in self._patches.items() if key in current}

    def add(self, images: Iterable[Image]) -> None:
        """Take images (:meth:`register`), and compute their features.

        Raises:
            DataError: an image cannot be processed, has another number of tokens, or shares its key with another one.
        """
        self.register(images)
        for key in list(self._images):
            self._of(key)
        self._images = {}

    def clear(self) -> None:
        """Drop the features of a trained tower, whose weights changed."""
        if self.is_trained:
            self._features.clear()

    def end_phase(self, *, offloads: bool) -> None:
        """Drop files, and the features of a trained tower, which an update computes itself.

        Args:
            offloads: move a frozen tower's weights to host memory, until features are computed again.
        """
        self._images, self._patches = {}, {}
        self.clear()
        if offloads and self._tower is not None and not self.is_trained:
            self._tower.to("cpu")

    def __contains__(self, key: int) -> bool:
        return key in self._features

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the features of the image tokens among ``ids [tokens]``, on the host; None without such tokens.

        Returns:
            Indices of the tokens ``[n]`` int64, and features ``[1 + deepstack, n, hidden]``: those that replace the
            embedding, then those that are added after each of the first decoder layers.

        Raises:
            DataError: an image is not registered, cannot be processed, or has another number of tokens.
        """
        at = (ids < 0).nonzero()[:, 0]
        if not len(at):
            return None
        keys, rows, columns = unpack_ids(ids[at].numpy())
        assert self._config.vision is not None
        shape = (1 + self._config.vision.deepstack, len(at), self._config.hidden_size)
        features = torch.empty(shape, dtype=self._dtype)
        for key in np.unique(keys).tolist():
            of_image, known = torch.from_numpy(keys == key), self._of(key)
            index = torch.from_numpy(rows * known.columns + columns)[of_image]
            features[:, of_image] = known.values[index].transpose(0, 1)
        return at, features

    def tower_input(self, ids: Tensor) -> TowerInput:
        """Return the input of a trained tower for the image tokens among ``ids [tokens]``, on the host.

        Raises:
            DataError: as :meth:`rows`.
        """
        at, merge = (ids < 0).nonzero()[:, 0], self._processor.merge_size
        keys, rows, columns = unpack_ids(ids[at].numpy())
        images = [self._file(key) for key in np.unique(keys).tolist()]
        for start, image in zip(accumulate((i.rows * i.columns for i in images), initial=0), images, strict=False):
            rows[keys == image.key] *= image.columns
            rows[keys == image.key] += start
        patches = [self._patches_of(image) for image in images] or [self._blank()]
        grids = [(image.rows * merge, image.columns * merge) for image in images] or [(merge, merge)]
        return TowerInput(at, tuple(patches), tuple(grids), torch.from_numpy(rows + columns))

    def _of(self, key: int) -> _Features:
        """Return the features of an image, computed if they are not there."""
        if key not in self._features:
            image = self._file(key)
            with torch.no_grad():
                tower, merge = self.load(), self._processor.merge_size
                patches = self._patches_of(image).to(self._device)
                if not self.is_trained:
                    tower.to(self._device)
                values = tower_features(tower, patches, (image.rows * merge, image.columns * merge))
            self._features[key] = _Features(image.columns, len(image.file), values.to("cpu", self._dtype))
            if not self.is_trained:
                del self._images[key]  # a kept image keeps its file in the object store
        return self._features[key]

    def _file(self, key: int) -> Image:
        if key not in self._images:
            text = f"a prompt has tokens of image {key:x}, and the batch lacks the image; keep its column 'images'"
            raise DataError(text, code="image.not-in-batch")
        return self._images[key]

    def _patches_of(self, image: Image) -> Tensor:
        patches = self._patches.get(image.key)
        if patches is None:
            patches = torch.from_numpy(self._processor.patches(image)).to(self._dtype)
            if self.is_trained and sum(each.nbytes for each in self._patches.values()) < HOST_BYTES:
                self._patches[image.key] = patches
        return patches

    def _blank(self) -> Tensor:
        embedding: Any = self.load().patch_embed
        return torch.zeros(self._processor.merge_size**2, embedding.proj.weight[0].numel(), dtype=self._dtype)
