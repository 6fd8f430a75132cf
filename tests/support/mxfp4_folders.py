"""Model folders whose experts are in MXFP4, as gpt-oss is published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EXCLUDED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantize(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``[experts, inputs, outputs]`` to MXFP4: blocks ``[experts, outputs, groups, 16]`` and scales."""
    groups = matrices.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100))) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_experts(folder: Path) -> None:
    """Quantize the experts of a folder with one weight file in place; the other weights become bfloat16."""
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantize(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": EXCLUDED}
    config_file.write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
