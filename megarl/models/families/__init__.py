"""Built-in model families; importing this package registers them."""

from megarl.models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo,
    qwen2,
    qwen3,
    qwen3_next,
    qwen_moe,
)

__all__ = [
    "deepseek",
    "gemma",
    "glm",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "qwen_moe",
]
