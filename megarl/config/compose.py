"""Hydra on top of the schema: YAML files and overrides in, a typed configuration or a list of problems out.

The schema's defaults are the first entry of a defaults list that is put together here, so a YAML file states only
what differs and needs no mention of the schema. An override of a key that is in no schema is caught before Hydra
sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.main import main as hydra_main
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.build import build, defaults, unknown_key
from megarl.config.jobs import JobConfig, JobT
from megarl.config.keys import Key, walk
from megarl.config.problems import InvalidConfigError, Problem, nearest_keys
from megarl.config.schema import TrainConfig
from megarl.config.sweeps import SWEEP_CALLBACK, check_plugins, runs_of, sweep_overrides
from megarl.config.verl.adopt import is_verls
from megarl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY_CONFIGS = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)
"""megarl's own YAML files: inside the package where a wheel installed it, beside it in a checkout."""

HARDWARE = "hardware"
"""Folder beside the configurations with files that are none: nodes, for ``megarl plan``."""
EXPERIMENT = "experiment"
"""Folder with files that are laid over a configuration, by ``+experiment=NAME``."""

_JOB, _DEFAULTS = "megarl_job", "megarl_defaults"
_RUN_FOLDER = "outputs/${trainer.experiment_name}/${now:%Y-%m-%d_%H-%M-%S}"


@dataclass(frozen=True)
class Request(Generic[JobT]):
    """What a command line asks for.

    Attributes:
        schema: configuration class of the job.
        config_name: YAML file, without its suffix.
        overrides: in Hydra's syntax, ``key=value``.
        config_dir: folder searched before megarl's own ``configs/``.
        multirun: whether overrides may list several values, each a run of its own.
    """

    schema: type[JobT]
    config_name: str
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    multirun: bool = False


def compose(request: Request[JobT]) -> JobT:
    """The typed, complete and checked configuration of a single run.

    Raises:
        ConfigError: the YAML file is missing or malformed, an override cannot be read, or the values are wrong
            (then an ``InvalidConfigError`` with every problem).
    """
    check_plugins(_parse(request.overrides), multirun=False)
    return _compose(request)


def _compose(request: Request[JobT]) -> JobT:
    known, parsed = dict(walk(request.schema)), _parse(request.overrides)
    problems = [problem for o in parsed if (problem := _override_problem(o, known, request)) is not None]
    wrong = {problem.path for problem in problems}
    try:
        config = build(request.schema, _load(request, [o for o in parsed if o.key_or_group not in wrong], known))
    except InvalidConfigError as error:
        raise InvalidConfigError([*problems, *error.problems]) from error
    if problems:
        raise InvalidConfigError(problems)
    return config


def compose_sweep(request: Request[JobT]) -> list[JobT]:
    """The configuration of every run of a sweep, in order, so that a wrong one is found before the first starts.

    Of a sweeper that invents its runs, that of one run of those it may; the others are checked when they start.

    Raises:
        ConfigError: as :func:`compose`, with the overrides of the run that is wrong.
    """
    parsed, configs = _parse(request.overrides), []
    check_plugins(parsed, multirun=True)
    for overrides in runs_of(parsed):
        try:
            configs.append(_compose(Request(request.schema, request.config_name, overrides, request.config_dir)))
        except ConfigError as error:
            raise ConfigError(f"In the run of the sweep with {' '.join(overrides)}:\n{error}") from error
    return configs


def run_with_hydra(
    request: Request[Any], name: str, task: Callable[[DictConfig], float | None], minimize: bool = False
) -> None:
    """Hands over to Hydra, which makes the run's folder and calls the task once, or once per run of a sweep.

    Args:
        request: already found right by :func:`compose` or :func:`compose_sweep`.
        name: the job's name in Hydra's log files.
        task: gets the composed, untyped configuration; returns what a sweep judges the run by.
        minimize: whether the smallest of that is the best.
    """
    known, parsed = dict(walk(request.schema)), _parse(request.overrides)
    arguments = [f"hydra.job.name={name}", *(_reachable(override, known, request) for override in parsed)]
    arguments += sweep_overrides(parsed, minimize) if request.multirun else []
    _register(request)
    with _arguments(arguments, request.multirun):
        hydra_main(version_base="1.3", config_path=str(_folders(request)[0]), config_name=_JOB)(task)()


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"An override cannot be read; write it as key=value. {error}") from error
    for override in parsed:
        if not override.key_or_group:
            raise ConfigError(f"The override {override.input_line} names no key; write it as key=value.")
    return parsed


