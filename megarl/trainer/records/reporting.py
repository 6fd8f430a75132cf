"""Run reporter: phase timings, trackers, sample files, balance file and the summary of a run."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.base.json_text import format_json
from megarl.base.logs import LOGS_FOLDER
from megarl.base.reductions import Metrics
from megarl.base.run_writer import RUN_WRITER
from megarl.config.schema.run import RunConfig, TrainingRunConfig
from megarl.tracing import PHASE, lane_span, span
from megarl.tracking import Console, PhaseTimer, RunInfo, Trackers, open_trackers, read_metrics
from megarl.tracking.jsonl_files import BALANCE_FILE, METRICS_FILE, REPORT_FILE, BalanceFile, RankLists
from megarl.tracking.sample_files import SampleFiles, begin_samples
from megarl.trainer.records.sample_records import Sample, stored_samples
from megarl.trainer.records.slow_hosts import SlowHostWarnings
from megarl.trainer.records.step_metrics import empty_step_warnings, memory_warnings, mismatch_warnings
from megarl.trainer.state.checkpoint_manifest import ID_FILE, identify_run
from megarl.trainer.state.run_state import RunState

ACCURACY_PREFIX = "val-core/"
RUN_FILES = (METRICS_FILE, BALANCE_FILE)
UPDATE_PHASES = ("update_actor", "update_critic", "update")  # update: supervised jobs


@dataclass(frozen=True)
class RunSummary:
    """Key numbers of a run, as in ``summary.json``; None if a number does not apply.

    Attributes:
        val_accuracy_before: mean reward over the data sources at the validation before the first step; of a resumed
            run, before the first step of the run that it continues.
        val_accuracy_after: mean reward over the data sources at the last validation after a step.
        train_seconds: wall seconds in training steps.
        wall_seconds: wall seconds since the command was entered, including imports, start-up and validation.
        rollout_tokens_per_s: generated tokens per second of rollout, over all replicas.
        update_tokens_per_s: tokens (prompts and responses) per second of updates, actor and critic together.
        hf_dir: folder of the exported policy in Hugging Face format.
        stopped: reason of an end before the last step, such as ``Ctrl-C``.
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
    stopped: str | None = None


