"""What a run leaves behind: metrics, samples, the summary and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from megarl.config.parts import RunConfig
from megarl.logs import LOGS_FOLDER
from megarl.tracing import PHASE, span
from megarl.tracking import Console, PhaseTimer, RunInfo, Trackers, open_trackers
from megarl.tracking.balance_file import BALANCE_FILE, BalanceFile, RankLists
from megarl.tracking.metrics_file import FILE_NAME
from megarl.tracking.report import REPORT_FILE, SampleFiles, begin_samples, report_run
from megarl.trainer.metrics import Metrics
from megarl.trainer.samples import Sample
from megarl.trainer.tracing import RunTracing

ACCURACY_PREFIX = "val-core/"
ID_FILE, ID_LETTERS = "run_id", 20
RUN_FILES = (FILE_NAME, BALANCE_FILE, ID_FILE)
UPDATE_PHASES = ("update_actor", "update_critic", "update")  # the last is supervised fine-tuning's


@dataclass(frozen=True)
class RunSummary:
    """A run in a few numbers, as ``summary.json`` has them; None where there is nothing to tell.

    Attributes:
        val_accuracy_before: mean validation reward over the data sources before the first step.
        val_accuracy_after: the same at the last validation.
        steps: training steps done by this run.
        train_seconds: wall seconds in training steps.
        wall_seconds: wall seconds from the start of the run, start-up and validation included.
        rollout_tokens_per_s: generated tokens per second of generation, over all replicas.
        update_tokens_per_s: tokens (prompts and responses) per second of updates, actor and critic together.
        hf_dir: folder of the trained policy in Hugging Face format.
        report: path of the HTML report.
    """

    val_accuracy_before: float | None
    val_accuracy_after: float | None
    steps: int
    train_seconds: float
    wall_seconds: float
    rollout_tokens_per_s: float | None
    update_tokens_per_s: float | None
    hf_dir: str | None
    report: str


class RunReporter:
    """Times phases, tells trackers and console, and closes the run with a summary and a report.

    Args:
        config: the run's section of the configuration.
        resolved: the whole configuration as nested dicts.
        folder: folder of the run's files.
        console: of the run.
        resumed_from: checkpoint folder whose metrics are continued, with its step; None for a new run.
        tracing: is told of the steps; None = nobody is.
    """

    def __init__(
        self,
        config: RunConfig,
        resolved: Mapping[str, Any],
        folder: Path,
        console: Console,
        resumed_from: tuple[Path, int] | None = None,
        tracing: RunTracing | None = None,
    ) -> None:
        self.tracing = tracing
        self.config = config
        self.resolved = resolved
        self.folder = folder
        self.console = console
        self.timer = PhaseTimer()
        self.started = time.perf_counter()
        self.metrics_file = folder / FILE_NAME
        self._accuracies: list[float] = []
        self._totals: dict[str, float] = {
            "steps": 0,
            "train": 0.0,
            "gen": 0.0,
            "generated": 0.0,
            "update": 0.0,
            "updated": 0.0,
        }
        resumed_step = None if resumed_from is None else resumed_from[1]
        (folder / "summary.json").unlink(missing_ok=True)  # of an older run: a run has its own when it is over
        begin_samples(folder / "samples", resumed_step)
        self.samples = {kind: SampleFiles(folder / "samples" / kind) for kind in ("train", "validation")}
        if resumed_from is not None:
            self._take_over(resumed_from[0])
        self._balance = BalanceFile(folder / BALANCE_FILE, resumed_step)
        self.trackers = self._open_trackers(resumed_step)

    def _take_over(self, checkpoint: Path) -> None:
        """The files that continue those of the run before."""
        for name in RUN_FILES:
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, self.folder / name)

    def _open_trackers(self, resumed_step: int | None) -> Trackers:
        id_file = self.folder / ID_FILE
        if resumed_step is None or not id_file.exists():
            id_file.write_text(uuid4().hex[:ID_LETTERS])
        run = RunInfo(
            self.config.project_name,
            self.config.experiment_name,
            self.folder,
            self.resolved,
            resumed_step,
            self.console,
            run_id=id_file.read_text(),
            timeout_s=self.config.tracker_timeout_s,
            logs=self.folder / LOGS_FOLDER,
        )
        # The report is drawn from the metrics file, so it is written whatever the user's trackers are.
        names = [*self.config.logger, *(["jsonl"] if "jsonl" not in self.config.logger else [])]
        return open_trackers(names, run)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and show that it is under way."""
        with self.timer.phase(name), self.console.phase(name), span(name, PHASE):
            yield

    def begin_step(self, step: int) -> None:
        """A step begins, for whoever watches the processes; 0 is what comes before the first."""
        if self.tracing is not None:
            self.tracing.begin_step(step)

    @property
    def lasting_files(self) -> list[Path]:
        """What a checkpoint keeps of the run's folder, for the run that continues from it."""
        return [path for path in (self.folder / name for name in RUN_FILES) if path.exists()]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase of the step under way."""
        return self.timer.seconds

    def log_step(self, step: int, metrics: Metrics, tokens: Mapping[str, int]) -> None:
        """Record a step's metrics with its timings.

        Args:
            step: the step.
            metrics: without timings.
            tokens: tokens that each phase worked on.
        """
        seconds = self.seconds
        self._totals["steps"] += 1
        self._totals["train"] += seconds.get("step", 0.0)
        self._totals["gen"] += seconds.get("gen", 0.0)
        self._totals["generated"] += tokens.get("gen", 0)
        updates = [phase for phase in UPDATE_PHASES if phase in seconds]
        self._totals["update"] += sum(seconds[phase] for phase in updates)
        # Actor and critic learn from the same tokens, which count once; while the critic warms up it is alone.
        self._totals["updated"] += max((tokens.get(phase, 0) for phase in updates), default=0)
        self._note_accuracy(metrics)
        self.trackers.log({**metrics, **self.timer.metrics(tokens)}, step)
        self.timer.reset()

    def log_validation(self, step: int, metrics: Metrics) -> None:
        """Record a validation outside a training step."""
        self._note_accuracy(metrics)
        self.trackers.log({**metrics, **self.timer.metrics()}, step)
        self.timer.reset()

    def log_samples(self, step: int, shown: Sequence[Sample]) -> None:
        """Show answers in the trackers."""
        if shown:
            self.trackers.log_samples(shown, step)

    def keep_samples(self, step: int, samples: Sequence[Sample], kind: str) -> None:
        """Keep some answers for the report; ``kind`` is ``train`` or ``validation``."""
        self.samples[kind].add(step, samples)

    def keep_balance(self, step: int, lists: RankLists) -> None:
        """Keep what each data-parallel rank had to do, for the report."""
        self._balance.add(step, lists)

    def finish(self, hf_dir: str | None) -> RunSummary:
        """Write report and summary, close the trackers, and tell the user."""
        summary = self._summary(hf_dir)
        self.close(dataclasses.asdict(summary))
        return summary

    def close(self, summary: Mapping[str, Any]) -> None:
        """As :meth:`finish`, with the summary that is given.

        Args:
            summary: what there is to tell, by the names of :class:`RunSummary`.
        """
        self.trackers.finish()
        values = {**summary, "report": str(self.report)}
        for folder in (self.folder, self.folder.parent):
            _replace(folder / "summary.json", json.dumps(values, indent=2) + "\n")
        try:
            report_run(self.folder, self.report)
        except (OSError, ValueError) as error:  # the run is over and saved: a full disk must not fail it now
            self.console.message(f"the report could not be written: {error}; megarl report {self.folder} tries again")
        self.console.summary(values, self.config.experiment_name)

    @property
    def report(self) -> Path:
        """Where the report will be."""
        return self.folder / REPORT_FILE

    @property
    def accuracy(self) -> float | None:
        """Mean over the data sources at the last validation; None where there was none."""
        return self._accuracies[-1] if self._accuracies else None

    @property
    def wall_seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self.started

    def _note_accuracy(self, metrics: Metrics) -> None:
        found = [value for name, value in metrics.items() if name.startswith(ACCURACY_PREFIX) and "/mean@" in name]
        if found:
            self._accuracies.append(sum(found) / len(found))

    def _summary(self, hf_dir: str | None) -> RunSummary:
        totals = self._totals
        return RunSummary(
            val_accuracy_before=self._accuracies[0] if self._accuracies else None,
            val_accuracy_after=self.accuracy,
            steps=int(totals["steps"]),
            train_seconds=totals["train"],
            wall_seconds=self.wall_seconds,
            rollout_tokens_per_s=totals["generated"] / totals["gen"] if totals["gen"] else None,
            update_tokens_per_s=totals["updated"] / totals["update"] if totals["update"] else None,
            hf_dir=hf_dir,
            report=str(self.report),
        )


def _replace(path: Path, text: str) -> None:
    """Write a file that others may be reading."""
    unfinished = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)
