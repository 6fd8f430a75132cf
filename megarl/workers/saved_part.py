"""What a worker answers when it is asked to save, as a plain value that the driver can read without its imports."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.files import FileEntry


@dataclass(frozen=True)
class SavedPart:
    """What one rank contributed to a checkpoint.

    Attributes:
        entries: size and digest of each file that it wrote, by path relative to the role's folder.
        seconds: it wrote for.
        failure: why there is no checkpoint, the same on every rank; empty where there is one.
    """

    entries: dict[str, FileEntry] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
