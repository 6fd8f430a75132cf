"""Images of a rollout dump: the dump has their digests, and the run's data files have the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import ConfigError
from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, with_placeholders
from megarl.data.images import ImageReader
from megarl.data.rollout_dump import RolloutDump
from megarl.data.rows.reader import Rows
from megarl.data.tokenization import PromptReader
from megarl.models import read_model_config
from megarl.ops.report.run_files import read_run

_BLOCK = 64  # rows that are read at a time


@dataclass(frozen=True)
class DumpImages:
    """Images by digest, and the model that reads them.

    Attributes:
        token: the model's image token; None for a model of text.
        processor: the image processor of the model, with the run's settings.
    """

    token: int | None = None
    processor: ImageProcessor | None = None
    files: Mapping[int, Image] = field(default_factory=dict)

    @classmethod
    def of(cls, dump: RolloutDump, model: str, run: str | None) -> DumpImages:
        """Find the images of a dump in the data files of its run, without those that are not there.

        Args:
            model: model folder, with its image processor.
            run: folder of the run, with its ``config.yaml``; None = there are no images.

        Raises:
            ConfigError: the run's folder has no configuration.
            DataError: a data file or an image cannot be read.
        """
        vision = read_model_config(model).vision if run is not None else None
        if run is None or vision is None:
            return cls()
        record = read_run(Path(run))
        if not record.config:
            reason = "; ".join(record.problems) or "no config.yaml"
            raise ConfigError(f"--run {run}: no folder of a run: {reason}", code="doctor.no-run")
        data = record.config["data"]
        processor = ImageProcessor(model, data["mm_processor_kwargs"] or {})
        images = ImageReader(processor, vision.image_token, data["image_key"], was_checked=True)
        rows = Rows(data["train_files"], data["prompt_key"], media=(), parts=True)
        missing = {span.key for row in range(len(dump)) for span in image_spans(_ids(dump, row))}
        found = dict[int, Image]()
        for image in _read(rows, PromptReader(data["prompt_key"], images=images)):
            if image.key in missing:
                found[image.key] = image
            if len(found) == len(missing):
                break
        return cls(vision.image_token, processor, found)

    def can_read(self, dump: RolloutDump, row: int) -> bool:
        """Whether transformers can compute a row: with all of its images, and no image token in its text."""
        ids = _ids(dump, row)
        spans = image_spans(ids)
        return not spans or (all(span.key in self.files for span in spans) and self.token not in ids)

    def inputs(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Return the input of transformers for token ids ``[tokens]``.

        Raises:
            DataError: the image processor makes another number of tokens.
        """
        spans = image_spans(ids)
        if not spans:
            return {"input_ids": torch.from_numpy(ids)[None]}
        assert self.processor is not None and self.token is not None
        merge, patches, kinds = self.processor.merge_size, list[np.ndarray](), torch.from_numpy(ids < 0)[None].long()
        for span in spans:
            image = replace(self.files[span.key], rows=span.rows, columns=span.columns)
            patches.append(self.processor.patches(image))
        return {
            "input_ids": torch.tensor([with_placeholders(ids.tolist(), self.token)]),
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
            "image_grid_thw": torch.tensor([[1, merge * span.rows, merge * span.columns] for span in spans]),
            "mm_token_type_ids": kinds,
        }


def _read(rows: Rows, reader: PromptReader) -> Iterator[Image]:
    """Yield the images of all prompts of data files, in order."""
    for start in range(0, len(rows), _BLOCK):
        block = rows.slice(reader.columns, start, min(start + _BLOCK, len(rows)))
        for row, values in enumerate(block, start):
            yield from reader.read(values, rows.location(row), rows.folder(row)).images


def _ids(dump: RolloutDump, row: int) -> np.ndarray:
    return np.concatenate([dump.prompts[row], dump.responses[row]]).astype(np.int64)
