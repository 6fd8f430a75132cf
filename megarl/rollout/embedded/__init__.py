"""The embedded engine: continuous batching in plain torch, in the caller's own process, on CPU or GPU.

``weights`` holds the parameters and checks each update, ``decoder`` computes, ``kv_cache`` remembers, ``attention``
connects the two, ``sampling`` draws tokens, ``batch`` is the set of running sequences, ``engine`` the loop over them.
"""

from megarl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
