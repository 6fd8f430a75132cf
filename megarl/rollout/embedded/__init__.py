"""The embedded engine: continuous batching in plain torch, in the caller's process, on CPU or GPU.

``engine`` fulfils the engine contract, ``generation`` batches requests, ``decoder`` is the forward pass and
``decode_step`` its repetition per token, ``kv_cache`` holds keys and values and attends, ``sampling`` draws tokens and finds
their end, and ``weights`` holds the parameters and checks updates.
"""

from megarl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
