"""Rows with images in their responses compute transformers' log-probs, entropies and gradients."""

from __future__ import annotations

import pytest
import torch
from support.release import of_release
from support.vision_models import END, START
from tiny_models import Row
from vision_cases import LAYOUTS, Folder, check_study

from megarl.base.image_tokens import Image
from megarl.megatron import PackedMicroBatch

CASES = [
    *("qwen2_5_vl single", "qwen2_5_vl tp2cp2sp", "qwen2_5_vl pp2vpp2+", "qwen3_vl pp2vpp2+", "qwen3_5 single"),
    *of_release([], ["qwen2_5_vl cp2", "qwen2_5_vl dp2+", "qwen3_vl tp2cp2sp", "qwen3_5 tp2sp", "qwen3_5_moe ep2"]),
]
"""Family and layout; ``+`` stores equal beginnings once."""


def ids_of(parts: list[int | Image]) -> torch.Tensor:
    spans = ([START, *part.token_ids, END] if isinstance(part, Image) else [part] for part in parts)
    return torch.tensor([number for span in spans for number in span])


def turns(prompt: list[int | Image], response: list[int | Image], seed: int) -> Row:
    """A row whose images in the response, with their frames, have no weight."""
    ids = ids_of(response)
    numbers = torch.randn(2, len(ids), generator=torch.Generator().manual_seed(seed))
    shown = (ids < 0) | (ids == START) | (ids == END)
    return Row(ids_of(prompt), ids, weights=torch.where(shown, 0.0, numbers[0] / 20), returns=numbers[1])


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The folder of each family with rows of several turns, and its reference."""
    prepared = {}

    def study_of(family):
        if family not in prepared:
            folder = Folder(tmp_path_factory.mktemp(family), family)
            first, tall, twin, dot, odd = folder.images
            folder.rows = [
                turns([5, 6, first, 7], [8, 9, tall, 10, 11], 0),
                turns([5, 6, first, 7], [8, 9, twin, 10, 11], 1),  # equal but for the second picture
                turns([20, 21], [22, dot, 23, odd, 24, 25], 2),  # no image in the prompt
                turns([5, 6, first, 7], [4, first, 4, 4], 3),  # the prompt's image again
                turns([20, 21], [22, 23, 24], 4),
                turns([dot, 3], [30, twin, tall, 31], 5),
                turns([dot, 3, 30, twin, tall, 31], [32, odd, 33], 6),  # the next turn of the row before
            ]
            prepared[family] = folder, folder.reference()
        return prepared[family]

    return study_of


@pytest.mark.parametrize("case", CASES)
def test_images_in_responses_equal_transformers(pool, studies, case):
    family, layout = case.split()
    check_study(pool, *studies(family), LAYOUTS[layout.removesuffix("+")], share=layout.endswith("+"))


def test_pictures_of_a_later_turn_change_log_probs_after_them(studies):
    folder, (outputs, _) = studies("qwen2_5_vl")
    (first, _), (twin, _) = outputs[:2]
    picture = folder.images[1]
    after = 3 + picture.rows * picture.columns
    assert torch.equal(first[:3], twin[:3]) and (first[after + 1] - twin[-2]).abs() > 1e-3


def test_targets_are_tokens_of_the_vocabulary(studies):
    row = studies("qwen2_5_vl")[0].rows[0]
    micro_batch = PackedMicroBatch.from_rows([(row.prompt, row.response)])
    assert torch.equal(micro_batch.targets, row.response.clamp(min=0)) and micro_batch.tokens.min() < 0
    ends = PackedMicroBatch.from_rows([(row.prompt, row.response[:4])], at_end=True)
    assert ends.targets.tolist() == [0]
