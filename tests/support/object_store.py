"""Use of Ray's object store on the only node of a test."""

from __future__ import annotations

import gc
from typing import Any

import ray
from ray._private.internal_api import node_stats


def store_stats() -> Any:
    """Return Ray's statistics of the store, after this process has dropped its garbage."""
    gc.collect()
    node = ray.nodes()[0]
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats


def store_bytes() -> int:
    """Return the bytes of all objects in the store."""
    return int(store_stats().object_store_bytes_used)
