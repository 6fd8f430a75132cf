"""The ``megarl`` command: jobs, which run from a configuration (``train``, ``sft``, ...), and tools around them."""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from megarl.base.errors import ConfigError, DataError, MegarlError, ModelError
from megarl.base.files import private_files
from megarl.base.formatting import table_lines
from megarl.base.logs import LOGS_FOLDER, driver_log, steady_output
from megarl.base.packages import import_large
from megarl.base.provenance import run_facts
from megarl.base.proxies import bypass_proxies
from megarl.base.redaction import redact, redact_text, redact_words
from megarl.base.run_clock import start_run_clock
from megarl.base.run_writer import RUN_WRITER
from megarl.base.signals import signals_exit_at_once, signals_exit_in_order
from megarl.base.version import __version__
from megarl.cluster.fork_server import fork_server
from megarl.config import (
    EvaluateConfig,
    GenerateConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.build import build, verl_notes
from megarl.config.changed_keys import ChangedKey, changed_keys, overridden_keys
from megarl.config.compose import (
    Changes,
    ComposedRun,
    ConfigRequest,
    check_run_folder,
    check_sweep_folder,
    compose,
    compose_run,
    compose_sweep,
    fill_layout,
    run_once,
    run_sweep,
    set_keys,
    to_yaml,
)
from megarl.config.keys import AUTO
from megarl.config.overrides import TextConfigSource, restore_texts
from megarl.config.problems import nearest_keys
from megarl.config.schema.jobs import JobConfig
from megarl.config.short_flags import add_flags, flag_overrides
from megarl.config.stored import remember_references
from megarl.config.sweeps import SweepFolder
from megarl.config.verl.table import table_of
from megarl.trainer.jobs.hub_files import with_hub_files
from megarl.trainer.jobs.model_layouts import check_models
from megarl.trainer.jobs.output_folders import locked_output_folders
from megarl.trainer.jobs.served_judge import with_served_judge

if TYPE_CHECKING:
    from megarl.tracking.sweep import RunResult


class Job(NamedTuple):
    """A kind of run. Its module is imported when the run starts, since it imports torch."""

    schema: type[JobConfig]
    config_name: str
    module: str  # has run(config, output_dir)
    doc: str


JOBS = {
    "train": Job(TrainConfig, "ppo", "megarl.trainer.jobs.train", "reinforcement learning with any configuration"),
    "grpo": Job(TrainConfig, "grpo", "megarl.trainer.jobs.train", "GRPO: groups of answers, no critic"),
    "ppo": Job(TrainConfig, "ppo", "megarl.trainer.jobs.train", "PPO: a critic and generalized advantages"),
    "distill": Job(TrainConfig, "distill", "megarl.trainer.jobs.train", "on-policy distillation from a teacher"),
    "sft": Job(SFTConfig, "sft", "megarl.trainer.jobs.sft", "supervised fine-tuning"),
    "reward-model": Job(
        RewardTrainingConfig,
        "reward_model",
        "megarl.trainer.jobs.train_reward_model",
        "training of a reward model on pairs",
    ),
    "preference": Job(
        PreferenceConfig,
        "preference",
        "megarl.trainer.jobs.preference",
        "preference optimization on pairs (DPO, IPO, SLiC, SimPO)",
    ),
    "dpo": Job(PreferenceConfig, "preference", "megarl.trainer.jobs.preference", "DPO, the default preference loss"),
    "evaluate": Job(
        EvaluateConfig, "evaluate", "megarl.trainer.jobs.evaluate", "mean@N, best@N, maj@N on held-out prompts"
    ),
    "generate": Job(GenerateConfig, "generate", "megarl.trainer.jobs.generate", "answers to prompts, without scores"),
}


class Command(NamedTuple):
    """A command that is not a run. Its module is imported when the command is used."""

    module: str  # has main(argv), which returns the exit code
    doc: str


COMMANDS = {
    "convert": Command("megarl.convert.command", "checkpoints to and from Hugging Face; inspect, verify"),
    "doctor": Command("megarl.ops.doctor.command", "checks of machines before a run; causes of log-prob differences"),
    "report": Command("megarl.ops.report.command", "the HTML report of a run, or a comparison of several"),
    "timeline": Command("megarl.ops.timeline.command", "what a run's timeline says: busy shares, phases, gaps"),
    "launch": Command("megarl.ops.launch.command", "a job on a cluster: by SLURM, ssh, or on this machine"),
    "scale": Command("megarl.ops.scale", "the number of elastic rollout replicas of a run in progress"),
    "plan": Command("megarl.ops.plan.command", "memory and limits of a configuration before it runs; best layouts"),
}

SUMMARY_FILE = "summary.json"

EXIT_RUN_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
WRONG_INPUT = (ConfigError, ModelError, DataError)
"""Errors that a repetition of the same command meets again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``megarl`` command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in JOBS:
        return run_job(name, arguments[1:])
    if name in COMMANDS:
        return _run_command(COMMANDS[name], arguments[1:])
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"megarl {__version__}")
        return 0
    print(_unknown(name) if name else _usage(), file=sys.stderr)
    return EXIT_BAD_CONFIG


def _run_command(command: Command, arguments: Sequence[str]) -> int:
    with signals_exit_at_once():
        module = importlib.import_module(command.module)
    try:
        with signals_exit_in_order():
            code: int = module.main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _unknown(name: str) -> str:
    nearest = " or ".join(nearest_keys(name, [*JOBS, *COMMANDS]))
    guess = f" Did you mean {nearest}?" if nearest else ""
    return f"megarl {name}: unknown command.{guess} megarl --help lists all commands."


def _usage() -> str:
    docs = {name: row.doc for table in (JOBS, COMMANDS) for name, row in table.items()}
    lines = dict(zip(docs, table_lines(docs.items(), indent="  "), strict=True))
    return "\n".join(
        [
            "usage: megarl JOB [options] [KEY=VALUE ...]",
            "       megarl COMMAND ...",
            "",
            "jobs, each with a YAML configuration:",
            *(lines[name] for name in JOBS),
            "",
            "commands:",
            *(lines[name] for name in COMMANDS),
            "",
            "megarl NAME --help explains each.",
        ]
    )


def run_job(name: str, argv: Sequence[str] | None = None) -> int:
    """Read the command line of a job, and run it or print its configuration.

    Args:
        name: a key of ``JOBS``.
        argv: the arguments after the job's name; None = those of the process.

    Returns:
        The exit code: 0; 1 if the run, or a run of a sweep, failed; 2 if configuration, model folder, data or this
        machine's devices, packages or logins are wrong; 130 after Ctrl-C. SIGTERM and SIGHUP raise
        :class:`SystemExit` with 143 and 129, or end the process with them at once while it imports.
    """
    bypass_proxies()  # for user code in this process and its children, such as rewards and trackers
    job = JOBS[name]
    options = _parser(name, job).parse_intermixed_args(argv)
    if not options.cfg and sys.stderr.isatty():
        print("reading the configuration ...", file=sys.stderr)
    try:
        request = _request(job, options)
        layout = _Layout()
        run = None if options.multirun else compose_run(request, name, layout.choose)
        configs = compose_sweep(request, layout.choose) if run is None else [run.config]
        for config in configs:
            check_models(config)
        if not options.cfg:
            check_sweep_folder(request) if run is None else check_run_folder(run)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    if options.cfg:
        print("".join(f"{line}\n" for line in layout.lines), end="", file=sys.stderr)
        print("---\n".join(map(to_yaml, configs)), end="")
        return 0
    try:
        private = private_files(all(config.trainer.private_files for config in configs))
        with steady_output(), signals_exit_in_order(), private:
            return _run(name, job, request, run, layout, any(map(_is_loss, configs)))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        # Callbacks run in reverse order: after the run, a Ctrl-C cannot interrupt the others with a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def compose_job(name: str, argv: Sequence[str]) -> JobConfig:
    """Compose and check the configuration of a single run without starting it.

    Args:
        name: a key of ``JOBS``.
        argv: the arguments after the job's name.

    Raises:
        ConfigError, ModelError: the configuration is invalid, or describes several runs.
    """
    job = JOBS[name]
    options = _parser(name, job).parse_intermixed_args(argv)
    if options.multirun or options.cfg:
        raise ConfigError(
            "--multirun and --cfg do not work with the launcher; remove them", code="launch.multirun-or-cfg"
        )
    config: JobConfig = compose(_request(job, options), _Layout().choose)
    check_models(config)
    return config


class _Layout:
    """The layout that the planner chose for ``layout=auto``; empty otherwise."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.keys: frozenset[str] = frozenset()

    def choose(self, build: Callable[[Changes], Any], fixed: frozenset[str]) -> Changes:
        """Choose as :data:`megarl.config.compose.LayoutChooser`."""
        from megarl.ops.plan.automatic import automatic_layout, layout_lines

        layout = automatic_layout(build, fixed)
        self.lines, self.keys = layout_lines(layout), frozenset(layout.changes)
        return layout.changes


def _request(job: Job, options: argparse.Namespace) -> ConfigRequest[Any]:
    """Translate command-line options to a configuration request, in Hydra's syntax or that of verl's run scripts.

    verl's scripts start from verl's defaults, selected by their name, or by ``model_engine`` (``engine`` for
    fine-tuning). Their config folder is inside verl's package; it is ignored if it does not exist.
    """
    overrides, folder = (*flag_overrides(options, job.schema), *options.overrides), options.config_dir
    if options.quiet:
        overrides += ("trainer.quiet=true",)
    verl = table_of(job.schema)
    names_engine = bool(verl.selector) and any(text.lstrip("+").startswith(f"{verl.selector}=") for text in overrides)
    config_name = options.config_name or (verl.preset if names_engine else job.config_name)
    trains = issubclass(job.schema, TrainConfig | SupervisedConfig)
    if options.config_name is None and getattr(options, "model", None) and trains:
        overrides = (f"layout={AUTO}", *overrides)  # a short command; later words replace it
    if folder is None and options.config_path is not None and Path(options.config_path).is_dir():
        folder = options.config_path
    return ConfigRequest(job.schema, config_name.removesuffix(".yaml"), overrides, folder, options.multirun)


def _run(
    name: str, job: Job, request: ConfigRequest[Any], run: ComposedRun[Any] | None, layout: _Layout, minimize: bool
) -> int:
    """Run a job, or without a composed run the jobs of a sweep; returns the exit code."""
    fixed = set_keys(request) if run is None and layout.lines else frozenset[str]()
    codes: list[int] = []
    results: list[RunResult] = []

    def task(values: DictConfig) -> float | None:
        """Run one job; Hydra's launchers may call it in another process."""
        start_run_clock()
        hydra = HydraConfig.get()
        folder, sweeps = Path(hydra.runtime.output_dir), run is None
        metric, problem = None, None
        chosen = _Layout() if sweeps else layout
        if sweeps:
            restore_texts(values, hydra.overrides.task, job.schema)
            _store_sweep(folder, values)
        try:
            if sweeps and values.get("layout") == AUTO:
                fill_layout(job.schema, values, chosen.choose, fixed)
            # runs of a sweep share a name, so files without an explicit path go to the folder of each run
            overridden = overridden_keys(hydra.overrides.task)
            config = build(job.schema, values, str(folder), overridden) if run is None else run.config
            metric = config.trainer.sweep_metric
            remember_references(config, values)
            notes = [*TextConfigSource.notes, *verl_notes(job.schema, values, overridden)]
            print("".join(f"config: {note}\n" for note in notes), end="", file=sys.stderr)
            with locked_output_folders(config, folder):
                _run_locked(name, job, request.config_name, config, values, hydra.overrides.task, chosen)
        except MegarlError as error:
            problem = str(error)
            codes.append(EXIT_BAD_CONFIG if isinstance(error, WRONG_INPUT) and not sweeps else EXIT_RUN_FAILED)
            print(redact_text(problem), file=sys.stderr)
        if not sweeps:
            return None
        from megarl.tracking.sweep import result_of

        words = redact_words(hydra.overrides.task)
        result = result_of(folder, words, metric, problem and redact_text(problem))
        results.append(result)
        return result.value  # Optuna counts None as a failed trial and continues; NaN would end its study

    SweepFolder.noted = None
    try:
        run_sweep(request, name, task, minimize) if run is None else run_once(request, run, name, task)
    finally:
        if SweepFolder.noted is not None:
            codes += [EXIT_RUN_FAILED for _ in _close_sweep(SweepFolder.noted, results, minimize)]
    return codes[0] if codes else 0


def _run_locked(
    name: str,
    job: Job,
    config_name: str,
    config: JobConfig,
    values: DictConfig,
    overrides: Sequence[str],
    layout: _Layout,
) -> None:
    """Run one job in its folder, which no other run writes."""
    folder, title = Path(HydraConfig.get().runtime.output_dir), f"{name} {config.trainer.experiment_name}"
    config = with_served_judge(config)
    RUN_WRITER.replace(folder / "config.yaml", to_yaml(config))
    _store_hydra(folder, values)
    for line in layout.lines:
        _say(config, line)
    changes = changed_keys(config, values, overrides, layout.keys)
    _record_start(folder, name, config_name, changes, overrides)
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
            with fork_server(_has_local_cpu_workers(config)):
                with signals_exit_at_once():
                    module = import_large(job.module)
                module.run(config, folder)
        except KeyboardInterrupt:
            _write_report(folder)  # of the steps before a first Ctrl-C
            raise
        _write_report(folder)


def _store_hydra(folder: Path, values: DictConfig) -> None:
    """Store the composed configuration and the overrides as Hydra does, without secrets."""
    hydra, files = HydraConfig.instance().cfg, folder / ".hydra"
    assert hydra is not None
    contents = {"config": values, "hydra": {"hydra": hydra.hydra}, "overrides": hydra.hydra.overrides.task}
    for name, content in contents.items():
        plain = redact(OmegaConf.to_container(OmegaConf.create(content)))
        RUN_WRITER.replace(files / f"{name}.yaml", OmegaConf.to_yaml(plain))


def _store_sweep(folder: Path, values: DictConfig) -> None:
    """Store the files of Hydra for a run of a sweep, and redact Hydra's description of the sweep."""
    _store_hydra(folder, values)
    sweep = folder.parent / "multirun.yaml"
    if sweep.is_file():
        RUN_WRITER.replace(sweep, OmegaConf.to_yaml(redact(OmegaConf.to_container(OmegaConf.load(sweep)))))


def _say(config: JobConfig, text: str) -> None:
    """Print a line about the start of a run; the run's console opens later, after the imports."""
    if not config.trainer.quiet:
        print(text, flush=True)


def _is_loss(config: JobConfig) -> bool:
    """Whether the metric that a sweep compares is a loss, so that smaller is better."""
    metric = config.trainer.sweep_metric
    return isinstance(config, SupervisedConfig) if metric is None else "loss" in metric


def _close_sweep(folder: Path, local_results: Sequence[RunResult], minimize: bool) -> list[str]:
    """Compare the runs of a sweep in a table and a report; returns the errors of failed runs.

    Args:
        folder: folder of the sweep.
        local_results: results of runs in this process.
        minimize: whether the smallest objective is the best.
    """
    from megarl.ops import report
    from megarl.tracking.sweep import read_results, save_sweep, sweep_table

    results = read_results(folder, local_results)
    save_sweep(folder, results, minimize)
    print(sweep_table(results, minimize))
    try:
        print(f"sweep: {report.compare_runs([folder])}")
    except report.NoRunError:
        print(f"sweep: {folder} (no run finished its first step)")
    except Exception as error:
        _say_unwritten("comparison", folder, error)
    RUN_WRITER.close()
    return [result.error for result in results if result.error is not None]


def _has_local_cpu_workers(config: JobConfig) -> bool:
    """Whether the workers are CPU processes on this machine, which a fork server can start."""
    trainer = config.trainer
    return trainer.device != "cuda" and trainer.nnodes == 1 and not Path("/dev/nvidiactl").exists()


def _write_report(folder: Path) -> None:
    """Write the HTML report from the files of a finished run, if the job left a summary."""
    if not (folder / SUMMARY_FILE).exists():
        return
    try:
        from megarl.ops.report import report_run

        report_run(folder)
    except Exception as error:
        _say_unwritten("report", folder, error)


def _say_unwritten(page: str, folder: Path, error: Exception) -> None:
    """Tell that a page could not be written. The runs are complete: neither a full disk nor a bug fails them now."""
    if not isinstance(error, OSError | ConfigError):  # a bug: the log has its place
        logging.getLogger(__name__).info("writing the %s failed", page, exc_info=error)
    print(f"the {page} could not be written: {error}; retry with: megarl report {folder}", file=sys.stderr)


def _record_start(
    folder: Path, name: str, config_name: str, changes: Sequence[ChangedKey], overrides: Sequence[str]
) -> None:
    """Write ``run.json``: command, configuration changes, software and machine, for the report."""
    facts = {
        "job": name,
        "config_name": config_name,
        "overrides": redact_words(overrides),
        **run_facts(),
        "differences": [difference._asdict() for difference in changes],
    }
    RUN_WRITER.replace(folder / "run.json", json.dumps(facts, indent=1, default=str) + "\n")


def _parser(name: str, job: Job) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"megarl {name}",
        description=f"{job.doc}. Every key is described in docs/reference/config/{name.replace('-', '_')}.md.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the YAML file")
    add_flags(parser, job.schema)
    parser.add_argument("--config-name", "-cn", help=f"YAML file; default: {job.config_name}")
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")
    parser.add_argument("--config-path", "-cp", help="same as --config-dir, for verl's scripts")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the resolved configuration instead of running")
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print only warnings, errors and the closing summary"
    )
    parser.add_argument("--multirun", "-m", action="store_true", help="one run for each combination of listed values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
