"""The timeline file, for https://ui.perfetto.dev and ``chrome://tracing``, and the clock offsets of its machines.

The file is an array of events in Chrome's trace format, one per line. The closing bracket is written at the end of the
run. The viewers and :func:`read_trace` accept a file without it, such as that of a killed run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.run_writer import RUN_WRITER
from megarl.tracing.tracer import Event

TRACE_FILE = "trace.json"
MAIN_LANE = "main"
"""Lane of a process's followed thread."""


class TraceFile:
    """Writes a timeline file.

    Args:
        origin_ns: time on this machine's monotonic clock that becomes time 0 of the file.
    """

    def __init__(self, path: Path, origin_ns: int) -> None:
        self.path = path
        self._origin_ns = origin_ns
        self._lines: list[str] = []
        self._is_open = True
        RUN_WRITER.replace(path, "[\n")
        self._lanes: dict[tuple[int, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name_process(self, process: int, name: str, labels: str = "") -> None:
        """Write name and labels of a process; its number in the file also orders the rows."""
        self._line({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        self._line({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        if labels:
            self._line({"ph": "M", "name": "process_labels", "pid": process, "args": {"labels": labels}})

    def write(self, process: int, events: Iterable[Event], offset_ns: int = 0) -> None:
        """Write the events of a process."""
        for event in events:
            start = (event.start_ns - offset_ns - self._origin_ns) / 1000
            line: dict[str, Any] = {"ph": event.kind, "name": event.name, "ts": start, "pid": process}
            line["tid"] = self._lane(process, event.lane)
            if event.category:
                line["cat"] = event.category
            if event.kind == "X":
                line["dur"] = event.duration_ns / 1000
            elif event.kind == "i":
                line["s"] = "p"
            if event.args:
                line["args"] = event.args
            self._line(line)

    def flush(self) -> None:
        """Flush the file, so that its content survives a kill."""
        if self._lines:
            RUN_WRITER.append(self.path, "".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Complete the file; safe to call twice."""
        if self._is_open:
            self._is_open = False
            last = {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 0}}
            self._lines.append(json.dumps(last) + "\n]\n")
            self.flush()

    def _lane(self, process: int, lane: str) -> int:
        """Return the number of a lane; name a new lane in the file."""
        key = (process, lane)
        if key not in self._lanes:
            number = self._lanes[key] = sum(of == process for of, _ in self._lanes)
            name = {"name": lane or MAIN_LANE}
            self._line({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": name})
        return self._lanes[key]

    def _line(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":"), default=str) + ",\n")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a timeline file, also of a killed run.

    Args:
        path: the file, which may be compressed (``.gz``); or a folder: a run's folder, or its ``timeline``.

    Raises:
        ConfigError: the file is missing, or is no timeline.
    """
    file = _find(path)
    opened = gzip.open if file.suffix == ".gz" else open
    events = []
    with opened(file, "rt", encoding="utf-8") as lines:
        if next(lines, "").strip() != "[":
            raise ConfigError(
                f"{file} is not a timeline: it does not begin with a line '['", code="timeline.not-a-timeline"
            )
        for line in lines:
            try:
                event = parse_json(line.strip().removesuffix(","))
            except ValueError:
                continue  # the closing bracket, or a truncated line
            events.append(event)
    return events


def _find(path: Path) -> Path:
    folders = (path, path / "timeline")
    candidates = [path, *(folder / f"{TRACE_FILE}{end}" for folder in folders for end in ("", ".gz"))]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist; name a run's folder, or a trace file", code="timeline.no-such-path"
            )
        raise ConfigError(
            f"{path} has no timeline: trainer.timeline.enable=true writes it to timeline/{TRACE_FILE}",
            code="timeline.not-recorded",
        )
    return file


class ClockReading(NamedTuple):
    """A remote clock reading, in nanoseconds: local times of request and reply, and the remote time between them."""

    requested: int
    remote: int
    replied: int


class OffsetEstimate(NamedTuple):
    """Offset of a remote clock from the local clock and its largest error, in nanoseconds."""

    ahead_ns: int = 0
    error_ns: int = 0


def estimate_offset(readings: Iterable[ClockReading]) -> OffsetEstimate:
    """Estimate the offset of a remote clock from the fastest of several readings, as NTP (RFC 5905, section 8).

    The remote clock was read at some time between request and reply; the midpoint errs by at most half that interval.
    """
    best = min(readings, key=lambda reading: reading.replied - reading.requested)
    half = (best.replied - best.requested) // 2
    return OffsetEstimate(best.remote - (best.requested + half), half)
