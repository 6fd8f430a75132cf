"""What others print while a live view is on the screen: a line of it in the middle of the view would tear that apart.

It goes into the driver's log as well.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import TextIO

from megarl.logs import StreamOver

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StrayOutput:
    """Stands in for the standard streams: passes on what is written, or hands it over line by line, and logs it.

    Args:
        show: takes a line.

    Attributes:
        by_line: whether lines are handed over; else streams are as they were.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.by_line = False
        self._show = show
        self._before: tuple[TextIO, TextIO] | None = None

    def begin(self) -> None:
        """Take the streams' places."""
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Stream(self, sys.stdout, "stdout"), _Stream(self, sys.stderr, "stderr")

    def end(self) -> None:
        """Give them back."""
        if self._before is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = self._before
            self._before = None

    def show(self, line: str) -> None:
        """Hand a line over."""
        if line.strip():
            self._show(line)


class _Stream(StreamOver):
    def __init__(self, owner: StrayOutput, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self._owner = owner
        self._logger = logging.getLogger(name)
        self._line = ""
        self._shown = 0  # letters of the line that are on the screen already
        self._is_logging = False

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if not self._owner.by_line:
            self._stream.write(self._line[self._shown :] + text)
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            # A progress bar goes back to the line's begin for each of its states: the last one counts.
            whole = line.rstrip("\r").rpartition("\r")[2]
            if self._owner.by_line:
                self._owner.show(whole)
            self._log(whole)
        self._line, self._shown = rest, 0 if self._owner.by_line else len(rest)
        return len(text)

    def show_only(self, text: str) -> None:
        """Print lines that are in the log already."""
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
        if not line.strip() or self._is_logging:  # a handler that fails prints that
            return
        self._is_logging = True
        try:
            self._logger.info("%s", _ESCAPES.sub("", line))
        finally:
            self._is_logging = False
