"""Search-R1's protocol: what the policy's tags mean, and how it is answered.

The policy thinks in ``<think>``, asks in ``<search>`` and answers in ``<answer>``; what was found stands in
``<information>``. A turn ends at ``</search>`` or ``</answer>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megarl.retrieval.client import Hit

STOP = ("</search>", "</answer>")
INVALID = (
    "\nThis turn had no action that could be carried out. To look something up, write a query between <search> and "
    "</search>. To finish, write the answer between <answer> and </answer>. Please go on.\n"
)
NOTHING_FOUND = "No document matches this query."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|search|information|answer)>")


class Action(NamedTuple):
    """What a turn asks for.

    Attributes:
        kind: ``search``, ``answer``, or ``invalid`` where it has no action.
        text: the query or the answer.
    """

    kind: Literal["search", "answer", "invalid"]
    text: str = ""


def read_action(turn: str) -> Action:
    """The first action of a turn; one without text is invalid."""
    match = _ACTION.search(turn)
    if match is None or not match[2].strip():
        return Action("invalid")
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def information(text: str) -> str:
    """A text as the environment's turn."""
    return f"\n\n<information>{text.strip()}</information>\n\n"


def listed(hits: Sequence[Hit]) -> str:
    """Documents as the policy reads them, without the protocol's tags: a document is no turn and gives no answer."""
    if not hits:
        return NOTHING_FOUND
    text = "\n".join(f"Doc {number}(Title: {hit.title}) {hit.text}" for number, hit in enumerate(hits, 1))
    return _TAGS.sub("", text)
