"""A trained vision tower has transformers' gradients in every layout, and a step changes it; a frozen one stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import Setup, engine, policy_loss
from support.distributed import Place
from support.release import of_release
from support.vision_families import tensors_of
from tiny_models import Row
from torch import Tensor
from vision_cases import LAYOUTS, Folder, check_study

from megarl.base.image_tokens import Image
from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.engine.faults import _depth
from megarl.megatron.engine.options import OverlapOptions, RecomputeOptions
from megarl.models import ParallelLayout

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe")
CI = {
    "qwen2_5_vl": "single+ tp2cp2sp pp2vpp2 dp2+",
    "qwen3_vl": "single tp2sp cp2",
    "qwen3_5": "tp2sp",
    "qwen3_vl_moe": "ep2 tp2",
}
MORE = {"qwen2_5_vl": "cp2 tp2pp2 tp2sp+", "qwen3_vl": "single+ dp2", "qwen3_5": "single+ pp2vpp2"}
CASES = [(family, case) for table in of_release([CI], [MORE]) for family in table for case in table[family].split()]
FULL = RecomputeOptions("full", "uniform", 1)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The folder of each family, and its reference."""
    folders = {family: Folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
    return {family: (folder, folder.reference()) for family, folder in folders.items()}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_gradients_equal_transformers(pool, studies, family, case):
    setup = LAYOUTS[case.removesuffix("+")]._replace(trained_tower=True)
    check_study(pool, *studies[family], setup, share=case.endswith("+"))


@pytest.mark.parametrize("layout", ["single", "tp2sp"])
def test_recomputed_layers_add_to_the_gradient_of_the_tower_once(pool, studies, layout):
    setup = LAYOUTS[layout]._replace(recompute=FULL, trained_tower=True)
    check_study(pool, *studies["qwen3_vl"], setup, share=False)


def steps(place: Place, path: Path, setup: Setup, rows: list[list[Row]], images: list[Image]) -> dict[str, Tensor]:
    """A rank's weights after two steps over its rows, whose log-probs are computed in between."""
    with engine(place, path, setup) as built:
        built.set_images(path, {})
        built.take_images(images)
        mine = rows[built.runtime.coordinate.dp]
        batches = [PackedMicroBatch.from_rows([(row.prompt, row.response)], {"weights": row.weights}) for row in mine]
        for _ in range(2):
            built.forward_backward(batches, policy_loss, OutputOptions(with_entropy=True))
            built.optimizer_step()
            built.forward(batches)
        return built.weights.to_host()


def test_ranks_without_images_take_part_in_overlapped_collectives(pool, studies):
    """The second rank has no image in its last micro-batch, then in none; buckets are small."""
    folder = studies["qwen2_5_vl"][0]
    rows = [folder.rows[:2], [folder.rows[3], folder.rows[3]]]
    dp2 = Setup(ParallelLayout(dp=2), optimizer=OptimizerOptions(lr=1e-2), trained_tower=True)
    overlapped = dp2._replace(overlap=OverlapOptions(grad_reduce=True, param_gather=True, bucket_size=2000))
    ours = pool.run(steps, 2, folder.path, overlapped, rows, folder.images)
    plain = pool.run(steps, 2, folder.path, dp2, rows, folder.images)
    alone = Setup(ParallelLayout(), optimizer=OptimizerOptions(lr=1e-2), trained_tower=True)
    (single,) = pool.run(steps, 1, folder.path, alone, [[*rows[0], *rows[1]]], folder.images)
    for weights in (*ours, *plain):
        for name, expected in single.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def log_probs_after_changes(
    place: Place, path: Path, setup: Setup, row: Row, images: list[Image], folder: Path
) -> dict[str, Tensor]:
    """A row's log-probs at the start, after a step, in a scope with the first weights, after the scope, and loaded."""
    batch = PackedMicroBatch.from_rows([(row.prompt, row.response)], {"weights": row.weights})
    with engine(place, path, setup) as built:
        built.set_images(path, {})

        def log_probs() -> Tensor:
            built.take_images(images)
            (output,) = built.forward([batch]) or [None]
            assert output is not None
            return output.log_probs.clone()

        first, found = built.copy_weights(), {"start": log_probs()}
        built.forward_backward([batch], policy_loss, OutputOptions(with_entropy=True))
        built.optimizer_step()
        found["stepped"] = log_probs()
        begin_save(built, folder).finish()
        with built.swapped_weights(first):
            found["swapped"] = log_probs()
        found["back"] = log_probs()
        built.load_hf(path)
        found["reloaded"] = log_probs()
        load_sharded(built, folder)
        found["restored"] = log_probs()
        return found


def test_features_are_those_of_the_weights(pool, studies, tmp_path):
    """The decoder has the same weights in each comparison, so features of other weights would show."""
    folder = studies["qwen2_5_vl"][0]
    setup = Setup(ParallelLayout(), optimizer=OptimizerOptions(lr=1e-2), trained_tower=True)
    args = (folder.path, setup, folder.rows[0], folder.images[:2], tmp_path / "checkpoint")
    (found,) = pool.run(log_probs_after_changes, 1, *args)
    assert (found["start"] - found["stepped"]).abs().max() > 1e-3
    for same in ("swapped", "reloaded"):
        assert torch.equal(found[same], found["start"])
    for same in ("back", "restored"):
        assert torch.equal(found[same], found["stepped"])


def test_the_tower_is_before_the_decoder_in_a_report_of_a_skipped_step():
    assert _depth("vision_tower.blocks.0.attn.qkv.weight") < _depth("embedding.word_embeddings.weight")


def exported(place: Place, path: Path, setup: Setup, row: Row, images: list[Image], target: Path) -> None:
    with engine(place, path, setup) as built:
        built.set_images(path, {})
        built.take_images(images)
        batch = PackedMicroBatch.from_rows([(row.prompt, row.response)], {"weights": row.weights})
        built.forward_backward([batch], policy_loss, OutputOptions(with_entropy=True))
        built.optimizer_step()
        built.export_hf(target, path)


def changes(pool, folder: Folder, setup: Setup, target: Path) -> dict[str, Tensor]:
    """Changes of all tensors of the folder by one step, by name in the files."""
    pool.run(exported, 1, folder.path, setup, folder.rows[0], folder.images[:2], target)
    before, after = tensors_of(folder.path), tensors_of(target)
    assert before.keys() == after.keys()
    return {name: after[name].double() - before[name].double() for name in before}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_changes_a_trained_tower_and_no_frozen_one(pool, studies, tmp_path, family):
    folder, setup = studies[family][0], Setup(ParallelLayout(), optimizer=OptimizerOptions(lr=1e-2))
    frozen = changes(pool, folder, setup, tmp_path / "frozen")
    trained = changes(pool, folder, setup._replace(trained_tower=True), tmp_path / "trained")
    tower = {name for name in frozen if "visual." in name}
    assert tower and not any(frozen[name].any() for name in tower)
    unused = {name for name in tower if not trained[name].any()}
    assert all("pos_embed" in name or name.endswith("k_proj.bias") for name in unused)
    assert all(frozen[name].any() == trained[name].any() for name in frozen.keys() - tower)


def test_the_tower_has_a_learning_rate_of_its_own(pool, studies, tmp_path):
    """The first step of Adam is the learning rate, whatever the gradient's size (without decay)."""
    folder = studies["qwen2_5_vl"][0]
    optimizer = OptimizerOptions(lr=1e-2, weight_decay=0, eps=1e-20, vision_lr_factor=0.1)
    setup = Setup(ParallelLayout(), optimizer=optimizer, trained_tower=True)
    moved = changes(pool, folder, setup, tmp_path / "export")
    for name, rate in (("visual.blocks.0.mlp.down_proj.weight", 1e-3), ("visual.merger.mlp.0.bias", 1e-3)):
        torch.testing.assert_close(moved[name].abs().max().item(), rate, rtol=1e-3, atol=0)
    decoder = [size.abs().max().item() for name, size in moved.items() if "layers.0.mlp.down_proj" in name]
    torch.testing.assert_close(decoder, [1e-2], rtol=1e-3, atol=0)
