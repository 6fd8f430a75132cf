"""A tiny random Qwen2.5-VL as transformers saves it, and pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as pil

VOCABULARY, IMAGE, START, END = 128, 120, 122, 123
"""Size of the vocabulary; the tokens of an image, and of its start and end."""
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}
TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.1,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def save_vision_model(path: Path, **changes: Any) -> Any:
    """Save a random model, float32, with the files of its image processor; return it.

    Args:
        **changes: fields of the text model's config.
    """
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 121}
    text = {**TEXT, **changes}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=TOWER, tie_word_embeddings=text["tie_word_embeddings"], **ids
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases are constant otherwise
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return model


def png(height: int, width: int, seed: int = 0) -> bytes:
    """Encode a random picture."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pil.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
