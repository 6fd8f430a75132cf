"""Imports of the processes of :mod:`.distributed`, made by their server: collections visit none of their objects."""

from __future__ import annotations

import importlib

from megarl.base.packages import without_garbage_collection

MODULES = (
    "megarl.workers.actor",
    "megarl.workers.critic",
    "transformers",
    "torch._dynamo",  # the first optimizer of a process imports it
)

with without_garbage_collection():
    for name in MODULES:
        importlib.import_module(name)
