"""The live view of the console: progress of the run, the current phase, and the figures of the last step.

It is redrawn several times a second for the current size of the terminal: as a panel; without a frame if the terminal
has few lines; without the least important parts if its lines are short.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import psutil
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.base.formatting import clock_duration
from megarl.base.processes import READ_ERRORS, descendants
from megarl.tracking.console_tables import MetricColumn
from megarl.tracking.run_summary import sparkline

WIDEST = 110
"""Largest width of the view in characters, so that labels stay near their values on a wide screen."""
NARROW, SHORT = 64, 12
"""Below ``NARROW`` characters the remarks are dropped, below ``SHORT`` lines the frame and the figures."""
HISTORY = 24
"""Steps in the sparkline."""
_PERCENT, _REMARK, _GAP, _SMALLEST_CURVE = 5, 25, "   ", 6
DEVICE_MEMORY = "perf/max_memory_allocated_gb"


class PhaseProgress:
    """Progress of a phase.

    Args:
        expected_seconds: its last duration; None the first time.
        clock: monotonic clock in seconds.

    Attributes:
        on_update: called with each report; None = only the bar shows it.
    """

    def __init__(self, name: str, expected_seconds: float | None, clock: Callable[[], float]) -> None:
        self.on_update: Callable[[PhaseProgress, int, int], None] | None = None
        self.name = name
        self.expected_seconds = expected_seconds
        self._clock = clock
        self._start = clock()
        self._reported: tuple[int, int] | None = None

    def update(self, completed: int, total: int) -> None:
        """Report that ``completed`` of ``total`` items are done."""
        self._reported = (completed, total)
        if self.on_update is not None:
            self.on_update(self, completed, total)

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._start

    @property
    def share(self) -> float | None:
        """Finished share, 0 to 1: as reported, else estimated from the last duration; None = unknown."""
        if self._reported is not None:
            completed, total = self._reported
            return min(1.0, completed / total) if total else 1.0
        if self.expected_seconds:
            return min(0.99, self.seconds / self.expected_seconds)
        return None

    @property
    def remark(self) -> str:
        """The text next to the bar."""
        if self._reported is not None:
            return f"{self._reported[0]}/{self._reported[1]}  {self.seconds:.1f} s"
        usual = f" of about {self.expected_seconds:.1f}" if self.expected_seconds else ""
        return f"{self.seconds:.1f}{usual} s"


class HostMemoryGauge:
    """Memory of this process and its descendants, measured every few seconds."""

    every_s = 3.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at: float | None = None
        self._gigabytes = 0.0

    def __call__(self) -> float:
        """Return resident memory in GiB; shared memory counts once per process."""
        now = self._clock()
        if self._at is None or now - self._at >= self.every_s:
            self._at, total = now, 0
            for process in (psutil.Process(), *descendants()):
                with contextlib.suppress(*READ_ERRORS):
                    total += process.memory_info().rss
            self._gigabytes = total / 2**30
        return self._gigabytes


class LiveStatus:
    """State and rendering of the live view.

    Args:
        columns: columns of the step table; the view shows their last values, and a sparkline of the first.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        columns: Sequence[MetricColumn] = (),
        title: str = "",
    ) -> None:
        self.total_steps = total_steps
        self.title = title
        self._columns = tuple(column for column in columns if not column.phase and column.header != "sec")
        self._steps_done = 0
        self._clock = clock
        self._began = clock()
        self._stack: list[PhaseProgress] = []
        self._last_seconds: dict[str, float] = {}
        self._first_mark: tuple[float, int] | None = None  # end time and number of this process's first step
        self._figures: dict[str, float] = {}
        self._device_gb: float | None = None
        self._history: deque[float] = deque(maxlen=HISTORY)
        self.host_memory: Callable[[], float] = HostMemoryGauge(clock)

    @property
    def steps_done(self) -> int:
        """The last finished step."""
        return self._steps_done

    @steps_done.setter
    def steps_done(self, step: int) -> None:
        """Record a finished step; the first step is the start of the pace estimate."""
        self._steps_done = step
        if self._first_mark is None:
            self._first_mark = (self._clock(), step)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Record the figures of a step."""
        for number, column in enumerate(self._columns):
            value = column.read(metrics)
            if value is not None:
                self._figures[column.header] = value
                if number == 0:
                    self._history.append(value)
        self._device_gb = metrics.get(DEVICE_MEMORY, self._device_gb)

    def enter(self, name: str) -> PhaseProgress:
        """Begin a phase."""
        self._stack.append(PhaseProgress(name, self._last_seconds.get(name), self._clock))
        return self._stack[-1]

    def leave(self) -> None:
        """End the innermost phase."""
        phase = self._stack.pop()
        self._last_seconds[phase.name] = phase.seconds

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last step from the pace since the first row; None before the first row."""
        if self._first_mark is None or self.total_steps is None:
            return None
        since, first = self._first_mark
        if self._steps_done <= first:
            return None
        return (self._clock() - since) / (self._steps_done - first) * (self.total_steps - self._steps_done)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        is_short, is_ascii = options.size.height < SHORT, options.ascii_only
        inner = width - (0 if is_short else 4)
        parts: list[RenderableType] = []
        if self.total_steps or self._stack:
            parts.append(self._bars(inner))
        if self._figures and not is_short:
            parts.append(self._figures_line(inner, is_ascii))
        if not parts:
            return
        if is_short:
            yield Group(*parts)
            return
        name = Text(f" {self.title} ", style="bold") if self.title else None
        if name is not None:
            name.truncate(max(4, inner - 4), overflow="crop" if is_ascii else "ellipsis")
        yield Panel(
            Group(*parts),
            title=name,
            title_align="left",
            box=box.ASCII if is_ascii else box.ROUNDED,
            border_style="bright_black",
            width=width,
        )

    def _bars(self, width: int) -> Table:
        """The bars of run and phase; labels and remarks keep their positions from phase to phase."""
        is_narrow = width < NARROW
        names = [f"step {self.total_steps}/{self.total_steps}", *self._last_seconds, *(p.name for p in self._stack)]
        name = min(max(map(len, names)), max(8, width // 3))
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, width=name, overflow="crop")
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, width=_PERCENT)
        bar = max(4, width - name - _PERCENT - (2 if is_narrow else 3 + _REMARK))
        if not is_narrow:
            grid.add_column(no_wrap=True, max_width=_REMARK, overflow="crop")
        for row in (self._run_row(bar), self._phase_row(bar)):
            if row:
                grid.add_row(*(row[:3] if is_narrow else row))
        return grid

    def _run_row(self, bar: int) -> list[RenderableType]:
        if not self.total_steps:
            return []
        done, total = self._steps_done, self.total_steps
        return [
            Text(f"step {done}/{total}", style="bold"),
            ProgressBar(total, done, width=bar, complete_style="green"),
            Text(f"{100 * done / total:.0f} %"),
            Text(self._clock_remark(), style="dim"),
        ]

    def _phase_row(self, bar: int) -> list[RenderableType]:
        if not self._stack:
            return [Text("")] * 4  # the height stays
        phase = self._stack[-1]
        share = phase.share
        return [
            Text(phase.name, style="cyan"),
            ProgressBar(1.0, share or 0.0, width=bar, pulse=share is None, complete_style="cyan"),
            Text(f"{100 * share:.0f} %" if share is not None else ""),
            Text(phase.remark, style="dim"),
        ]

    def _clock_remark(self) -> str:
        left = self.seconds_left()
        elapsed = clock_duration(self._clock() - self._began)
        if left is None:
            return f"{elapsed} gone"
        whole = f"{clock_duration(left)} left, {elapsed} gone"
        return whole if len(whole) <= _REMARK else f"{clock_duration(left)} left"

    def _figures_line(self, width: int, is_ascii: bool) -> Text:
        """The figures that fit, each with its name, and a sparkline of the first if there is room."""
        is_device = self._device_gb is not None
        gigabytes = self._device_gb if is_device else self.host_memory()
        shown = [column for column in self._columns if column.header in self._figures]
        pieces = [
            Text.assemble((f"{column.header} ", "dim"), (column.show(value, column.width).strip(), column.style))
            for column in shown
            for value in (self._figures[column.header],)
        ]
        pieces.append(Text.assemble(("device memory " if is_device else "host memory ", "dim"), f"{gigabytes:.1f} GiB"))
        for number in reversed([number for number, column in enumerate(shown) if column.is_spare]):
            if sum(piece.cell_len + len(_GAP) for piece in pieces) - len(_GAP) > width:
                del pieces[number]
        room = width - sum(piece.cell_len + len(_GAP) for piece in pieces) + len(_GAP) - 1
        if shown and shown[0] is self._columns[0] and len(self._history) > 1 and room >= _SMALLEST_CURVE:
            pieces[0].append(" " + sparkline(list(self._history)[-room:], HISTORY, is_ascii), style="green")
        line = Text(_GAP).join(pieces)
        line.truncate(width, overflow="crop" if is_ascii else "ellipsis")
        return line
