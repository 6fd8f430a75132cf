"""Configurations written as in a job's command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def set_keys(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested sections with some keys set, each by its dotted path; sections that are missing are made."""
    merged = copy.deepcopy(dict(base))
    for path, value in values.items():
        node = merged
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return merged
