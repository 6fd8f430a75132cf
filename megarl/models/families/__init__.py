"""Model families. Importing this package registers them."""

from megarl.models.families import llama, qwen2, qwen3

__all__ = ["llama", "qwen2", "qwen3"]