class RunReporter:
    """Times phases, logs to trackers and console, and writes the summary of the run.

    Args:
        resolved: the whole configuration in its stored form.
        resumed_from: folder and step of the checkpoint whose metrics the run continues; None for a new run.
        run_id: ID of the run, for its folder and its trackers; None = a new one.
        started: time at which the run started, of ``time.monotonic``; None = now.
    """

    def __init__(
        self,
        config: RunConfig,
        resolved: Mapping[str, Any],
        folder: Path,
        console: Console,
        resumed_from: tuple[Path, int] | None = None,
        on_phase_end: Callable[[], None] = lambda: None,
        run_id: str | None = None,
        started: float | None = None,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.folder = folder
        self.console = console
        self.run_id = run_id or identify_run()
        self.started = time.monotonic() if started is None else started
        self.timer = PhaseTimer()
        self._on_phase_end = on_phase_end
        self.metrics_file = folder / METRICS_FILE
        self._accuracy_before: float | None = None
        self._accuracy_after: float | None = None
        self._totals: dict[str, float] = {
            "steps": 0,
            "train": 0.0,
            "gen": 0.0,
            "generated": 0.0,
            "update": 0.0,
            "updated": 0.0,
        }
        resumed_step = None if resumed_from is None else resumed_from[1]
        RUN_WRITER.reset()
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run in this folder
        begin_samples(folder / "samples", resumed_step)
        self.samples = {kind: SampleFiles(folder / "samples" / kind) for kind in ("train", "validation")}
        if resumed_from is not None:
            for name in RUN_FILES:
                if (resumed_from[0] / name).exists():
                    shutil.copyfile(resumed_from[0] / name, folder / name)
            self._accuracy_before = _accuracy_of_start(self.metrics_file)
        self._balance = BalanceFile(folder / BALANCE_FILE, resumed_step)
        self._slow_hosts = SlowHostWarnings()
        self.trackers = self._open_trackers(resumed_step)

    def _open_trackers(self, resumed_step: int | None) -> Trackers:
        RUN_WRITER.replace(self.folder / ID_FILE, self.run_id)
        run = RunInfo(
            self.config.project_name,
            self.config.experiment_name,
            self.folder,
            self.resolved,
            resumed_step,
            self.console,
            run_id=self.run_id,
            timeout_s=self.config.tracker_timeout_s,
            logs=self.folder / LOGS_FOLDER,
        )
        # The report reads the metrics file, so it is always written.
        names = [*self.config.logger, *(["jsonl"] if "jsonl" not in self.config.logger else [])]
        every = self.config.logging_freq if isinstance(self.config, TrainingRunConfig) else 1
        return open_trackers(names, run, every=every)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, show it in the console and record it in the timeline."""
        with self.phases([name]):
            yield

    @contextmanager
    def phases(self, names: Sequence[str]) -> Iterator[Callable[[int], None]]:
        """Do the same for phases that begin together on separate devices.

        The yielded function ends a phase by its number; the last phase ends with the block.
        """
        alone = len(names) == 1
        spans = [ExitStack() for _ in names]
        running = set(range(len(names)))
        with self.timer.phases(names) as end, self.console.phase(" + ".join(names)), ExitStack() as rest:
            for name, scope in zip(names, spans, strict=True):
                scope.enter_context(span(name, PHASE) if alone else lane_span(name, PHASE, name))
                rest.enter_context(scope)

            def end_phase(number: int) -> None:
                end(number)
                if len(running) > 1:
                    running.remove(number)
                    spans[number].close()

            yield end_phase
        self._on_phase_end()

    @property
    def lasting_files(self) -> list[Path]:
        """Files of the run that a checkpoint keeps, for the run that resumes from it."""
        return [path for path in (self.folder / name for name in RUN_FILES) if path.exists()]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase of the current step."""
        return self.timer.seconds

    @property
    def hidden(self) -> dict[str, float]:
        """Part of these seconds during a longer phase on other devices."""
        return self.timer.hidden

    def log_step(self, step: int, metrics: Metrics, tokens: Mapping[str, int]) -> None:
        """Log the metrics of a step with its timings.

        Warns on the console of repeated passes, empty updates and a rollout mismatch.
        """
        for sentence in (*memory_warnings(metrics), *empty_step_warnings(metrics), *mismatch_warnings(metrics)):
            self.console.warn(f"step {step}: {sentence}")
        seconds = self.seconds
        self._totals["steps"] += 1
        self._totals["train"] += seconds.get("step", 0.0)
        self._totals["gen"] += seconds.get("gen", 0.0)
        self._totals["generated"] += tokens.get("gen", 0)
        updates = [phase for phase in UPDATE_PHASES if phase in seconds]
        self._totals["update"] += self.timer.exposed(updates)
        # Actor and critic train on the same tokens, which count once.
        self._totals["updated"] += max((tokens.get(phase, 0) for phase in updates), default=0)
        accuracy = _accuracy(metrics)
        self._accuracy_after = self._accuracy_after if accuracy is None else accuracy
        self.trackers.log({**metrics, **self.timer.metrics(tokens), **RUN_WRITER.metrics()}, step)
        self.timer.reset()

    def log_validation(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a validation before the first training step, or without training."""
        self._accuracy_before = _accuracy(metrics)
        self.trackers.log({**metrics, **self.timer.metrics()}, step)
        self.timer.reset()

    def log_samples(self, step: int, shown: Sequence[Sample]) -> None:
        """Log samples to the trackers."""
        if shown:
            self.trackers.log_samples(list(stored_samples(shown)), step)

    def keep_samples(self, step: int, samples: Sequence[Sample], kind: str) -> None:
        """Write samples for the report, with thumbnails; ``kind`` is ``train`` or ``validation``."""
        self.samples[kind].add(step, stored_samples(samples, thumbnails=True))

    def keep_balance(self, step: int, lists: RankLists) -> None:
        """Append the work of each data-parallel rank to the balance file, and warn of slow hosts."""
        self._balance.add(step, lists)
        for sentence in self._slow_hosts.sentences(lists, self.seconds.get("step", 0.0)):
            self.console.warn(f"step {step}: {sentence}")

    def finish(self, hf_dir: str | None, stopped: str | None = None) -> RunSummary:
        """Close the trackers, and write and print the summary."""
        summary = self._summary(hf_dir, stopped)
        self.close(dataclasses.asdict(summary))
        return summary

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close the trackers, and write and print a custom summary.

        Args:
            summary: numbers by the names of :class:`RunSummary`.
        """
        self.trackers.finish()
        values = {**summary, "report": str(self.report)}
        if RUN_WRITER.refused_output:
            values["refused_output"] = RUN_WRITER.refused_output
        for path, text in self._summary_files(values).items():
            RUN_WRITER.replace(Path(path), text)
        RUN_WRITER.close()
        self.console.summary(values, self.config.experiment_name)

    def close_training(
        self,
        state: RunState,
        folder: str | None,
        export: Callable[[str, Mapping[str, str]], object],
        at_end: Callable[[], None] = lambda: None,
    ) -> RunSummary:
        """Complete the last save, export the model to ``folder``, and write the summary.

        Args:
            folder: None = no export. A run that ends early exports nothing.
            at_end: called before the trackers close.

        Raises:
            CheckpointError: the last save failed.
        """
        if stop_message := state.finish():
            folder = None  # there is no time for it, and the run is not over
            self.console.warn(stop_message)
        if folder:
            with self.console.phase("export", announce=True):
                export(folder, {ID_FILE: self.run_id})
        at_end()
        summary = self.finish(folder, state.stopped)
        state.check_last_save()
        return summary

    def interrupted(self, stopped: str) -> dict[str, str]:
        """Return the summary files, by path, of a run that ends now without a word."""
        return self._summary_files(dataclasses.asdict(self._summary(None, stopped)))

    def _summary_files(self, values: Mapping[str, Any]) -> dict[str, str]:
        text = format_json(values, indent=2) + "\n"
        return {str(folder.resolve() / "summary.json"): text for folder in (self.folder, self.folder.parent)}

    @property
    def report(self) -> Path:
        """Path of the HTML report, which the command line writes after the run."""
        return self.folder / REPORT_FILE

    @property
    def accuracy(self) -> float | None:
        """Mean reward over the data sources at the last validation; None before the first."""
        return self._accuracy_before if self._accuracy_after is None else self._accuracy_after

    @property
    def wall_seconds(self) -> float:
        """Wall seconds since the start of the run."""
        return time.monotonic() - self.started

    def _summary(self, hf_dir: str | None, stopped: str | None) -> RunSummary:
        totals = self._totals
        return RunSummary(
            val_accuracy_before=self._accuracy_before,
            val_accuracy_after=self._accuracy_after,
            steps=int(totals["steps"]),
            train_seconds=totals["train"],
            wall_seconds=self.wall_seconds,
            rollout_tokens_per_s=totals["generated"] / totals["gen"] if totals["gen"] else None,
            update_tokens_per_s=totals["updated"] / totals["update"] if totals["update"] else None,
            hf_dir=hf_dir,
            report=str(self.report),
            stopped=stopped,
        )


def _accuracy(metrics: Mapping[str, float]) -> float | None:
    """Mean reward over the data sources of a validation; None without one."""
    rewards = [value for name, value in metrics.items() if name.startswith(ACCURACY_PREFIX) and "/mean@" in name]
    return sum(rewards) / len(rewards) if rewards else None


def _accuracy_of_start(metrics_file: Path) -> float | None:
    """Accuracy before the first step, in the metrics of the run that this one resumes."""
    return next((_accuracy(row) for row in read_metrics(metrics_file) if row["step"] == 0), None)
