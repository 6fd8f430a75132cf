"""The embedded engine: continuous batching in plain torch, in the caller's process, on CPU or GPU.

``engine`` fulfils the engine contract and holds the parameters, ``generation`` batches requests, and ``decoder`` is the
forward pass. ``kv_cache`` holds the states of sequences and attends over them, and ``sampling`` draws tokens and finds
their end.
"""

from megarl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
