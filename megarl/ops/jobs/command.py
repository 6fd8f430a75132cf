"""``megarl JOB``: runs a job or a sweep from its command line, or prints the configuration.

A run has a folder with locks, checks and a report. The runs of a sweep follow each other in this process, or submitit
starts them; a table compares their results.
"""

from __future__ import annotations

import atexit
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.base.commands import BAD_INPUT, EXIT_BAD_INPUT, EXIT_FAILED, exit_code
from megarl.base.errors import ConfigError, MegarlError, ModelError
from megarl.base.files import private_files
from megarl.base.logs import LOGS_FOLDER, driver_log, steady_output
from megarl.base.packages import import_large
from megarl.base.ports import bypass_proxies
from megarl.base.provenance import run_facts
from megarl.base.redaction import redact_text, redact_words
from megarl.base.run_clock import start_run_clock
from megarl.base.run_writer import RUN_WRITER
from megarl.base.signals import signals_exit_at_once, signals_exit_in_order
from megarl.cluster.fork_server import fork_server
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.build import changed_keys
from megarl.config.compose import (
    ComposedRun,
    ComposedSweep,
    check_folder,
    compose_run,
    compose_run_of,
    compose_sweep,
    to_yaml,
)
from megarl.config.schema.jobs import JobConfig
from megarl.config.stored import references_of
from megarl.config.sweeps import of_job
from megarl.ops.jobs.table import JOBS, job_parser, job_request, planned_layout
from megarl.tracking.sweep import RunResult, result_of, save_sweep, sweep_table
from megarl.trainer.jobs.hub_files import with_hub_files
from megarl.trainer.jobs.output_folders import locked_output_folders
from megarl.trainer.jobs.served_judge import with_served_judge
from megarl.workers.settings import check_models

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
            from megarl.ops.dry_run.jobs import run as dry_run

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


def run_job(name: str, argv: Sequence[str] | None = None) -> int:
    """Read the command line of a job, and run it or print its configuration.

    Returns:
        The exit code: 0; 1 if the run, or a run of a sweep, failed; 2 if configuration, model folder, data or this
        machine's devices, packages or logins are wrong; 130 after Ctrl-C. SIGTERM and SIGHUP raise
        :class:`SystemExit` with 143 and 129, or end the process with them at once while it imports.
    """
    bypass_proxies()  # for user code in this process and its children, such as rewards and trackers
    options = job_parser(name).parse_intermixed_args(argv)
    if not options.cfg and sys.stderr.isatty():
        print("reading the configuration ...", file=sys.stderr)
    try:
        request = job_request(JOBS[name], options)
        sweep = compose_sweep(request, planned_layout) if options.multirun else None
        runs = [compose_run(request, planned_layout)] if sweep is None else sweep.runs
        for run in runs:
            check_models(run.config)
        if not options.cfg:
            check_folder(*(("hydra.run.dir", runs[0].folder) if sweep is None else ("hydra.sweep.dir", sweep.folder)))
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    if options.cfg:
        print("".join(f"{line}\n" for run in runs for line in layout_notes(run)), end="", file=sys.stderr)
        print("---\n".join(to_yaml(run.config) for run in runs), end="")
        return 0

    def run_all() -> int:
        private = private_files(all(run.config.trainer.private_files for run in runs))
        with steady_output(), signals_exit_in_order(), private:
            if sweep is None:
                return run_composed(name, request.config_name, runs[0])[0]
            return run_sweep(name, sweep)

    try:
        return exit_code(run_all)
    finally:
        # Callbacks run in reverse order: after the run, a Ctrl-C cannot interrupt the others with a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


_SHARED = ("cpus_per_task", "gpus_per_node", "mem_gb", "name", "nodes", "stderr_to_stdout", "tasks_per_node",
           "timeout_min")  # fmt: skip
