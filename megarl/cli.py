"""The command ``megarl``: jobs, which run by a configuration (``train``, ``sft``, ...), and commands beside them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import megarl
from megarl.config import (
    EvaluateConfig,
    GenerateConfig,
    MegatronConfig,
    RewardTrainingConfig,
    SFTConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.build import build, verl_notes
from megarl.config.compose import Request, compose, compose_sweep, run_with_hydra, to_yaml
from megarl.config.differences import differences
from megarl.config.jobs import JobConfig
from megarl.config.problems import nearest_keys
from megarl.config.sweeps import SweepFolder
from megarl.errors import ConfigError, DataError, MegarlError, ModelError
from megarl.logs import LOGS_FOLDER, driver_log
from megarl.models import read_model_config
from megarl.provenance import run_facts
from megarl.workers.layouts import check_role


class Job(NamedTuple):
    """One kind of run. The module that runs it is imported only when a run starts, for it imports torch."""

    schema: type[JobConfig]
    config_name: str
    module: str  # has run(config, output_dir)
    doc: str


JOBS = {
    "train": Job(TrainConfig, "ppo", "megarl.trainer.main", "reinforcement learning (PPO, GRPO)"),
    "sft": Job(SFTConfig, "sft", "megarl.trainer.sft", "supervised fine-tuning"),
    "reward-model": Job(
        RewardTrainingConfig, "reward_model", "megarl.trainer.reward_training", "training of a reward model on pairs"
    ),
    "evaluate": Job(
        EvaluateConfig, "evaluate", "megarl.trainer.evaluation", "mean@N, best@N, maj@N on held-out prompts"
    ),
    "generate": Job(GenerateConfig, "generate", "megarl.trainer.generation", "answers to prompts, without scores"),
}


class Command(NamedTuple):
    """Anything but a run. Its module is imported only when it is asked for."""

    module: str  # has main(argv), which returns the exit code
    doc: str


COMMANDS = {
    "convert": Command("megarl.convert.command", "checkpoints to and from Hugging Face; inspect, verify"),
    "doctor": Command("megarl.cluster.checkup_command", "whether machines have what a run needs"),
    "report": Command("megarl.tracking.report.command", "the HTML report of a run, or a comparison of several"),
    "timeline": Command("megarl.tracing.command", "what a run's timeline says: busy shares, phases, gaps"),
    "launch": Command("megarl.launch.command", "a job on a cluster: by SLURM, ssh, on Kubernetes, or on this machine"),
    "plan": Command("megarl.plan.command", "memory, times and limits of a configuration before it runs; best layouts"),
    "retrieval-server": Command("megarl.retrieval.command", "BM25 over a JSONL corpus, for agents that search"),
}

VERL_ENGINE, VERL_DEFAULTS = "model_engine=", "ppo_megatron_trainer"

EXIT_RUN_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
WRONG_INPUT = (ConfigError, ModelError, DataError)
"""Errors at which the same command fails every time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``megarl`` command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in JOBS:
        return run_job(name, arguments[1:])
    if name in COMMANDS:
        code: int = importlib.import_module(COMMANDS[name].module).main(arguments[1:])
        return code
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"megarl {megarl.__version__}")
        return 0
    print(_unknown(name) if name else _usage(), file=sys.stderr)
    return EXIT_BAD_CONFIG


def _unknown(name: str) -> str:
    nearest = " or ".join(nearest_keys(name, [*JOBS, *COMMANDS]))
    guess = f" Did you mean {nearest}?" if nearest else ""
    return f"megarl {name}: there is no such command.{guess} megarl --help lists them."


def _usage() -> str:
    docs = {name: row.doc for table in (JOBS, COMMANDS) for name, row in table.items()}
    width = max(map(len, docs)) + 2
    lines = {name: f"  {name:<{width}}{doc}" for name, doc in docs.items()}
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
            "megarl NAME --help tells more of each.",
        ]
    )


def run_job(name: str, argv: Sequence[str] | None = None) -> int:
    """Reads the command line of a job and runs it, or prints its configuration.

    Args:
        name: a key of ``JOBS``.
        argv: the arguments after the job's name; None = those of the process.

    Returns:
        The exit code: 0, 1 for a run that failed, 2 for what is wrong with configuration, model folder or data, 130
        after Ctrl-C; of a sweep with a run that failed, for whatever reason, 1.
    """
    job = JOBS[name]
    options = _parser(name, job).parse_intermixed_args(argv)
    request = _request(job, options)
    try:
        configs = compose_sweep(request) if options.multirun else [compose(request)]
        for config in configs:
            check_models(config)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    if options.cfg:
        print("---\n".join(map(to_yaml, configs)), end="")
        return 0
    try:
        return _run(name, job, request, minimize=any(map(_is_loss, configs)))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def compose_job(name: str, argv: Sequence[str]) -> JobConfig:
    """The configuration of a single run, complete and checked as before a run, which is not started.

    Args:
        name: a key of ``JOBS``.
        argv: the arguments after the job's name.

    Raises:
        ConfigError, ModelError: something is wrong with it, or it asks for several runs.
    """
    job = JOBS[name]
    options = _parser(name, job).parse_intermixed_args(argv)
    if options.multirun or options.cfg:
        raise ConfigError("--multirun and --cfg are for a job that is run without the launcher; leave them out")
    config = compose(_request(job, options))
    check_models(config)
    return config


