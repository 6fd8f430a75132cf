"""A sweep: its runs, one after the other in this process or by submitit, and the table of their results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.base.commands import EXIT_FAILED
from megarl.base.errors import ConfigError, ModelError
from megarl.base.redaction import redact_text, redact_words
from megarl.base.run_writer import RUN_WRITER
from megarl.config import SupervisedConfig
from megarl.config.compose import ComposedRun, ComposedSweep, compose_run_of
from megarl.config.sweeps import of_job
from megarl.ops.jobs.run import run_composed, try_page
from megarl.ops.jobs.table import planned_layout
from megarl.tracking.sweep import RunResult, result_of, save_sweep, sweep_table

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
    """Compare the runs of a sweep in a table and a report."""
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
