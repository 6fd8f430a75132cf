"""Models with images compute transformers' log-probs, entropies and gradients, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Setup, assemble, engine, forward, policy_loss, refusal
from family_cases import in_checkpoint_names
from support.distributed import Place
from support.expected_errors import raises
from support.release import of_release
from support.vision_families import FAMILIES, save_family
from support.vision_models import END, IMAGE, START, png
from tiny_models import TEMPERATURE, Row, save_model
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_spans, multimodal_positions, with_placeholders
from megarl.megatron import MegatronEngine, OptimizerOptions, OutputOptions, PackedMicroBatch
from megarl.models import ParallelLayout, read_model_config
from megarl.models.hf_folder import plain_name
from megarl.models.vision_tower import ImageFeatures

SIZES = ((56, 112), (84, 56), (56, 112), (28, 28), (100, 61))
"""Height and width of the pictures: the third has the size of the first; the last two are a single token and odd."""
LAYOUTS = {
    "single": Setup(ParallelLayout()),
    "tp2sp": Setup(ParallelLayout(tp=2), sequence_parallel=True),
    "cp2": Setup(ParallelLayout(cp=2)),
    "tp2cp2sp": Setup(ParallelLayout(tp=2, cp=2), sequence_parallel=True),
    "pp2vpp2": Setup(ParallelLayout(pp=2, vpp=2)),
    "tp2pp2": Setup(ParallelLayout(tp=2, pp=2)),
    "dp2": Setup(ParallelLayout(dp=2)),
    "ep2": Setup(ParallelLayout(dp=2, ep=2)),
}
CI = {
    "qwen2_5_vl": "single+ single tp2cp2sp pp2vpp2+ dp2+",
    "qwen3_vl": "single+ tp2cp2sp pp2vpp2",
    "qwen3_5": "single+ tp2sp",
    "qwen3_5_moe": "ep2",
    "qwen3_vl_moe": "single+ ep2",
}
"""Layouts by family; ``+`` stores a shared prompt once."""
MORE = {
    "qwen2_5_vl": "cp2 tp2pp2 tp2sp tp2sp+ pp2vpp2",
    "qwen3_vl": "single cp2 tp2sp+ tp2pp2",
    "qwen3_5": "single tp2pp2 pp2vpp2+ dp2",
    "qwen3_5_moe": "single+ tp2sp",
    "qwen3_vl_moe": "tp2sp pp2vpp2",
}
CASES = [(family, case) for table in of_release([CI], [MORE]) for family in table for case in table[family].split()]


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

    def reference(self) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Log-probs and entropies of each row, and the gradients of the decoder by checkpoint name."""
        outputs, loss = [], torch.zeros(())
        for row in self.rows:
            log_probs, entropy = self._row(row)
            loss = loss - (log_probs * row.weights).sum() - 0.3 * (entropy * row.weights).sum()
            outputs.append((log_probs.detach(), entropy.detach()))
        loss.backward()
        named = {n: p.grad for n, p in self.model.named_parameters() if "visual" not in n}
        return outputs, in_checkpoint_names({plain_name(name): grad for name, grad in named.items()}, self.family)

    def _row(self, row: Row) -> tuple[Tensor, Tensor]:
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


def with_images(built: MegatronEngine, path: Path, images: list[Image]) -> None:
    config = read_model_config(path)
    built.set_images(ImageFeatures(config, path, torch.device("cpu"), torch.float32))
    built.add_images(images)


