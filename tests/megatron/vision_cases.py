"""Rows with images and their log-probs, entropies and gradients: transformers' own, and those of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_cases import Setup, assemble, engine, policy_loss
from family_cases import in_checkpoint_names
from support.distributed import Place, ProcessPool
from support.vision_families import save_family
from support.vision_models import END, IMAGE, START, png
from tiny_models import TEMPERATURE, Row
from torch import Tensor

from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, multimodal_positions, with_placeholders
from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch
from megarl.models import ParallelLayout
from megarl.models.hf_folder import plain_name

SIZES = ((56, 112), (84, 56), (56, 112), (28, 28), (100, 61))
"""Height and width of the pictures: the third has the size of the first; the last two are a single token and odd."""
LAYOUTS = {
    "single": Setup(ParallelLayout()),
    "tp2sp": Setup(ParallelLayout(tp=2), sequence_parallel=True),
    "tp2": Setup(ParallelLayout(tp=2)),
    "cp2": Setup(ParallelLayout(cp=2)),
    "tp2cp2sp": Setup(ParallelLayout(tp=2, cp=2), sequence_parallel=True),
    "pp2vpp2": Setup(ParallelLayout(pp=2, vpp=2)),
    "tp2pp2": Setup(ParallelLayout(tp=2, pp=2)),
    "dp2": Setup(ParallelLayout(dp=2)),
    "ep2": Setup(ParallelLayout(dp=2, ep=2)),
}


Reference = tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]
"""Log-probs and entropies of each row, and gradients by checkpoint name."""


class Folder:
    """A model folder, its pictures, and rows that show them."""

    def __init__(self, path: Path, family: str) -> None:
        self.path, self.family = path, family
        self.model: Any = save_family(path, family)
        self.processor = ImageProcessor(str(path))
        pictures = [png(*size, seed=number) for number, size in enumerate(SIZES)]
        self.images = [self.processor.read(data, f"picture {number}") for number, data in enumerate(pictures)]
        first, tall, twin, dot, odd = self.images
        self.rows = [
            row([5, 6, first, 7], [8, 9, 10], 0),
            row([5, 6, twin, 7], [8, 9, 10], 1),  # equal but for the picture
            row([5, 6, first, 7], [11], 2),
            row([20, 21], [22, 23, 24, 25], 3),
            row([dot, tall, odd], [30, 31], 4),
            row([first, 3, twin], [4, 4, 4, 4, 4], 5),
        ]

    def reference(self) -> Reference:
        """Log-probs and entropies of each row, and all gradients by checkpoint name."""
        outputs = self.backward()
        grads = {plain_name(name): parameter.grad for name, parameter in self.model.named_parameters()}
        decoder = {name: grad for name, grad in grads.items() if not name.startswith("visual.")}
        tower = {name: grad for name, grad in grads.items() if name.startswith("visual.")}
        return outputs, in_checkpoint_names(decoder, self.family) | tower

    def backward(self) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of each row; gradients of their loss are in the model."""
        outputs, loss = [], torch.zeros(())
        for row in self.rows:
            log_probs, entropy = self.outputs(row)
            loss = loss - (log_probs * row.weights).sum() - 0.3 * (entropy * row.weights).sum()
            outputs.append((log_probs.detach(), entropy.detach()))
        loss.backward()
        return outputs

    def outputs(self, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a row's response."""
        ids = torch.cat([row.prompt, row.response])
        spans, by_key = image_spans(ids.numpy()), {image.key: image for image in self.images}
        tokens = torch.tensor(with_placeholders(ids.tolist(), IMAGE))[None]
        kinds = (tokens == IMAGE).long()
        inputs = {}
        if spans:
            patches = [torch.from_numpy(self.processor.patches(by_key[span.key])) for span in spans]
            grid = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in spans])
            inputs = {"pixel_values": torch.cat(patches), "image_grid_thw": grid, "mm_token_type_ids": kinds}
            positions, _ = self.model.model.get_rope_index(tokens, kinds, grid)
            assert (positions[:, 0].numpy() == multimodal_positions(ids.numpy())).all()
        logits = self.model(input_ids=tokens, **inputs).logits[0] / TEMPERATURE
        log_probs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
        return log_probs.gather(1, row.response.clamp(min=0)[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def row(prompt: list[int | Image], response: list[int], seed: int) -> Row:
    parts = ([START, *part.token_ids, END] if isinstance(part, Image) else [part] for part in prompt)
    numbers = torch.randn(2, len(response), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([number for part in parts for number in part])
    return Row(ids, torch.tensor(response), weights=numbers[0] / 40, returns=numbers[1])


def study(
    place: Place, path: Path, setup: Setup, rows: list[Row], images: list[Image], share: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of a rank's rows, if it is on the last stage, and its gradients."""
    with engine(place, path, setup) as built:
        built.set_images(path, {})
        built.take_images(images)
        mine = rows[built.runtime.coordinate.dp :: setup.layout.dp]
        groups = [mine[:2], mine[2:3], mine[3:4], mine[4:]] if setup.layout.dp == 1 else [mine[:2], mine[2:]]
        batches = [
            PackedMicroBatch.from_rows(
                [(row.prompt, row.response) for row in group],
                {"weights": torch.cat([row.weights for row in group])},
                share_prompts=share,
            )
            for group in groups
        ]
        options = OutputOptions(TEMPERATURE, with_entropy=True)
        outputs = []
        for batch, answer in zip(batches, built.forward(batches, options) or [], strict=False):
            outputs += zip(batch.split(answer.log_probs), batch.split(answer.entropy), strict=True)
        built.forward_backward(batches, policy_loss, options)
        return outputs, {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}


def check_study(pool: ProcessPool, folder: Folder, reference: Reference, setup: Setup, *, share: bool) -> None:
    """Compare outputs within 1e-5, and gradients, with transformers'; those of the tower if it is trained."""
    outputs, grads = reference
    setup = setup._replace(optimizer=OptimizerOptions(use_distributed_optimizer=False))
    sizes = setup.layout
    results = pool.run(study, sizes.world_size, folder.path, setup, folder.rows, folder.images, share)
    for rank, (mine, _) in enumerate(results):
        where = sizes.coordinate(rank)
        expected = outputs[where.dp :: sizes.dp] if where.pp == sizes.pp - 1 else []
        assert len(mine) == len(expected)
        for ours, theirs in zip(mine, expected, strict=True):
            for values, reference_values in zip(ours, theirs, strict=True):
                assert (values - reference_values).abs().max() < 1e-5
    whole = assemble(folder.path, setup, [local for _, local in results])
    grads = {name: grad for name, grad in grads.items() if setup.trained_tower or not name.startswith("visual.")}
    assert whole.keys() == grads.keys()
    scale = max(grad.abs().max().item() for grad in grads.values())
    for name, expected in grads.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-5 * scale)
