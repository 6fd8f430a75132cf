"""The console of a job: the current phase, a table row per step, and a closing summary.

On a terminal, a live view at the bottom shows progress, phase and the last step's figures; rows scroll above it.
Without a terminal (a log file, CI) there is no live view and no table: each step is one self-contained line. The log
gets every printed line, without colors.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megarl.base.formatting import count_noun
from megarl.base.logs import ALREADY_SHOWN, WrappedStream
from megarl.tracking.console_tables import RL_COLUMNS, MetricColumn, StepTable
from megarl.tracking.live_status import LiveStatus, PhaseProgress
from megarl.tracking.run_summary import SKIPPED_STEPS_SUFFIX, VALIDATION_PREFIX, plain_summary, summary_panel

logger = logging.getLogger(__name__)

ROWS_PER_HEADER = 25
PROGRESS_S = 2.0
"""Seconds between lines about the progress of a phase, where there is no live view."""
_LONG_PHASES = ("gen", "testing", "update")
"""Phases that may take minutes before the first row."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Console:
    """The console of one job; use it as a context manager, which restores the terminal in any case.

    Args:
        total_steps: steps of the run, for the progress bar; None = unknown.
        output: the rich console to print on; standard output by default.
        quiet: print warnings and the closing summary only.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        columns: Sequence[MetricColumn] = RL_COLUMNS,
        output: RichConsole | None = None,
        quiet: bool = False,
        title: str = "",
    ) -> None:
        self.output = output or RichConsole(highlight=False, file=sys.stdout)
        self.quiet = quiet
        self._is_ascii = not self.output.encoding.lower().startswith("utf")
        self._is_live = self.output.is_terminal and not self.output.is_dumb_terminal and not quiet
        self._streams = None if output else CapturedStreams(self._print)
        self.table = StepTable(columns, self.output.width, total_steps, self._is_ascii)
        self.status = LiveStatus(total_steps, columns=columns, title=title)
        self._rewards: list[float] = []
        self._named: set[str] = set()
        self._skipped_steps = 0
        self._last_validation: dict[str, float] = {}
        self._rows_since_header = 0
        self._legend_shown = False
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self._streams is not None:
            self._streams.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._streams is not None:
            self._streams.end()

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of steps when it becomes known."""
        self.table.total_steps = self.status.total_steps = total_steps

    @contextmanager
    def phase(self, name: str, announce: bool = False) -> Iterator[PhaseProgress]:
        """Show a phase in the live view. Phases may nest; the innermost is shown.

        The progress bar follows the reports to the yielded object. Without reports it follows the phase's last
        duration.

        Args:
            announce: print a line with the seconds at the end, for phases that happen once. Without a live view, also
                lines at the start and about progress; long phases of a step have a line at their first start.
        """
        self._start_live()
        start = time.perf_counter()
        progress = self.status.enter(name)
        if not self._is_live and (announce or (name in _LONG_PHASES and name not in self._named)):
            self._named.add(name)
            self.message(f"{name} ...")
        if announce and not self._is_live:
            progress.on_update = _ProgressLines(self.message)
        finished = False
        try:
            yield progress
            finished = True
        finally:
            self.status.leave()
            if announce:
                marks = ("done:", "failed:") if self._is_ascii else ("✓", "✗")
                mark, style = (marks[0], "green") if finished else (marks[1], "red")
                self.message(Text.assemble((mark, style), f" {name} ", (f"{time.perf_counter() - start:.1f} s", "dim")))

    def _start_live(self) -> None:
        if self._live is None and self._is_live:
            self._live = Live(
                self.status,
                console=self.output,
                refresh_per_second=4,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            if self._streams is not None:
                self._streams.by_line = True

    def message(self, text: str | Text) -> None:
        """Print a line above the live view; rich markup in ``text`` is not interpreted."""
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
            plain = shown.plain.replace("…", "...").encode(self.output.encoding, "backslashreplace")
            shown = Text(plain.decode(self.output.encoding), style=shown.style)
        self.output.print(shown, soft_wrap=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the table row of a step, and a line per validation metric."""
        validation = {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIX)}
        if any(column.read(metrics) is not None for column in self.table.columns):
            self._row(metrics, step)
        self._warn_of_skipped_steps(metrics, step)
        if validation:
            self._validation(validation, step)

    def _warn_of_skipped_steps(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if not name.endswith(SKIPPED_STEPS_SUFFIX) or not value > 0:
                continue
            self._skipped_steps += int(value)
            role = name.removesuffix(SKIPPED_STEPS_SUFFIX)
            steps = count_noun(int(value), "optimizer step")
            self.warn(
                f"step {step}: {role} skipped {steps} because of a non-finite loss or gradient; {self._skipped_steps}"
                f" skipped since the start of this process"
            )

    def _row(self, metrics: Mapping[str, float], step: int) -> None:
        self.status.steps_done = step
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        self.status.note(metrics)
        plain = self.table.plain_row(step, metrics)
        if not self._is_live:
            self.message(plain)
            return
        logger.info("%s", plain)
        self.table.width = self.output.width
        if self.table.fit(metrics) or self._rows_since_header % ROWS_PER_HEADER == 0:
            self._rows_since_header = 0
            if not self._legend_shown and self.table.legend():
                self._legend_shown = True
                self.output.print(self.table.legend())
            self._print(self.table.header())
        self._rows_since_header += 1
        self._print(self.table.row(step, metrics))

    def _validation(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            mark = "* validation " if self._is_ascii else "◆ validation "
            text = f"step {step}  {name.removeprefix(VALIDATION_PREFIX)} "
            line = Text.assemble((mark, "bold blue"), text, (f"{value:.3f}", "bold"))
            if name in self._last_validation:
                change = value - self._last_validation[name]
                line.append(f"  {change:+.3f}", style="green" if change > 0 else "red" if change < 0 else "dim")
            self.message(line)
        self._last_validation.update(values)

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
        plain = plain_summary(summary, title)
        logger.info("%s", "\n".join(plain))
        if self._is_live:
            self.output.print(summary_panel(summary, title, self._rewards, self._is_ascii))
        else:
            for line in plain:
                self._print(line, force=True)

    def close(self) -> None:
        """Remove the live view; later output is plain."""
        if self._live is not None:
            if self._streams is not None:
                self._streams.by_line = False
            self._live.stop()
            self._live = None


class _ProgressLines:
    """Prints the progress of a phase: its first and last report, and others every few seconds."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._next = 0.0

    def __call__(self, progress: PhaseProgress, completed: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or completed >= total:
            self._next = now + PROGRESS_S
            self._show(f"{progress.name} {completed}/{total}")


class CapturedStreams:
    """Replaces standard output and error, so that prints of other code do not tear the live view; logs each line.

    rich's ``Live(redirect_stdout=True)`` is no substitute: it does not log the lines, prints every state of a progress
    bar, and works only while the live view is shown.

    Args:
        show: prints a line above the live view.

    Attributes:
        by_line: pass whole lines to ``show``; otherwise write to the original streams.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.by_line = False
        self._show = show
        self._before: tuple[TextIO, TextIO] | None = None

    def begin(self) -> None:
        """Replace the streams."""
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (
            _CapturedStream(self, sys.stdout, "stdout"),
            _CapturedStream(self, sys.stderr, "stderr"),
        )

    def end(self) -> None:
        """Restore the streams."""
        if self._before is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = self._before
            self._before = None

    def show(self, line: str) -> None:
        """Print a line, unless it is blank."""
        if line.strip():
            self._show(line)


class _CapturedStream(WrappedStream):
    def __init__(self, owner: CapturedStreams, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self._owner = owner
        self._logger = logging.getLogger(name)
        self._line = ""
        self._shown = 0  # characters of the line that are already on the screen
        self._is_logging = False

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if not self._owner.by_line:
            self._stream.write(self._line[self._shown :] + text)
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            # A progress bar returns to the start of the line for each state: keep the last state.
            whole = line.rstrip("\r").rpartition("\r")[2]
            if self._owner.by_line:
                self._owner.show(whole)
            self._log(whole)
        self._line, self._shown = rest, 0 if self._owner.by_line else len(rest)
        return len(text)

    def show_only(self, text: str) -> None:
        """Print lines that are already in the log."""
        if self._owner.by_line:
            self._owner.show(text)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def flush(self) -> None:
        if not self._owner.by_line:
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
