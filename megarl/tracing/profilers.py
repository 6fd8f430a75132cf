"""Profilers of one process: torch's, snapshots of CUDA's memory, and ranges that nsys captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from megarl.tracing.options import ProfileOptions
from megarl.tracing.tracer import TRACER


class Profiler(Protocol):
    """Records from ``start`` to ``stop``."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self, path: Path) -> None:
        """End, and write what was recorded; ``path`` lacks its ending."""


class TorchProfiler:
    """Operators on CPU and GPU with ``torch.profiler``; writes a Chrome trace, packed."""

    def __init__(self, options: ProfileOptions) -> None:
        self._contents = set(options.contents)
        self._profile: Any = None

    def start(self) -> None:
        """As the protocol says."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] if "cpu" in self._contents else []
        if "cuda" in self._contents and torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities or [ProfilerActivity.CPU],
            record_shapes="shapes" in self._contents,
            profile_memory="memory" in self._contents,
            with_stack="stack" in self._contents,
        )
        self._profile.__enter__()

    def stop(self, path: Path) -> None:
        """As the protocol says."""
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(f"{path}.json.gz")
        self._profile = None


class MemoryProfiler:
    """Allocations of CUDA's memory, with their stacks; writes a snapshot for https://pytorch.org/memory_viz."""

    def __init__(self, options: ProfileOptions) -> None:
        self._entries = options.max_entries

    def start(self) -> None:
        """As the protocol says."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=self._entries)

    def stop(self, path: Path) -> None:
        """As the protocol says."""
        import torch

        torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


class NsysRanges:
    """Tells ``nsys``, under which the process was started, when to capture, and marks spans by NVTX ranges.

    The files are nsys's own, in the folder of Ray's logs.
    """

    def __init__(self, options: ProfileOptions) -> None:
        pass

    def start(self) -> None:
        """As the protocol says."""
        import torch

        torch.cuda.profiler.start()
        TRACER.watcher = _mark

    def stop(self, path: Path) -> None:
        """As the protocol says; nothing is written here."""
        import torch

        TRACER.watcher = None
        torch.cuda.profiler.stop()


def _mark(name: str | None) -> None:
    """Begins an NVTX range, or with None ends the innermost."""
    import torch

    if name is None:
        torch.cuda.nvtx.range_pop()
    else:
        torch.cuda.nvtx.range_push(name)


TOOLS: dict[str, Any] = {"torch": TorchProfiler, "torch_memory": MemoryProfiler, "nsys": NsysRanges}
"""By the names of ``global_profiler.tool``."""


class ProfiledProcess:
    """A process's profiler, from step to step.

    Args:
        options: which, and where files go; None = none.
        name: of the process, with which its files begin.
    """

    def __init__(self, options: ProfileOptions | None, name: str) -> None:
        self._options, self._name = options, name
        self._profiler: Profiler | None = None
        self._label = ""
        self._running = False

    def record(self, label: str) -> None:
        """From here on what is recorded is ``label``, a step or some; empty: nothing is."""
        if self._options is None:
            return
        if self._running:
            self._stop(self._label)
        self._label = label
        if label and not self._options.discrete:
            self._start()

    def begin_verb(self) -> None:
        """A verb begins."""
        if self._label and self._options is not None and self._options.discrete:
            self._start()

    def end_verb(self, verb: str) -> None:
        """A verb has ended."""
        if self._running and self._options is not None and self._options.discrete:
            self._stop(f"{self._label}-{verb}")

    def _start(self) -> None:
        assert self._options is not None
        self._profiler = self._profiler or TOOLS[self._options.tool](self._options)
        self._profiler.start()
        self._running = True

    def _stop(self, label: str) -> None:
        assert self._options is not None and self._profiler is not None
        self._running = False
        folder = Path(self._options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / f"{self._name}-{label}", 1
        while any(folder.glob(f"{path.name}.*")):  # a verb that is called several times in a step
            number += 1
            path = folder / f"{self._name}-{label}-{number}"
        self._profiler.stop(path)
