"""One run in its folder: checks, locks, the job itself, and its report."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.base.commands import BAD_INPUT, EXIT_BAD_INPUT, EXIT_FAILED
from megarl.base.errors import ConfigError, MegarlError
from megarl.base.logs import LOGS_FOLDER, driver_log
from megarl.base.packages import import_large
from megarl.base.provenance import run_facts
from megarl.base.redaction import redact_text, redact_words
from megarl.base.run_clock import start_run_clock
from megarl.base.run_writer import RUN_WRITER
from megarl.base.signals import signals_exit_at_once
from megarl.cluster.fork_server import fork_server
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.build import changed_keys
from megarl.config.compose import ComposedRun, to_yaml
from megarl.config.schema.jobs import JobConfig
from megarl.config.stored import references_of
from megarl.config.sweeps import of_job
from megarl.ops.jobs.table import JOBS
from megarl.trainer.jobs.hub_files import with_hub_files
from megarl.trainer.jobs.output_folders import locked_output_folders
from megarl.trainer.jobs.served_judge import with_served_judge

SUMMARY_FILE = "summary.json"


def run_composed(name: str, config_name: str, run: ComposedRun[Any]) -> tuple[int, str | None]:
    """Run a job in its folder; returns the exit code, and its error, which was printed, without secrets."""
    start_run_clock()
    try:
        with references_of(run.config, run.values):
            print("".join(f"config: {note}\n" for note in run.notes), end="", file=sys.stderr)
            run.folder.mkdir(parents=True, exist_ok=True)
            with locked_output_folders(run.config, run.folder):
                _run_locked(name, config_name, run)
        return 0, None
    except MegarlError as error:
        text = printed = redact_text(str(error))
        code = EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED
    except Exception as error:  # a bug, of megarl or of the user's code
        text, printed = redact_text(f"{type(error).__name__}: {error}"), redact_text(traceback.format_exc().rstrip())
        code = EXIT_FAILED
    print(printed, file=sys.stderr)
    return code, text


def _run_locked(name: str, config_name: str, run: ComposedRun[Any]) -> None:
    """Run one job in its folder, which no other run writes."""
    folder, title = run.folder, f"{name} {run.config.trainer.experiment_name}"
    config = with_served_judge(run.config)
    RUN_WRITER.replace(folder / "config.yaml", to_yaml(config))
    for line in layout_notes(run):
        _say(config, line)
    _record_start(name, config_name, config, run)
    config = with_hub_files(config, lambda line: print(line, file=sys.stderr))
    with driver_log(folder / LOGS_FOLDER, config.trainer.log_level):
        if isinstance(config, TrainConfig | SupervisedConfig) and config.trainer.dry_run:
            _say(config, f"{title}: dry run, load libraries ...")
            from megarl.ops.dry_run import run as dry_run

            dry_run(config)
            return
        _say(config, f"{title}: check files, devices and logins ...")
        with signals_exit_at_once():
            from megarl.trainer.jobs.early_checks import check_early  # imports Ray and pyarrow, no torch
        check_early(config)
        _say(config, "load libraries (torch, transformers, Ray) ...")
        try:
            trainer = config.trainer
            # A fork server starts workers that are CPU processes on this machine.
            forks = trainer.device != "cuda" and trainer.nnodes == 1 and not Path("/dev/nvidiactl").exists()
            with fork_server(forks):
                with signals_exit_at_once():
                    module = import_large(JOBS[name].module)
                module.run(config, folder)
        except KeyboardInterrupt:
            _write_report(folder)  # of the steps before a first Ctrl-C
            raise
        _write_report(folder)


def layout_notes(run: ComposedRun[Any]) -> list[str]:
    """Describe the chosen values of ``layout=auto``; empty without them."""
    if run.layout is None:
        return []
    from megarl.ops.plan.layout_choice import AutomaticLayout, layout_lines

    assert isinstance(run.layout, AutomaticLayout)
    return layout_lines(run.layout)


def _record_start(name: str, config_name: str, config: JobConfig, run: ComposedRun[Any]) -> None:
    """Write ``run.json``: command, configuration changes, software and machine, for the report."""
    planned = () if run.layout is None else run.layout.changes
    overrides = of_job(run.overrides)
    changes = changed_keys(config, run.values, overrides, planned)
    facts = {
        "job": name,
        "config_name": config_name,
        "overrides": redact_words(overrides),
        **run_facts(),
        "differences": [difference._asdict() for difference in changes],
    }
    RUN_WRITER.replace(run.folder / "run.json", json.dumps(facts, indent=1, default=str) + "\n")


def _say(config: JobConfig, text: str) -> None:
    """Print a line about the start of a run; the run's console opens later, after the imports."""
    if not config.trainer.quiet:
        print(text, flush=True)


def _write_report(folder: Path) -> None:
    """Write the HTML report from the files of a finished run, if the job left a summary."""
    if (folder / SUMMARY_FILE).exists():
        try_page("report", folder, _report)


def _report(folder: Path) -> None:
    from megarl.ops import report

    report.report_run(folder)


def try_page(page: str, folder: Path, write: Callable[[Path], object]) -> None:
    """Write a page of finished runs. They are complete: neither a full disk nor a bug fails them now."""
    try:
        write(folder)
    except Exception as error:
        if not isinstance(error, OSError | ConfigError):  # a bug: the log has its place
            logging.getLogger(__name__).info("writing the %s failed", page, exc_info=error)
        print(f"the {page} could not be written: {error}; retry with: megarl report {folder}", file=sys.stderr)
