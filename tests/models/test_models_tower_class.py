"""The compute cost of vision towers against torch's own count of operations in transformers' towers."""

import pytest
import torch
from support.vision_families import FAMILIES, save_family
from torch.utils.flop_counter import FlopCounterMode

from megarl.models import read_model_config
from megarl.models.tower_class import tower_class, tower_flops


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_flops_equal_those_of_a_forward_pass(tmp_path, family):
    """For images of whole windows; eager attention, as torch does not count its own kernel for CPUs."""
    save_family(tmp_path, family)
    vision = read_model_config(tmp_path).vision
    config = tower_class(vision).config_class(**vision.settings, attn_implementation="eager")
    tower = tower_class(vision)(config)
    patch = 3 * config.temporal_patch_size * config.patch_size**2
    for rows, columns in ((2, 2), (4, 8), (6, 4)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.zeros(4 * rows * columns, patch), grid_thw=grid)
        assert counter.get_total_flops() == tower_flops(vision, rows * columns)
