"""The embedded engine: continuous batching in plain torch, in the caller's process, on CPU or GPU.

``engine`` fulfils the engine contract, and ``generation`` batches requests. ``decoder`` is the forward pass;
``decode_step`` repeats it for each token. ``kv_cache`` holds keys and values and attends over them, ``sampling`` draws
tokens and finds their end, and ``weights`` holds the parameters and checks updates.
"""

from megarl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
