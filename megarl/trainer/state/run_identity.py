"""Identity of a run: an ID in its folder, its checkpoints and its exported model; a resumed run keeps it.

A run replaces and removes checkpoints and exports of its own ID only, so no run destroys the work of another.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

ID_FILE = "run_id"
"""File with the ID, in each folder that a run writes."""
_ID_LETTERS = 20


def identify_run(resumed: Path | None = None) -> str:
    """Return the ID of a run: that of the checkpoint to resume from, or a new one.

    Args:
        resumed: folder of the checkpoint; None for a new run.
    """
    earlier = None if resumed is None else read_run_id(resumed)
    return earlier or uuid4().hex[:_ID_LETTERS]


def read_run_id(folder: Path) -> str | None:
    """Read the ID of the run that wrote a folder; None without one."""
    try:
        return (folder / ID_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None
