r"""Boxed answers in LaTeX text: ``\boxed{5}``, ``\boxed {5}``, ``\boxed5`` and the same with ``\fbox``."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_WITHOUT_BRACES = re.compile(r"[^\s$]*?(?=[.,;:!?*]*(?:\s|\$|\\\)|\\\]|\Z))")
"""Up to white space or the end of the formula, without punctuation."""


def last_box(text: str) -> str | None:
    """Return the content of the last box; None without a box, or if its braces do not match."""
    ends = [box.end() for box in _BOX.finditer(text)]
    if not ends:
        return None
    start, depth = ends[-1], 0
    if not text.startswith("{", start):
        content = _WITHOUT_BRACES.match(text, start)
        return content[0] if content and content[0] else None
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return None
