"""A tiny random model of every family with images, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.vision_models import END, IMAGE, PROCESSOR, START, TEXT, TOWER, save_vision_model

_HYBRID = {
    **{name: value for name, value in TEXT.items() if name != "intermediate_size"},
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
_TOWER = {name: value for name, value in TOWER.items() if name not in ("window_size", "fullatt_block_indexes")}
_TOWER |= {"num_position_embeddings": 16}
_PLAIN = TEXT | {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
    },
}
NAMES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}
"""Prefix of transformers' classes by family."""
TEXTS = {
    "qwen3_5": _HYBRID | {"intermediate_size": 64},
    "qwen3_5_moe": _HYBRID | _EXPERTS,
    "qwen3_vl": _PLAIN,
    "qwen3_vl_moe": _PLAIN | {name: size for name, size in _EXPERTS.items() if not name.startswith("shared")},
}
TOWERS = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 2]})
FAMILIES = ("qwen2_5_vl", *NAMES)


def save_family(path: Path, family: str) -> Any:
    """Save a random model of a family as it is published, float32, with the files of its image processor; return it."""
    if family == "qwen2_5_vl":
        return save_vision_model(path)
    name = NAMES[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXTS[family],
        vision_config=TOWERS.get(family, _TOWER),
        image_token_id=IMAGE,
        video_token_id=121,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases are constant otherwise
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.lm_head.weight[IMAGE] = 0.0  # so that no greedy response has a token of an image
    model.save_pretrained(path)
    as_published(path, family)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return model


def as_published(path: Path, family: str) -> None:
    """Give the experts of Qwen3-VL the published form: transformers writes its own matrices, and reads both."""
    if family == "qwen3_vl_moe":
        published = {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors_of(path).items()}
        save_file(published, path / "model.safetensors", metadata={"format": "pt"})


def with_module_names(path: Path, model: Any) -> None:
    """Write a folder's weights under the names of transformers' modules: nested, with the experts of a layer stacked.

    Qwen3.5 is published in this form, transformers 4.52 to 4.57 wrote it for Qwen2.5-VL, and 5 writes it for Qwen3-VL.
    """
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors")


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a folder by their names in the files."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
