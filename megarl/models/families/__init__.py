"""Built-in model families; importing this package registers them."""

from megarl.models.families import deepseek, gemma, glm, gpt_oss, llama, olmo, qwen, qwen3_next

__all__ = ["deepseek", "gemma", "glm", "gpt_oss", "llama", "olmo", "qwen", "qwen3_next"]
