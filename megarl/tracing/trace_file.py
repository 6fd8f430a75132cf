"""The timeline as a file that https://ui.perfetto.dev and ``chrome://tracing`` open.

It is an array of events in Chrome's trace format, one a line. The closing bracket comes when the run ends; both
viewers, and :func:`read_trace`, do without it, so that the file of a run that was killed can be read as far as it goes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from megarl.errors import ConfigError
from megarl.tracing.tracer import Event

FILE_NAME = "trace.json"


class TraceFile:
    """Writes a timeline, process by process.

    Args:
        path: file to make; its folder is made, too.
        origin_ns: moment of this machine's monotonic clock from which times are counted.
    """

    def __init__(self, path: Path, origin_ns: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._origin_ns = origin_ns
        self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115 -- open until the run ends
        self._file.write("[\n")
        self._lanes: dict[tuple[int, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def name_process(self, process: int, name: str, labels: str = "") -> None:
        """A process's row: its number in the file, which also orders the rows, and what is written there."""
        self._line({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        self._line({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        if labels:
            self._line({"ph": "M", "name": "process_labels", "pid": process, "args": {"labels": labels}})

    def write(self, process: int, events: Iterable[Event], offset_ns: int = 0) -> None:
        """Add a process's events.

        Args:
            process: its number in the file.
            events: in any order.
            offset_ns: how far its clock is ahead of this machine's.
        """
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
        """Hand everything to the system, so that it outlives this process."""
        self._file.flush()

    def close(self) -> None:
        """Complete the file; safe to call twice."""
        if not self._file.closed:
            self._file.write(json.dumps({"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 0}}))
            self._file.write("\n]\n")
            self._file.close()

    def _lane(self, process: int, lane: str) -> int:
        """Number of a lane; a new one is named in the file."""
        key = (process, lane)
        if key not in self._lanes:
            number = self._lanes[key] = sum(of == process for of, _ in self._lanes)
            name = {"name": lane or "main"}
            self._line({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": name})
        return self._lanes[key]

    def _line(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=str) + ",\n")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file, also of one whose run was killed while it wrote.

    Args:
        path: of the file, which may be compressed (``.gz``), or of a folder: a run's, or its ``timeline``.

    Raises:
        ConfigError: there is no such file, or it is not a timeline.
    """
    file = _find(path)
    opened = gzip.open if file.suffix == ".gz" else open
    events = []
    with opened(file, "rt", encoding="utf-8") as lines:
        if next(lines, "").strip() != "[":
            raise ConfigError(f"{file} is not a timeline: it does not begin with a line '['")
        for line in lines:
            try:
                event = json.loads(line.strip().removesuffix(","))
            except ValueError:
                continue  # the closing bracket, or a line that was cut short
            events.append(event)
    return events


def _find(path: Path) -> Path:
    folders = (path, path / "timeline")
    candidates = [path, *(folder / f"{FILE_NAME}{end}" for folder in folders for end in ("", ".gz"))]
    found = next((one for one in candidates if one.is_file()), None)
    if found is None:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; name a run's folder, or a trace file")
        raise ConfigError(f"{path} has no timeline: trainer.timeline.enable=true writes it to timeline/{FILE_NAME}")
    return found
