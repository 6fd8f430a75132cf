"""The live line of the console: how far the run is, and the phase that is under way."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 28


def clock_text(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class PhaseProgress:
    """How far one phase is.

    Args:
        name: the phase.
        expected_seconds: what it took last time; None the first time.
        clock: seconds that never run backwards.
    """

    def __init__(self, name: str, expected_seconds: float | None, clock: Callable[[], float]) -> None:
        self.name = name
        self.expected_seconds = expected_seconds
        self._clock = clock
        self._start = clock()
        self._reported: tuple[int, int] | None = None

    def update(self, completed: int, total: int) -> None:
        """Report that ``completed`` of ``total`` pieces are done."""
        self._reported = (completed, total)

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._start

    @property
    def share(self) -> float | None:
        """Share that is done, 0 to 1: as reported, else by the time it took last; None where nobody can know."""
        if self._reported is not None:
            completed, total = self._reported
            return min(1.0, completed / total) if total else 1.0
        if self.expected_seconds:
            return min(0.99, self.seconds / self.expected_seconds)
        return None

    @property
    def remark(self) -> str:
        """What stands beside the bar."""
        if self._reported is not None:
            return f"{self._reported[0]}/{self._reported[1]}  {self.seconds:.1f} s"
        usual = f" of about {self.expected_seconds:.1f}" if self.expected_seconds else ""
        return f"{self.seconds:.1f}{usual} s"


class LiveStatus:
    """State and picture of the live line.

    Args:
        total_steps: steps of the run, None where they are not known.
        clock: seconds that never run backwards.
    """

    def __init__(self, total_steps: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_steps = total_steps
        self._steps_done = 0
        self._clock = clock
        self._stack: list[PhaseProgress] = []
        self._last_seconds: dict[str, float] = {}
        self._first_mark: tuple[float, int] | None = None  # when the first step of this process ended, and which it was

    @property
    def steps_done(self) -> int:
        """The last finished step."""
        return self._steps_done

    @steps_done.setter
    def steps_done(self, step: int) -> None:
        """Note a finished step; the first one starts the clock of the pace."""
        self._steps_done = step
        if self._first_mark is None:
            self._first_mark = (self._clock(), step)

    def enter(self, name: str) -> PhaseProgress:
        """A phase begins."""
        self._stack.append(PhaseProgress(name, self._last_seconds.get(name), self._clock))
        return self._stack[-1]

    def leave(self) -> None:
        """The innermost phase ends."""
        phase = self._stack.pop()
        self._last_seconds[phase.name] = phase.seconds

    def seconds_left(self) -> float | None:
        """Seconds until the last step, by the pace since the first row; None before there is one."""
        if self._first_mark is None or self.total_steps is None:
            return None
        since, first = self._first_mark
        if self._steps_done <= first:
            return None
        return (self._clock() - since) / (self._steps_done - first) * (self.total_steps - self._steps_done)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 1))
        for justify in ("right", "left", "left", "left"):
            grid.add_column(justify=justify, no_wrap=True)
        if self.total_steps:
            left = self.seconds_left()
            grid.add_row(
                Text(f"step {self._steps_done}/{self.total_steps}", style="bold"),
                ProgressBar(self.total_steps, self._steps_done, width=BAR_WIDTH, complete_style="green"),
                Text(f"{100 * self._steps_done / self.total_steps:.0f} %"),
                Text(f"{clock_text(left)} left" if left is not None else "", style="dim"),
            )
        if self._stack:
            phase = self._stack[-1]
            share = phase.share
            bar = ProgressBar(1.0, share or 0.0, width=BAR_WIDTH, pulse=share is None, complete_style="cyan")
            percent = f"{100 * share:.0f} %" if share is not None else ""
            grid.add_row(Text(phase.name, style="cyan"), bar, Text(percent), Text(phase.remark, style="dim"))
        yield grid