def _request(job: Job, options: argparse.Namespace) -> Request[Any]:
    """What is asked for, in Hydra's words or in those of verl's run scripts.

    Those begin from verl's defaults: by their name, or by the choice of the engine that trains. The folder that they
    name is one of verl's own package; where there is none such here, it is passed over.
    """
    overrides, folder = tuple(options.overrides), options.config_dir
    if options.quiet:
        overrides += ("trainer.quiet=true",)
    names_engine = job.schema is TrainConfig and any(text.lstrip("+").startswith(VERL_ENGINE) for text in overrides)
    config_name = options.config_name or (VERL_DEFAULTS if names_engine else job.config_name)
    if folder is None and options.config_path is not None and Path(options.config_path).is_dir():
        folder = options.config_path
    return Request(job.schema, config_name.removesuffix(".yaml"), overrides, folder, options.multirun)


def check_models(config: JobConfig) -> None:
    """Checks every role's layout against the model it will hold, where the model's folder is already there.

    Raises:
        ConfigError: a parallel size does not divide what it splits.
        ModelError: the folder's ``config.json`` is missing, malformed, or of an unknown architecture.
    """
    for path, megatron, field in _models_of(config):
        if not Path(path).is_dir():
            continue  # made before the run starts, or missed by the run when it loads the model
        check_role(read_model_config(path), megatron, field)


def _models_of(config: JobConfig) -> list[tuple[str, MegatronConfig, str]]:
    """Model folder, layout and the layout's key of every role that a job has."""
    if isinstance(config, SupervisedConfig):
        return [(config.model.path, config.megatron, "megatron")]
    if isinstance(config, GenerateConfig):
        return []
    if isinstance(config, EvaluateConfig):
        return _reward_model_of(config)  # the model may be a checkpoint, which is opened when the run starts
    policy = config.actor_rollout_ref
    rollout = MegatronConfig(tensor_model_parallel_size=policy.rollout.tensor_model_parallel_size)
    roles = [
        (policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron"),
        (policy.model.path, rollout, "actor_rollout_ref.rollout"),
    ]
    if config.uses_reference and policy.ref.megatron is not None:
        roles.append((policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron"))
    if config.uses_critic:
        roles.append((str(config.critic.model.path), config.critic.megatron, "critic.megatron"))
    return roles + _reward_model_of(config)


def _reward_model_of(config: TrainConfig | EvaluateConfig) -> list[tuple[str, MegatronConfig, str]]:
    keys = config.reward_model
    return [(str(keys.model.path), keys.megatron, "reward_model.megatron")] if keys.enable else []


def _run(name: str, job: Job, request: Request[Any], *, minimize: bool) -> int:
    codes: list[int] = []

    def task(values: DictConfig) -> float | None:
        """One run, in this process or another; Hydra's launchers send it there."""
        hydra = HydraConfig.get()
        folder, sweeps = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
        metric, problem = None, None
        try:
            # the runs of a sweep share a name, so files without an explicit place go to each run's own folder
            config = build(job.schema, values, str(folder) if sweeps else None)
            metric = config.trainer.sweep_metric
            print("".join(f"verl: {note}\n" for note in verl_notes(job.schema, values)), end="", file=sys.stderr)
            (folder / "config.yaml").write_text(to_yaml(config))
            _record_start(folder, name, request.config_name, config, values, hydra.overrides.task)
            with driver_log(folder / LOGS_FOLDER, config.trainer.log_level):
                importlib.import_module(job.module).run(config, folder)
        except MegarlError as error:
            problem = str(error)
            codes.append(EXIT_BAD_CONFIG if isinstance(error, WRONG_INPUT) and not sweeps else EXIT_RUN_FAILED)
            print(error, file=sys.stderr)
        if not sweeps:
            return None
        from megarl.tracking.sweep import result_of

        result = result_of(folder, hydra.overrides.task, metric, problem)
        return result.value  # None is a failed trial to Optuna, which goes on; NaN would end its study

    SweepFolder.noted = None
    try:
        run_with_hydra(request, name, task, minimize)
    finally:
        if SweepFolder.noted is not None:
            codes += [EXIT_RUN_FAILED for _ in _close_sweep(SweepFolder.noted, minimize)]
    return codes[0] if codes else 0


def _is_loss(config: JobConfig) -> bool:
    """Whether what a sweep judges runs by is a loss, the smallest of which is the best."""
    metric = config.trainer.sweep_metric
    return isinstance(config, SupervisedConfig) if metric is None else "loss" in metric


def _close_sweep(folder: Path, minimize: bool) -> list[str]:
    """Compares a sweep's runs: a table on the terminal and in its folder, and one report of all; returns the errors."""
    from megarl.tracking.report import NoRunError, compare_runs
    from megarl.tracking.sweep import read_results, save_sweep, sweep_table

    results = read_results(folder)
    save_sweep(folder, results, minimize)
    print(sweep_table(results, minimize))
    try:
        print(f"sweep: {compare_runs([folder])}")
    except NoRunError:
        print(f"sweep: {folder} (no run got as far as a first step)")
    return [result.error for result in results if result.error is not None]


def _record_start(
    folder: Path, name: str, config_name: str, config: JobConfig, values: DictConfig, overrides: Sequence[str]
) -> None:
    """Writes ``run.json``: what the run's report tells of command, configuration, software and machine."""
    told = differences(config, values, overrides)
    facts = {
        "job": name,
        "config_name": config_name,
        "overrides": list(overrides),
        **run_facts(),
        "differences": [difference._asdict() for difference in told],
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")


def _parser(name: str, job: Job) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"megarl {name}",
        description=f"{job.doc}. Every key is described in docs/config.md.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that differ from the YAML file's")
    parser.add_argument("--config-name", "-cn", help=f"YAML file; {job.config_name} where none is named")
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")
    parser.add_argument("--config-path", "-cp", help="the same, as scripts for verl have it")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the resolved configuration instead of running")
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print only warnings, errors and the closing summary"
    )
    parser.add_argument("--multirun", "-m", action="store_true", help="one run for each combination of listed values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
