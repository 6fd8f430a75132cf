"""The embedded engine: continuous batching in plain torch, in the caller's process, on CPU or GPU.

``engine`` fulfils the engine contract, ``generation`` batches requests, and ``decoder`` is the forward pass.
``kv_cache`` holds keys and values and attends over them, ``sampling`` draws tokens and finds their end, and ``weights``
holds the parameters and checks updates.
"""

from megarl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
