"""Extension of griffe for the API pages of the site: a role such as ``:class:`~a.b.C``` in a docstring becomes code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`(~?)(?:megarl\.)?([\w.]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrites the docstring of each object after it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles; ``~`` leaves the last name."""
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """Return a docstring with roles as code, and code in single backticks."""
    short = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    return re.sub(r"``([^`\n]+)``", r"`\1`", short)
