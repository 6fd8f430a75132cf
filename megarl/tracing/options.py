"""What of a run's processes is recorded; goes to every process when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProfileOptions:
    """A profiler in some processes; see the configuration's section ``global_profiler``.

    Attributes:
        tool: ``torch``, ``torch_memory`` or ``nsys``.
        folder: where files go, on the process's own node.
        discrete: a file per verb instead of per step.
        contents: with ``torch``, what is recorded: ``cpu``, ``cuda``, ``memory``, ``shapes``, ``stack``.
        max_entries: with ``torch_memory``, allocations that are remembered.
        nsight: with ``nsys``, options of ``nsys profile``, by their names without dashes.
    """

    tool: str
    folder: str
    discrete: bool = False
    contents: tuple[str, ...] = ("cpu", "cuda")
    max_entries: int = 100_000
    nsight: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleProfile:
    """The ranks of a role with a profiler; empty = all."""

    options: ProfileOptions
    ranks: tuple[int, ...] = ()

    def of(self, rank: int) -> ProfileOptions | None:
        """What a rank records."""
        return self.options if not self.ranks or rank in self.ranks else None


@dataclass(frozen=True)
class TracingOptions:
    """How a run's processes are watched.

    Attributes:
        watched: processes show what they do on a :class:`~megarl.tracing.board.Board`, and tell their stacks when they
            are asked to.
        timeline: processes keep spans of the steps that are recorded.
        profiles: by role.
    """

    watched: bool = False
    timeline: bool = False
    profiles: dict[str, RoleProfile] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self.watched or self.timeline or bool(self.profiles)

    def profile(self, role: str, rank: int) -> ProfileOptions | None:
        """What a process profiles."""
        return self.profiles[role].of(rank) if role in self.profiles else None
