"""Built-in model families; importing this package registers them."""

from megarl.models.families import deepseek, llama, qwen

__all__ = ["deepseek", "llama", "qwen"]
