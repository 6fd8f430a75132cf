"""Models with images compute transformers' log-probs, entropies and gradients, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_cases import Setup, forward, refusal
from support.expected_errors import raises
from support.release import of_release
from support.vision_families import FAMILIES
from tiny_models import save_model
from vision_cases import LAYOUTS, Folder, check_study

from megarl.base.errors import DataError
from megarl.models import ParallelLayout, read_model_config
from megarl.models.vision_tower import ImageFeatures

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
    check_study(pool, *studies[family], LAYOUTS[case.removesuffix("+")], share=case.endswith("+"))


def test_pictures_change_log_probs(studies):
    """The tests would pass blindly otherwise."""
    for _, (outputs, _) in studies.values():
        (first, _), (twin, _) = outputs[:2]
        assert (first - twin).abs().max() > 1e-2


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
        features.add([replace(image, rows=image.columns, columns=image.rows)])
    assert error.value.code == "image.token-count"


def test_least_used_features_are_dropped_first(folder, monkeypatch):
    features = ImageFeatures(read_model_config(folder.path), folder.path, torch.device("cpu"), torch.float32)
    features.add(folder.images[:3])
    monkeypatch.setattr("megarl.models.vision_tower.HOST_BYTES", 32 * 4 * (8 + 6))
    features.add([folder.images[0]])  # of 8 tokens, and 6 of the second image are held
    assert [image.key in features for image in folder.images[:3]] == [True, False, False]
