"""The kinds of jobs, and their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError
from megarl.config import (
    EvaluateConfig,
    GenerateConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.compose import Changes, ChosenLayout, ConfigRequest, compose
from megarl.config.keys import AUTO
from megarl.config.schema.jobs import JobConfig
from megarl.config.short_flags import add_config_arguments, add_flags, flag_overrides
from megarl.config.verl.table import table_of
from megarl.workers.settings import check_models


class Job(NamedTuple):
    """A kind of run. Its module is imported when the run starts, since it imports torch."""

    schema: type[JobConfig]
    config_name: str
    module: str  # has run(config, output_dir)
    doc: str


_JOBS = "megarl.trainer.jobs"
_SUPERVISED = f"{_JOBS}.supervised_jobs"
JOBS = {
    "train": Job(TrainConfig, "ppo", f"{_JOBS}.train", "reinforcement learning with any configuration"),
    "grpo": Job(TrainConfig, "grpo", f"{_JOBS}.train", "GRPO: groups of answers, no critic"),
    "ppo": Job(TrainConfig, "ppo", f"{_JOBS}.train", "PPO: a critic and generalized advantages"),
    "distill": Job(TrainConfig, "distill", f"{_JOBS}.train", "on-policy distillation from a teacher"),
    "sft": Job(SFTConfig, "sft", _SUPERVISED, "supervised fine-tuning"),
    "reward-model": Job(RewardTrainingConfig, "reward_model", _SUPERVISED, "training of a reward model on pairs"),
    "preference": Job(
        PreferenceConfig, "preference", _SUPERVISED, "preference optimization on pairs (DPO, IPO, SLiC, SimPO)"
    ),
    "dpo": Job(PreferenceConfig, "preference", _SUPERVISED, "DPO, the default preference loss"),
    "evaluate": Job(EvaluateConfig, "evaluate", f"{_JOBS}.evaluate", "mean@N, best@N, maj@N on held-out prompts"),
    "generate": Job(GenerateConfig, "generate", f"{_JOBS}.generate", "answers to prompts, without scores"),
}


def compose_job(name: str, argv: Sequence[str]) -> JobConfig:
    """Compose and check the configuration of a single run without starting it.

    Raises:
        ConfigError, ModelError: the configuration is invalid, or describes several runs.
    """
    options = job_parser(name).parse_intermixed_args(argv)
    if options.multirun or options.cfg:
        raise ConfigError(
            "--multirun and --cfg do not work with the launcher; remove them", code="launch.multirun-or-cfg"
        )
    config: JobConfig = compose(job_request(JOBS[name], options), planned_layout)
    check_models(config)
    return config


def planned_layout(build: Callable[[Changes], Any], fixed: frozenset[str]) -> ChosenLayout:
    """Choose the layout of a run, as :data:`megarl.config.compose.LayoutChooser`."""
    from megarl.ops.plan.layout_choice import automatic_layout

    return automatic_layout(build, fixed)


def job_parser(name: str) -> argparse.ArgumentParser:
    """Build the parser of a job's command line."""
    job = JOBS[name]
    parser = argparse.ArgumentParser(
        prog=f"megarl {name}",
        description=f"{job.doc}. Every key is described in docs/reference/config/{name.replace('-', '_')}.md.",
    )
    add_flags(parser, job.schema)
    add_config_arguments(parser, f"YAML file; default: {job.config_name}")
    parser.add_argument("--config-path", "-cp", help="same as --config-dir, for verl's scripts")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the resolved configuration instead of running")
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print only warnings, errors and the closing summary"
    )
    parser.add_argument("--multirun", "-m", action="store_true", help="one run for each combination of listed values")
    return parser


def job_request(job: Job, options: argparse.Namespace) -> ConfigRequest[Any]:
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
    return ConfigRequest(job.schema, config_name, overrides, folder)