def study(
    place: Place, path: Path, setup: Setup, rows: list[Row], images: list[Image], share: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of a rank's rows, if it is on the last stage, and its gradients."""
    with engine(place, path, setup) as built:
        with_images(built, path, images)
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


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The folder of each family, and its reference."""
    folders = {family: Folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
    return {family: (folder, folder.reference()) for family, folder in folders.items()}


@pytest.fixture
def folder(studies):
    return studies["qwen2_5_vl"][0]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_rows_with_images_equal_transformers(pool, studies, family, case):
    folder, (outputs, grads) = studies[family]
    layout, share = case.removesuffix("+"), case.endswith("+")
    setup = LAYOUTS[layout]._replace(optimizer=OptimizerOptions(use_distributed_optimizer=False))
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
    assert whole.keys() == grads.keys()
    scale = max(grad.abs().max().item() for grad in grads.values())
    for name, expected in grads.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-5 * scale)


def test_pictures_change_log_probs(studies):
    """The tests would pass blindly otherwise."""
    for _, (outputs, _) in studies.values():
        (first, _), (twin, _) = outputs[:2]
        assert (first - twin).abs().max() > 1e-2


def taught(place: Place, path: Path, row: Row, images: list[Image]) -> tuple[bool, bool]:
    """Whether an optimizer step changes the decoder, and the features of an image that were not computed before."""
    setup = Setup(ParallelLayout(), optimizer=OptimizerOptions(lr=1e-2))
    with engine(place, path, setup) as built:
        trained, fresh = (
            ImageFeatures(read_model_config(path), path, torch.device("cpu"), torch.float32) for _ in range(2)
        )
        built.set_images(trained)
        built.add_images(images[:1])
        before = built.weights.to_host()
        batch = PackedMicroBatch.from_rows([(row.prompt, row.response)], {"weights": row.weights})
        built.forward_backward([batch], policy_loss, OutputOptions(with_entropy=True))
        built.optimizer_step()
        after, features = built.weights.to_host(), []
        for each in (trained, fresh):
            each.add(images[1:])
            rows = each.rows(torch.tensor(images[1].token_ids))
            assert rows is not None
            features.append(rows[1])
        return any(not before[name].equal(after[name]) for name in before), not features[0].equal(features[1])


def test_training_changes_the_decoder_and_not_the_tower(pool, folder):
    assert pool.run(taught, 1, folder.path, folder.rows[0], folder.images[:2]) == [(True, False)]


def test_a_model_of_text_refuses_tokens_of_images(pool, folder, tmp_path):
    save_model(tmp_path, "qwen2")
    assert "image.text-model" in pool.run(refusal, 1, forward, tmp_path, Setup(ParallelLayout()), folder.rows[:1])[0]


def test_an_image_that_is_not_in_the_batch_is_named(folder):
    features = ImageFeatures(read_model_config(folder.path), folder.path, torch.device("cpu"), torch.float32)
    with raises("image.not-in-batch", f"{folder.images[0].key:x}"):
        features.rows(folder.rows[0].prompt)


def test_features_do_not_depend_on_other_images(folder):
    config, path = read_model_config(folder.path), folder.path
    together, alone = (ImageFeatures(config, path, torch.device("cpu"), torch.float32) for _ in range(2))
    together.add(folder.images)
    alone.add(folder.images[3:4])
    ids = torch.tensor([7, *folder.images[3].token_ids, 7])
    for ours, theirs in zip(together.rows(ids), alone.rows(ids), strict=True):
        assert torch.equal(ours, theirs)
    assert alone.rows(torch.tensor([7, 8])) is None


def test_a_grid_of_another_processor_is_refused(folder):
    image = folder.images[0]
    features = ImageFeatures(read_model_config(folder.path), folder.path, torch.device("cpu"), torch.float32)
    with pytest.raises(DataError) as error:
        features.add([image._replace(rows=image.columns, columns=image.rows)])
    assert error.value.code == "image.token-count"


def test_least_used_features_are_dropped_first(folder, monkeypatch):
    features = ImageFeatures(read_model_config(folder.path), folder.path, torch.device("cpu"), torch.float32)
    features.add(folder.images[:3])
    monkeypatch.setattr("megarl.models.vision_tower.HOST_BYTES", 32 * 4 * (8 + 6))
    features.add([folder.images[0]])  # of 8 tokens, and 6 of the second image are held
    assert [image.key in features for image in folder.images[:3]] == [True, False, False]
