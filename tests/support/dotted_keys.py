"""Nested configurations from dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def set_keys(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested sections and set values by dotted path; missing sections are created."""
    merged = copy.deepcopy(dict(base))
    for path, value in values.items():
        node = merged
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return merged
