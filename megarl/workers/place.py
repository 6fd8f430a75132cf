"""Which of a role's processes a worker is."""

from __future__ import annotations

from typing import NamedTuple


class WorkerPlace(NamedTuple):
    """What a worker needs to know in order to meet its peers; the first argument of every worker class.

    Attributes:
        rank: this process's rank in the role.
        world_size: processes of the role.
        master_addr: address of the role's rank 0.
        master_port: port there, free for the process group.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
