"""What a user sees while a job runs: the phase that is under way, one table row per step, a closing summary.

On a terminal a live view at the bottom shows the run's progress, the phase and the last step's figures, and rows scroll
above it. Where output is not a terminal (a log file, CI) there is no live view and no table: every step is one
self-contained line. What is printed is logged as well, without colours.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megarl.logs import TOLD
from megarl.tracking.live_status import LiveStatus, PhaseProgress
from megarl.tracking.run_summary import plain_summary, summary_panel
from megarl.tracking.step_table import RL_COLUMNS, Column, StepTable
from megarl.tracking.stray_output import StrayOutput

logger = logging.getLogger(__name__)

ROWS_PER_HEADER = 25
VALIDATION_PREFIX = "val-core/"


class Console:
    """The console of one job; use it as a context manager, so that the terminal is given back whatever happens.

    Args:
        total_steps: steps of the run, for the progress bar; None where they are not known.
        columns: the table's columns.
        output: where to print; the standard output by default.
        quiet: print warnings and the closing summary only.
        title: name of the run.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        columns: Sequence[Column] = RL_COLUMNS,
        output: RichConsole | None = None,
        quiet: bool = False,
        title: str = "",
    ) -> None:
        self.output = output or RichConsole(highlight=False, file=sys.stdout)
        self.quiet = quiet
        self._is_ascii = not self.output.encoding.lower().startswith("utf")
        self._is_live = self.output.is_terminal and not self.output.is_dumb_terminal and not quiet
        self._streams = None if output else StrayOutput(self._stray)
        self.table = StepTable(columns, self.output.width, total_steps, self._is_ascii)
        self.status = LiveStatus(total_steps, columns=columns, title=title)
        self._rewards: list[float] = []
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
        """Tell the number of steps once it is known."""
        self.table.total_steps = self.status.total_steps = total_steps

    @contextmanager
    def phase(self, name: str, announce: bool = False) -> Iterator[PhaseProgress]:
        """Show that a phase is under way. Phases may nest; the innermost is shown.

        The bar follows what is reported to the yielded object; without reports, the time that the phase took last.

        Args:
            name: the phase.
            announce: whether to print a line with its seconds when it ends, for what happens once.
        """
        self._start_live()
        start = time.perf_counter()
        progress = self.status.enter(name)
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
        """Print a line above the live view; ``text`` is shown as it is, without markup."""
        self._print(text)
        logger.info("%s", text.plain if isinstance(text, Text) else text)

    def warn(self, text: str) -> None:
        """Print something that the user must see, also where the others are left out."""
        self._print(Text(text, style="yellow"), must=True)
        logger.warning("%s", text, extra=TOLD)

    def show(self, table: Table) -> None:
        """Print a table, such as an evaluation ends with, which is seen also where others are left out."""
        self.output.print(table)
        plain = RichConsole(width=120, file=io.StringIO(), color_system=None)
        with plain.capture() as text:
            plain.print(table)
        logger.info("\n%s", text.get().rstrip())

    def _print(self, text: str | Text, must: bool = False) -> None:
        if self.quiet and not must:
            return
        shown = Text(text) if isinstance(text, str) else text
        if self._is_ascii:
            plain = shown.plain.replace("…", "...").encode(self.output.encoding, "backslashreplace")
            shown = Text(plain.decode(self.output.encoding), style=shown.style)
        self.output.print(shown, soft_wrap=True)

    def _stray(self, text: str) -> None:
        """A line that somebody else has printed while there is a live view."""
        self._print(text)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print a step: its table row, and a line of its own for the validation in it."""
        validation = {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIX)}
        if any(column.read(metrics) is not None for column in self.table.columns):
            self._row(metrics, step)
        if validation:
            self._validation(validation, step)

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
        """Print some answers, two lines each, shortened to the width of the terminal."""
        for sample in samples:
            for label, key in (("question", "input"), ("answer", "output")):
                shown = " ".join(str(sample.get(key, "")).split())
                score = f"  score {sample['score']}" if key == "output" and "score" in sample else ""
                line = Text.assemble((f"  {label:>8} ", "dim"), shown)
                line.truncate(max(20, self.output.width - len(score)), overflow="ellipsis")
                self.message(line.append(score, style="bold"))

    def summary(self, summary: Mapping[str, Any], title: str = "megarl") -> None:
        """Print the closing summary.

        Args:
            summary: ``val_accuracy_before, val_accuracy_after, steps, train_seconds, wall_seconds,
                rollout_tokens_per_s, update_tokens_per_s, hf_dir, report``; what is missing or None is left out.
            title: name of the run.
        """
        self.close()
        plain = plain_summary(summary, title)
        logger.info("%s", "\n".join(plain))
        if self._is_live:
            self.output.print(summary_panel(summary, title, self._rewards, self._is_ascii))
        else:
            for line in plain:
                self._print(line, must=True)

    def close(self) -> None:
        """Take the live line away; what is printed later is printed plainly."""
        if self._live is not None:
            if self._streams is not None:
                self._streams.by_line = False
            self._live.stop()
            self._live = None