"""Parameters of submitit for any cluster; the others belong to one."""
_PARAMETERS = {"name": "megarl", "nodes": 1, "tasks_per_node": 1, "timeout_min": 60}


def run_sweep(name: str, sweep: ComposedSweep[Any]) -> int:
    """Run all runs of a sweep, and compare them; returns the exit code."""
    # A loss is better if it is smaller.
    metrics = [(run.config, run.config.trainer.sweep_metric) for run in sweep.runs]
    minimize = any("loss" in name if name else isinstance(config, SupervisedConfig) for config, name in metrics)
    results: list[RunResult] = []

    def start(runs: Sequence[ComposedRun[Any] | Sequence[str]]) -> list[RunResult]:
        first = len(results)
        if sweep.settings.cluster is not None:
            results.extend(_submit(name, sweep, runs, first))
        else:
            for number, run in enumerate(runs, first):
                results.append(_run(name, sweep, run, number))
        return results[first:]

    try:
        if sweep.settings.search is None:
            start(sweep.runs)
        else:
            from megarl.ops.jobs.search import run_search

            run_search(sweep, minimize, start)
    finally:
        _compare(sweep.folder, results, minimize)
    return EXIT_FAILED if any(result.error is not None for result in results) else 0


def _run(name: str, sweep: ComposedSweep[Any], run: ComposedRun[Any] | Sequence[str], number: int) -> RunResult:
    """Run one run of a sweep, which may still have to be composed; its errors belong to its result."""
    try:
        composed = run if isinstance(run, ComposedRun) else compose_run_of(sweep, run, number, planned_layout)
    except (ConfigError, ModelError) as error:
        problem = redact_text(str(error))
        print(problem, file=sys.stderr)
        return _failed(sweep, number, run, problem)
    _, failure = run_composed(name, sweep.request.config_name, composed)
    words = redact_words(of_job(composed.overrides))
    return result_of(composed.folder, words, composed.config.trainer.sweep_metric, failure)


def _failed(sweep: ComposedSweep[Any], number: int, run: ComposedRun[Any] | Sequence[str], error: str) -> RunResult:
    words = run.overrides if isinstance(run, ComposedRun) else run
    return result_of(sweep.folder / str(number), redact_words(of_job(words)), None, error)


def _submit(
    name: str, sweep: ComposedSweep[Any], runs: Sequence[ComposedRun[Any] | Sequence[str]], first: int
) -> list[RunResult]:
    """Run in processes of submitit, which compose again: no object of this process reaches them."""
    import submitit

    words = [run.overrides if isinstance(run, ComposedRun) else run for run in runs]
    executor = submitit.AutoExecutor(sweep.folder / ".submitit" / "%j", cluster=sweep.settings.cluster)
    try:
        named = {**_PARAMETERS, **sweep.settings.parameters}.items()
        cluster = f"{sweep.settings.cluster}_"
        executor.update_parameters(**{key if key in _SHARED else cluster + key: value for key, value in named})
    except (NameError, TypeError) as error:
        raise ConfigError(f"hydra.launcher: {error}", code="config.submitit-parameter") from error
    bare = sweep._replace(runs=[])
    jobs = executor.map_array(lambda number, run: _run(name, bare, run, number), range(first, first + len(runs)), words)
    results = []
    for number, (job, run) in enumerate(zip(jobs, words, strict=True), first):
        try:
            results.append(job.result())
        except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
            results.append(_failed(sweep, number, run, "the run's process ended without a result"))
    return results


def _compare(folder: Path, results: Sequence[RunResult], minimize: bool) -> None:
    save_sweep(folder, results, minimize)
    print(sweep_table(results, minimize))
    try_page("comparison", folder, _comparison)
    RUN_WRITER.close()


def _comparison(folder: Path) -> None:
    from megarl.ops import report

    try:
        print(f"sweep: {report.compare_runs([folder])}")
    except report.NoRunError:
        print(f"sweep: {folder} (no run finished its first step)")
