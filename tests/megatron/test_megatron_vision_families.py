"""Log-probs of every family with images equal transformers', and so do positions; prompts may be shared."""

import numpy as np
import pytest
import torch
from engine_cases import Setup, engine
from support.distributed import Place
from support.vision_families import FAMILIES, save_family
from support.vision_models import END, IMAGE, START, png

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import image_spans, multimodal_positions, with_placeholders
from megarl.megatron import PackedMicroBatch
from megarl.models import ParallelLayout, read_model_config
from megarl.models.vision_tower import ImageFeatures


def rows_of(images):
    """Rows of prompt and response: equal text with different pictures, text alone, two pictures, an odd shape."""
    first, second, odd = images

    def prompt(*parts):
        ids = [ids for part in parts for ids in (part if isinstance(part, list) else [START, *part.token_ids, END])]
        return torch.tensor(ids)

    return [
        (prompt([1, 2, 3], first, [4, 5]), torch.tensor([7, 8, 9])),
        (prompt([1, 2, 3], second, [4, 5]), torch.tensor([7, 8, 9])),
        (prompt([9, 8]), torch.tensor([3, 3, 1, 4])),
        (prompt(odd, first, [5]), torch.tensor([2, 6])),
        (prompt(odd, first, [5]), torch.tensor([11])),
    ]


def reference(model, processor, images, prompt, response):
    """transformers' log-probs of a response, after its positions were compared."""
    ids = torch.cat([prompt, response])
    placed, by_key = torch.tensor(with_placeholders(ids.tolist(), IMAGE))[None], {image.key: image for image in images}
    inputs = {}
    if spans := image_spans(ids.numpy()):
        values = [torch.from_numpy(processor.patches(by_key[span.key])) for span in spans]
        grid = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in spans])
        kinds = (placed == IMAGE).long()
        positions, _ = model.model.get_rope_index(placed, kinds, grid)
        np.testing.assert_array_equal(positions[-3:, 0].numpy(), multimodal_positions(ids.numpy()))
        inputs = {"pixel_values": torch.cat(values), "image_grid_thw": grid, "mm_token_type_ids": kinds}
    with torch.no_grad():
        log_probs = model(input_ids=placed, **inputs).logits[0].log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]


def computed(place: Place, folder, images, rows, share):
    with engine(place, folder, Setup(ParallelLayout())) as built:
        built.set_images(ImageFeatures(read_model_config(folder), folder, torch.device("cpu"), torch.float32))
        built.add_images(images)
        batch = PackedMicroBatch.from_rows(rows, share_prompts=share)
        return batch.split(built.forward([batch])[0].log_probs)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_positions_equal_transformers(family, pool, tmp_path):
    model = save_family(tmp_path, family)
    processor = ImageProcessor(str(tmp_path))
    images = [processor.read(png(*size, seed), "test") for seed, size in enumerate([(56, 112), (56, 112), (140, 84)])]
    rows = rows_of(images)
    expected = [reference(model, processor, images, *row) for row in rows]
    assert (expected[0] - expected[1]).abs().max() > 1e-3  # the pictures matter
    for share in (False, True):
        (outputs,) = pool.run(computed, 1, tmp_path, images, rows, share)
        for ours, theirs in zip(outputs, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-5
