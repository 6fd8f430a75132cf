"""Built-in model families; importing this package registers them."""

from megarl.models.families import deepseek, glm, llama, mistral, mixtral, olmo, qwen2, qwen3, qwen_moe

__all__ = ["deepseek", "glm", "llama", "mistral", "mixtral", "olmo", "qwen2", "qwen3", "qwen_moe"]
