"""Profilers of a process: ``torch.profiler``, CUDA memory snapshots, and capture ranges of Nsight Systems."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.tracing.tracer import TRACER

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profiler; see the config section ``global_profiler``.

    Attributes:
        tool: ``torch``, ``torch_memory`` or ``nsys``.
        folder: output folder, on the node of the process.
        discrete: write a file per verb instead of per step.
        contents: for ``torch``, the recorded data: ``cpu``, ``cuda``, ``memory``, ``shapes``, ``stack``.
        max_entries: for ``torch_memory``, the number of recorded allocations.
        nsight: for ``nsys``, options of ``nsys profile``, by name without dashes.
    """

    tool: str
    folder: str
    discrete: bool = False
    contents: tuple[str, ...] = ("cpu", "cuda")
    max_entries: int = 100_000
    nsight: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleProfile:
    """Profiler options of a role, and its profiled ranks; empty = all ranks."""

    options: ProfileOptions
    ranks: tuple[int, ...] = ()

    def of(self, rank: int) -> ProfileOptions | None:
        """Return the options of a rank; None = no profiler."""
        return self.options if not self.ranks or rank in self.ranks else None


class TorchProfiler:
    """Records CPU and GPU operators with ``torch.profiler``; writes a compressed Chrome trace."""

    def __init__(self, options: ProfileOptions) -> None:
        self._contents = set(options.contents)
        self._profile: Any = None

    def start(self) -> None:
        """Start recording."""
        import torch
        from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

        activities = [ProfilerActivity.CPU] if "cpu" in self._contents else []
        if "cuda" in self._contents and torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities or [ProfilerActivity.CPU],
            record_shapes="shapes" in self._contents,
            profile_memory="memory" in self._contents,
            with_stack="stack" in self._contents,
            # A rollout replica computes in another thread than its verbs. Torch cannot record memory of all threads.
            experimental_config=_ExperimentalConfig(profile_all_threads="memory" not in self._contents),
        )
        self._profile.__enter__()

    def stop(self, path: Path) -> None:
        """Stop and write the trace."""
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        profile.export_chrome_trace(f"{path}.json.gz")


class MemoryProfiler:
    """Records CUDA memory allocations with their stacks; writes a snapshot for https://pytorch.org/memory_viz."""

    def __init__(self, options: ProfileOptions) -> None:
        self._entries = options.max_entries

    def start(self) -> None:
        """Start recording."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=self._entries)

    def stop(self, path: Path) -> None:
        """Stop and write the snapshot."""
        import torch

        try:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


class NsysRanges:
    """Starts and stops the capture of ``nsys``, and marks spans as NVTX ranges.

    The process must run under ``nsys``, which writes its files into the folder of Ray's logs.
    """

    def __init__(self, options: ProfileOptions) -> None:
        pass

    def start(self) -> None:
        """Start recording."""
        import torch

        torch.cuda.profiler.start()
        TRACER.watcher = _mark

    def stop(self, path: Path) -> None:
        """Stop the capture; ``nsys`` writes the file."""
        import torch

        TRACER.watcher = None
        torch.cuda.profiler.stop()


def _mark(name: str | None) -> None:
    """Begin an NVTX range; None ends the innermost range."""
    import torch

    if name is None:
        torch.cuda.nvtx.range_pop()
    else:
        torch.cuda.nvtx.range_push(name)


TOOLS: dict[str, Any] = {"torch": TorchProfiler, "torch_memory": MemoryProfiler, "nsys": NsysRanges}
"""Profilers by the values of ``global_profiler.tool``; ``stop(path)`` writes the result to a path without suffix."""


class ProfiledProcess:
    """A process's profiler over a run's steps.

    Args:
        name: name of the process; start of its file names.
    """

    def __init__(self, options: ProfileOptions | None, name: str) -> None:
        self._options, self._name = options, name
        self._profiler: TorchProfiler | MemoryProfiler | NsysRanges | None = None
        self._label = ""
        self._running = False

    def record(self, label: str) -> None:
        """Record under ``label`` (one or more steps) from now on; empty = stop recording."""
        if self._options is None:
            return
        if self._running:
            self._stop(self._label)
        self._label = label
        if label and not self._options.discrete:
            self._start()

    def begin_verb(self) -> None:
        """Start recording a verb, with a file per verb."""
        if self._label and self._options is not None and self._options.discrete:
            self._start()

    def end_verb(self, verb: str) -> None:
        """Stop recording a verb, with a file per verb."""
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
        path, number = folder / f"{self._name}-{label}", 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while any(folder.glob(f"{path.name}.*")):  # a verb may be called several times in a step
                number += 1
                path = folder / f"{self._name}-{label}-{number}"
            self._profiler.stop(path)
        except (OSError, RuntimeError) as error:  # such as a full disk: the run goes on
            logger.warning("the profile %s could not be written: %s", path, error)
            self._profiler = None
