"""The console of a job: the current phase, a table row per step, and a closing summary.

On a terminal, two bars at the bottom show the progress of the run and of the current phase; rows scroll above them.
Without a terminal (a log file, CI) there are no bars and no table: each step is one self-contained line. The log gets
every printed line, without colors.
"""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.base.formatting import count_noun, duration
from megarl.base.logs import ALREADY_SHOWN, WrappedStream
from megarl.tracking.console_tables import RL_COLUMNS, MetricColumn, StepTable, plain_summary
from megarl.tracking.jsonl_files import SKIPPED_STEPS_SUFFIX, VALIDATION_PREFIX

logger = logging.getLogger(__name__)

ROWS_PER_HEADER = 25
PROGRESS_S = 2.0
"""Seconds between lines about the progress of a phase, where there are no bars."""
WIDEST = 110
"""Largest width of the bars in characters, so that labels stay near their values on a wide screen."""
_LONG_PHASES = ("gen", "testing", "update")
"""Phases that may take minutes before the first row."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ASCII = str.maketrans({"│": "|", "·": "-", "…": "...", "✓": "done:", "✗": "failed:", "◆": "*"})


class PhaseProgress:
    """Progress of a phase.

    Args:
        expected_seconds: its last duration; None the first time.
        show: prints lines about the progress; None = only the bar shows it.
    """

    def __init__(
        self,
        name: str,
        expected_seconds: float | None,
        clock: Callable[[], float],
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.expected_seconds = expected_seconds
        self._clock, self._show = clock, show
        self._start = clock()
        self._next_line = -math.inf
        self._reported: tuple[int, int] | None = None

    def update(self, completed: int, total: int) -> None:
        """Report that ``completed`` of ``total`` items are done; the first and last reports are always printed."""
        self._reported = (completed, total)
        if self._show is not None and (self._clock() >= self._next_line or completed >= total):
            self._next_line = self._clock() + PROGRESS_S
            self._show(f"{self.name} {completed}/{total}")

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
        return min(0.99, self.seconds / self.expected_seconds) if self.expected_seconds else None

    @property
    def remark(self) -> str:
        """The text next to the bar."""
        if self._reported is not None:
            return f"{self._reported[0]}/{self._reported[1]}  {self.seconds:.1f} s"
        usual = f" of about {self.expected_seconds:.1f}" if self.expected_seconds else ""
        return f"{self.seconds:.1f}{usual} s"


class ProgressBars:
    """Progress bars for the run and the innermost phase, as a rich renderable."""

    def __init__(self, total_steps: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_steps = total_steps
        self._clock = clock
        self._began = clock()
        self._steps_done = 0
        self._first_mark: tuple[float, int] | None = None  # end time and number of this process's first step
        self._stack: list[PhaseProgress] = []
        self._last_seconds: dict[str, float] = {}

    def finish_step(self, step: int) -> None:
        """Record a finished step; the first one is the start of the pace estimate."""
        self._steps_done = step
        self._first_mark = self._first_mark or (self._clock(), step)

    def enter(self, name: str, show: Callable[[str], None] | None = None) -> PhaseProgress:
        """Begin a phase."""
        self._stack.append(PhaseProgress(name, self._last_seconds.get(name), self._clock, show))
        return self._stack[-1]

    def leave(self) -> None:
        """End the innermost phase."""
        phase = self._stack.pop()
        self._last_seconds[phase.name] = phase.seconds

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last step from the pace since the first row; None before the second row."""
        if self._first_mark is None or self.total_steps is None or self._steps_done <= self._first_mark[1]:
            return None
        since, first = self._first_mark
        return (self._clock() - since) / (self._steps_done - first) * (self.total_steps - self._steps_done)

    def __rich_console__(self, console: RichConsole, options: Any) -> Iterator[RenderableType]:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.width = min(options.max_width, WIDEST)
        grid.add_column(no_wrap=True, min_width=min(14, grid.width // 4))  # the bars do not move with the phase's name
        grid.add_column(no_wrap=True, ratio=1)
        grid.add_column(no_wrap=True, justify="right", min_width=min(5, grid.width // 4))
        grid.add_column(no_wrap=True, min_width=min(34, grid.width // 3))
        if self.total_steps:
            share, left = self._steps_done / self.total_steps, self.seconds_left()
            remark = f"{duration(self._clock() - self._began)} gone"
            remark = remark if left is None else f"{duration(left)} left, {remark}"
            self._add(grid, Text(f"step {self._steps_done}/{self.total_steps}", "bold"), share, remark, "green")
        if self._stack:
            phase = self._stack[-1]
            self._add(grid, Text(phase.name, "cyan"), phase.share, phase.remark, "cyan")
        elif self.total_steps:
            grid.add_row("")  # the height stays
        if grid.row_count:
            yield grid

    @staticmethod
    def _add(grid: Table, name: Text, share: float | None, remark: str, color: str) -> None:
        bar = ProgressBar(1.0, share or 0.0, pulse=share is None, complete_style=color)
        grid.add_row(name, bar, "" if share is None else f"{100 * share:.0f} %", Text(remark, "dim"))


class Console:
    """The console of one job; use it as a context manager, which restores the terminal in any case.

    Args:
        total_steps: steps of the run, for the progress bar; None = unknown.
        output: the rich console to print on; standard output by default.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        columns: Sequence[MetricColumn] = RL_COLUMNS,
        output: RichConsole | None = None,
        quiet: bool = False,
    ) -> None:
        self.output = output or RichConsole(highlight=False, file=sys.stdout)
        self.quiet = quiet
        self._is_ascii = not self.output.encoding.lower().startswith("utf")
        self._has_bars = self.output.is_terminal and not self.output.is_dumb_terminal and not quiet
        self._captures = output is None
        self._streams = ExitStack()
        self.table = StepTable(columns, self.output.width, total_steps)
        self.bars = ProgressBars(total_steps)
        self._rewards: list[float] = []
        self._named: set[str] = set()
        self._skipped_steps = 0
        self._last_validation: dict[str, float] = {}
        self._rows_since_header = 0
        self._legend_shown = False
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self._captures:
            for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
                stream = _CapturedStream(self, getattr(sys, name), name)
                self._streams.enter_context(redirect(stream))
                self._streams.callback(stream.flush)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._streams.close()

    @property
    def shows_bars(self) -> bool:
        """Whether the bars are on the screen."""
        return self._live is not None

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of steps when it becomes known."""
        self.table.total_steps = self.bars.total_steps = total_steps

    @contextmanager
    def phase(self, name: str, announce: bool = False) -> Iterator[PhaseProgress]:
        """Show a phase in the bars. Phases may nest; the innermost is shown.

        The bar follows the reports to the yielded object. Without reports it follows the phase's last duration.

        Args:
            announce: print a line with the seconds at the end, for phases that happen once. Without bars, also lines
                at the start and about progress; long phases of a step have a line at their first start.
        """
        if self._has_bars and self._live is None:
            self._live = Live(
                self.bars, console=self.output, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        start = time.perf_counter()
        if not self._has_bars and (announce or (name in _LONG_PHASES and name not in self._named)):
            self._named.add(name)
            self.message(f"{name} ...")
        mark, style = "✗", "red"
        try:
            yield self.bars.enter(name, self.message if announce and not self._has_bars else None)
            mark, style = "✓", "green"
        finally:
            self.bars.leave()
            if announce:
                self.message(Text.assemble((mark, style), f" {name} ", (f"{time.perf_counter() - start:.1f} s", "dim")))

    def message(self, text: str | Text) -> None:
        """Print a line above the bars; rich markup in ``text`` is not interpreted."""
        self._print(text)
        logger.info("%s", text.plain if isinstance(text, Text) else text)

    def warn(self, text: str) -> None:
        """Print a warning, also on a quiet console."""
        self._print(Text(text, style="yellow"), force=True)
        logger.warning("%s", text, extra=ALREADY_SHOWN)

    def show(self, table: Table) -> None:
        """Print a table, such as an evaluation's result, also on a quiet console."""
        self.output.print(table)
        plain = RichConsole(width=120, file=io.StringIO(), color_system=None)
        with plain.capture() as text:
            plain.print(table)
        logger.info("\n%s", text.get().rstrip())

    def _print(self, text: str | Text, force: bool = False) -> None:
        if self.quiet and not force:
            return
        shown = Text(text) if isinstance(text, str) else text
        if self._is_ascii:
            plain = shown.plain.translate(_ASCII).encode(self.output.encoding, "backslashreplace")
            shown = Text(plain.decode(self.output.encoding), style=shown.style)
        self.output.print(shown, soft_wrap=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the table row of a step, and a line per validation metric."""
        if any(column.read(metrics) is not None for column in self.table.columns):
            self._row(metrics, step)
        for name, value in metrics.items():
            if name.endswith(SKIPPED_STEPS_SUFFIX) and value > 0:
                self._skipped_steps += int(value)
                self.warn(
                    f"step {step}: {name.removesuffix(SKIPPED_STEPS_SUFFIX)} skipped "
                    f"{count_noun(int(value), 'optimizer step')} because of a non-finite loss or gradient; "
                    f"{self._skipped_steps} skipped since the start of this process"
                )
        for name, value in metrics.items():
            if name.startswith(VALIDATION_PREFIX):
                text = f"step {step}  {name.removeprefix(VALIDATION_PREFIX)} "
                line = Text.assemble(("◆ validation ", "bold blue"), text, (f"{value:.3f}", "bold"))
                if name in self._last_validation:
                    change = value - self._last_validation[name]
                    line.append(f"  {change:+.3f}", style="green" if change > 0 else "red" if change < 0 else "dim")
                self.message(line)
                self._last_validation[name] = value

    def _row(self, metrics: Mapping[str, float], step: int) -> None:
        self.bars.finish_step(step)
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        plain = self.table.plain_row(step, metrics)
        if not self._has_bars:
            self.message(plain)
            return
        logger.info("%s", plain)
        self.table.width = self.output.width
        if self.table.fit(metrics) or self._rows_since_header % ROWS_PER_HEADER == 0:
            self._rows_since_header = 0
            if not self._legend_shown and self.table.legend():
                self._legend_shown = True
                self._print(self.table.legend())
            self._print(self.table.header())
        self._rows_since_header += 1
        self._print(self.table.row(step, metrics))

    def samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Print some samples, two lines each, cut at the width of the terminal."""
        for sample in samples:
            for label, key in (("question", "input"), ("answer", "output")):
                words = " ".join(str(sample.get(key, "")).split())
                # Control characters, such as terminal escape sequences, become replacement characters.
                shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
                score = f"  score {sample['score']}" if key == "output" and "score" in sample else ""
                line = Text.assemble((f"  {label:>8} ", "dim"), shown)
                line.truncate(max(20, self.output.width - len(score)), overflow="ellipsis")
                self.message(line.append(score, style="bold"))

    def summary(self, summary: Mapping[str, Any], title: str = "megarl") -> None:
        """Print the closing summary.

        Args:
            summary: ``val_accuracy_before, val_accuracy_after, steps, train_seconds, wall_seconds,
                rollout_tokens_per_s, update_tokens_per_s, hf_dir, report``; missing and None entries are skipped.
        """
        self.close()
        if self._skipped_steps:
            summary = {**summary, "skipped_steps": self._skipped_steps}
        head, *facts = plain_summary(summary, title)
        logger.info("%s", "\n".join([head, *facts]))
        if self._has_bars and not self._is_ascii:
            facts = plain_summary({**summary, "rewards": self._rewards}, title)[1:]
            style = "yellow" if summary.get("stopped") else "green"
            self.output.print(Panel(Text("\n".join(facts)), title=Text(head, "bold"), border_style=style))
        else:
            for line in (head, *facts):
                self._print(line, force=True)

    def close(self) -> None:
        """Remove the bars; later output is plain."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class _CapturedStream(WrappedStream):
    """Passes a stream's lines to the log and, above the bars, to the console; prints do not tear the bars.

    rich's ``Live(redirect_stdout=True)`` is no substitute: it does not log the lines, prints every state of a progress
    bar, and works only while the bars are shown.
    """

    def __init__(self, console: Console, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self._console = console
        self._logger = logging.getLogger(name)
        self._line = ""
        self._shown = 0  # characters of the line that are already on the screen
        self._is_logging = False

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def write(self, text: str) -> int:
        by_line = self._console.shows_bars
        if not by_line:
            self._stream.write(self._line[self._shown :] + text)
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            # A progress bar returns to the start of the line for each state: keep the last state.
            whole = line.rstrip("\r").rpartition("\r")[2]
            if by_line and whole.strip():
                self._console._print(whole)
            self._log(whole)
        self._line, self._shown = rest, 0 if by_line else len(rest)
        return len(text)

    def show_only(self, text: str) -> None:
        """Print lines that are already in the log."""
        if self._console.shows_bars:
            self._console._print(text)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def flush(self) -> None:
        if not self._console.shows_bars:
            self._stream.write(self._line[self._shown :])
            self._shown = len(self._line)
            self._stream.flush()

    def _log(self, line: str) -> None:
        if not line.strip() or self._is_logging:  # a failing log handler prints its error
            return
        self._is_logging = True
        try:
            self._logger.info("%s", _ESCAPES.sub("", line))
        finally:
            self._is_logging = False
