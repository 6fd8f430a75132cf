"""``megarl JOB``: reads the command line of a job, and runs it or prints its configuration."""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Sequence

from megarl.base.commands import EXIT_BAD_INPUT, exit_code
from megarl.base.errors import ConfigError, ModelError
from megarl.base.files import private_files
from megarl.base.logs import steady_output
from megarl.base.ports import bypass_proxies
from megarl.base.signals import signals_exit_in_order
from megarl.config.compose import check_folder, compose_run, compose_sweep, to_yaml
from megarl.ops.jobs.run import layout_notes, run_composed
from megarl.ops.jobs.table import JOBS, job_parser, job_request, planned_layout
from megarl.workers.settings import check_models


def run_job(name: str, argv: Sequence[str] | None = None) -> int:
    """Read the command line of a job, and run it or print its configuration.

    Args:
        name: a key of ``JOBS``.

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
            from megarl.ops.jobs.sweep import run_sweep

            return run_sweep(name, sweep)

    try:
        return exit_code(run_all)
    finally:
        # Callbacks run in reverse order: after the run, a Ctrl-C cannot interrupt the others with a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
