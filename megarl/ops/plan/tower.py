"""FLOPs and activations of vision towers, if one image fills each prompt: the most that images can cost.

A role computes the features of a frozen tower in its first pass of a step. A trained tower computes in each pass of the
actor; an update computes each distinct image of a micro-batch, forward and backward. Each rank of the first stage has
the whole tower and the images of its data-parallel rank, and the other stages wait.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.models.model_config import Vision
from megarl.models.sequence_cost import tower_flops
from megarl.models.tower_class import tower_class, tower_shapes
from megarl.ops.plan.flops import BACKWARD, Cost, Lengths, PhaseCost
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole

FLOAT32 = 4


def tower_cost(
    job: PlannedJob, role: PlannedRole, planned: PlannedPass, hardware: Hardware, lengths: Lengths
) -> PhaseCost:
    """Return the cost of the vision tower in a pass; nothing for a model of text, or if features exist."""
    flops = 0.0
    updates = planned.updates and role.trains_tower
    if (planned == role.passes[0] or role.trains_tower) and role.model.vision is not None and job.rollout is not None:
        repeats = updates and not job.micro_batches(role, planned).share_prompts
        images = planned.samples / (1 if repeats else job.batches.samples_per_prompt)
        flops = (1 + BACKWARD * updates) * images * tower_flops(role.model.vision, lengths.prompt)
    cost = Cost(compute=hardware.compute_s(flops / role.layout.dp, role.megatron.dtype))
    return PhaseCost.of(planned.phase, cost, flops, role.layout.world_size, hardware)


class SavedBytes(NamedTuple):
    """Bytes per image token that autograd saves in a tower's forward pass, and in a recomputed block."""

    saved: int
    recomputed: int


def saved_bytes(vision: Vision, width: int, *, recomputes: bool = False) -> SavedBytes:
    """Return the bytes that autograd saves per token of an image.

    The list follows transformers' layers with PyTorch's attention.

    Args:
        width: bytes of an element.
        recomputes: blocks save their inputs alone.
    """
    config, shapes = tower_class(vision).config_class(**vision.settings), tower_shapes(vision)
    hidden, first = config.hidden_size, f"{vision.prefix}blocks.0."
    is_gated, is_rms = f"{first}mlp.gate_proj.weight" in shapes, f"{first}norm1.bias" not in shapes
    # The inputs of both norms, their scaled outputs, the attention's output before its projection; queries, keys and
    # values before and after rotation. RMS norms save their input in float32 and the normalized one, too.
    block = width * (11 * hidden + (4 if is_gated else 2) * config.intermediate_size) + FLOAT32 * config.num_heads
    block += 2 * FLOAT32 * (hidden + 1) if is_rms else 2 * 2 * width
    merger = width * 4 * hidden + (FLOAT32 * hidden if is_rms else 0)
    patch = width * config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = config.spatial_merge_size**2  # of a token
    total = config.depth * (width * hidden if recomputes else block) + (1 + vision.deepstack) * merger + patch
    return SavedBytes(int(patches * total), int(patches * block) if recomputes else 0)