def _override_problem(override: Override, known: dict[str, Key], request: Request[Any]) -> Problem | None:
    path = override.key_or_group
    if path.startswith("hydra.") or "/" in path or override.package is not None or _is_group(path, request):
        return None
    value = override.get_value_string() if override.value_type is not None else None
    free = any(p in known and known[p].is_mapping for p in _parents(path))
    if path not in known and not free and not _is_verls(path, request):
        return unknown_key(path, value, list(known))
    if override.is_sweep_override():
        text = "lists several values: add --multirun for one run each, or write a list as [a,b]"
        return Problem(path, value, text)
    return None


def _is_group(path: str, request: Request[Any]) -> bool:
    return "." not in path and any((folder / path).is_dir() for folder in _folders(request))


def _is_verls(path: str, request: Request[Any]) -> bool:
    return request.schema is TrainConfig and is_verls(path)


def _reachable(override: Override, known: dict[str, Key], request: Request[Any]) -> str:
    """The override's text, forced where Hydra does not see its key: below a section that is null or free, or verl's.

    A plus, which scripts for verl have where verl's own schema lacks a key, says nothing about megarl's.
    """
    path, text = override.key_or_group, str(override.input_line)
    hidden = any(p in known and (known[p].is_mapping or known[p].default is None) for p in _parents(path))
    if not (hidden or (path in known and text.startswith("+")) or (path not in known and _is_verls(path, request))):
        return text
    return f"++{text.lstrip('+')}" if text.lstrip("+").startswith(path) else text


def _parents(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def _load(request: Request[Any], overrides: Sequence[Override], known: dict[str, Key]) -> DictConfig:
    arguments = [_reachable(override, known, request) for override in overrides]
    _register(request)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(_folders(request)[0]), job_name="megarl", version_base="1.3"):
            return hydra_compose(_JOB, overrides=arguments)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"Config '{request.config_name}' cannot be composed. {error}") from error


def _register(request: Request[Any]) -> None:
    """Registers the schema's defaults and the primary config, which puts the user's YAML on top of them."""
    schema: Any = request.schema
    folders = _folders(request)
    _find(request.config_name, folders)
    primary = {
        # the run keeps a log of its own; see megarl.logs
        "defaults": [_DEFAULTS, f"{request.config_name}@_global_", "_self_", {"override hydra/job_logging": "none"}],
        "hydra": {
            "searchpath": [f"file://{folder}" for folder in folders[1:]],
            "run": {"dir": _RUN_FOLDER},
            "sweep": {"dir": _RUN_FOLDER, "subdir": "${hydra.job.num}"},
            "callbacks": SWEEP_CALLBACK,
        },
    }
    store = ConfigStore.instance()
    store.store(_DEFAULTS, defaults(schema))
    store.store(_JOB, primary)


def _folders(request: Request[Any]) -> list[Path]:
    own = [Path(request.config_dir).resolve()] if request.config_dir else []
    folders = [*own, REPOSITORY_CONFIGS]
    if own and not own[0].is_dir():
        raise ConfigError(f"--config-dir={request.config_dir}: no such folder")
    return folders


def _find(config_name: str, folders: list[Path]) -> None:
    if any((folder / f"{config_name}.yaml").is_file() for folder in folders):
        return
    files = [file.relative_to(folder) for folder in folders for file in folder.rglob("*.yaml")]
    names = sorted(str(file.with_suffix("")) for file in files if file.parts[0] not in (HARDWARE, EXPERIMENT))
    nearest, where = " or ".join(nearest_keys(config_name, names)), ", ".join(map(str, folders))
    guess = f" Did you mean {nearest}?" if nearest else ""
    raise ConfigError(
        f"--config-name={config_name}: no {config_name}.yaml in {where}.{guess} There are: {', '.join(names)}"
    )


@contextmanager
def _arguments(arguments: Sequence[str], multirun: bool) -> Iterator[None]:
    """Hydra's entry point reads ``sys.argv``."""
    before = sys.argv
    sys.argv = [before[0], *arguments, *(["--multirun"] if multirun else [])]
    try:
        yield
    finally:
        sys.argv = before


def to_yaml(config: JobConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
