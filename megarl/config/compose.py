"""Hydra on top of the schema: YAML files and overrides in, a typed configuration or a list of problems out.

The schema's defaults are the first entry of a defaults list that this module builds. A YAML file therefore states only
values that differ, and needs no mention of the schema. Overrides of unknown keys are found before Hydra reads them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeAlias, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import run_and_report
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.utils import configure_log, run_job
from hydra.errors import HydraException
from hydra.main import main as hydra_main
from hydra.types import HydraContext, RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.base.errors import ConfigError
from megarl.base.files import WRITABLE, write_error
from megarl.base.logs import keep_standard_error_open
from megarl.base.redaction import redact
from megarl.base.run_writer import RUN_WRITER
from megarl.config.build import build, build_draft, defaults, unknown_key
from megarl.config.keys import AUTO, Key, leaves, walk
from megarl.config.outputs import check_sweep_outputs
from megarl.config.overrides import TextConfigSource, parse_overrides
from megarl.config.problems import InvalidConfigError, Problem, nearest_keys
from megarl.config.schema.jobs import JobConfig, JobT
from megarl.config.stored import stored_config
from megarl.config.sweeps import SWEEP_CALLBACK, check_plugins, runs_of, sweep_overrides, sweeper_of
from megarl.config.verl.adopt import is_verl_key
from megarl.config.verl.table import table_of

_PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY_CONFIGS = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)
"""The shipped YAML files: inside the package in a wheel, next to it in a checkout."""

HARDWARE = "hardware"
"""Folder of node descriptions for ``megarl plan``, which are no configurations."""
EXPERIMENT = "experiment"
"""Folder of experiments, applied on top of a configuration by ``+experiment=NAME``."""

_JOB, _DEFAULTS = "megarl_job", "megarl_defaults"
_RUN_FOLDER = "outputs/${trainer.experiment_name}/${now:%Y-%m-%d_%H-%M-%S}"


@dataclass(frozen=True)
class ConfigRequest(Generic[JobT]):
    """The configuration that a command line requests.

    Attributes:
        schema: configuration class of the job.
        config_name: YAML file, without its suffix.
        overrides: in Hydra's syntax, ``key=value``.
        config_dir: folder to search before megarl's ``configs/``.
        multirun: whether overrides may list several values, one run for each.
    """

    schema: type[JobT]
    config_name: str
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    multirun: bool = False


def compose(request: ConfigRequest[JobT], choose: LayoutChooser | None = None) -> JobT:
    """Compose the typed, complete and checked configuration of a single run.

    Args:
        request: of a single run.
        choose: as for :func:`compose_run`.

    Raises:
        ConfigError: the YAML file is missing or malformed, an override is malformed, or the values are wrong (then an
            ``InvalidConfigError`` with every problem).
    """
    return compose_run(request, choose=choose).config


class ComposedRun(NamedTuple, Generic[JobT]):
    """A single run before its start.

    Attributes:
        config: typed, complete and checked.
        values: the values it was built from, with Hydra's section.
    """

    config: JobT
    values: DictConfig


Changes: TypeAlias = Mapping[str, Any]
LayoutChooser: TypeAlias = Callable[[Callable[[Changes], Any], frozenset[str]], Changes]
"""Chooses values for ``layout=auto``, by key: from a function that builds the unchecked configuration with changes, and
from the keys that files or the command line set."""


def compose_run(
    request: ConfigRequest[JobT], name: str = "megarl", choose: LayoutChooser | None = None
) -> ComposedRun[JobT]:
    """Compose as :func:`compose`, and keep the values for :func:`run_once`.

    Args:
        request: of a single run.
        name: the job's name in Hydra's files.
        choose: chooses the values of ``layout=auto``; None = they stay as they are.
    """
    check_plugins(_parse(request), multirun=False)
    run = _compose(request, build, name, choose)
    if run.values.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError("hydra.mode=MULTIRUN: only a sweep uses it; add --multirun", code="config.needs-multirun")
    run.values.hydra.mode = RunMode.RUN
    return run


def compose_draft(request: ConfigRequest[JobT]) -> JobT:
    """Compose as :func:`compose`, without the checks across sections: layouts and batches may not divide."""
    check_plugins(_parse(request), multirun=False)
    return _compose(request, build_draft).config


def _compose(
    request: ConfigRequest[JobT],
    builder: Callable[..., JobT],
    name: str = "megarl",
    choose: LayoutChooser | None = None,
) -> ComposedRun[JobT]:
    keys, parsed = dict(walk(request.schema)), _without_verls_groups(_parse(request), request)
    problems = [problem for o in parsed if (problem := _override_problem(o, keys, request)) is not None]
    wrong = {problem.path for problem in problems}
    valid = [override for override in parsed if override.key_or_group not in wrong]
    values = _load(request, valid, keys, name)
    try:
        if choose is not None and not problems and values.get("layout") == AUTO:
            fill_layout(request.schema, values, choose, _set_keys(request, valid, keys))
        config = builder(request.schema, _without_hydra(values), overridden={o.key_or_group for o in parsed})
    except InvalidConfigError as error:
        raise InvalidConfigError([*problems, *error.problems]) from error
    if problems:
        raise InvalidConfigError(problems)
    return ComposedRun(config, values)


def fill_layout(schema: type[JobT], values: DictConfig, choose: LayoutChooser, fixed: frozenset[str]) -> None:
    """Set the values of ``layout=auto``, in place.

    Args:
        schema: configuration class of the job.
        values: composed, with or without Hydra's section.
        choose: chooses the values.
        fixed: keys that files or the command line set.

    Raises:
        ConfigError, ModelError: nothing fits, or the values are wrong.
    """
    plain = _without_hydra(values)

    def draft(changes: Changes) -> JobT:
        return build_draft(schema, _updated(copy.deepcopy(plain), changes))

    _updated(values, choose(draft, fixed))


def _updated(values: DictConfig, changes: Changes) -> DictConfig:
    for key, value in changes.items():
        OmegaConf.update(values, key, value, force_add=True)
    return values


def set_keys(request: ConfigRequest[Any]) -> frozenset[str]:
    """Return the keys that files or the command line set, also to the schema's default.

    Args:
        request: of a run, or of a sweep.
    """
    keys, parsed = dict(walk(request.schema)), _without_verls_groups(_parse(request), request)
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    return _set_keys(request, [o for o in parsed if not o.is_sweep_override()], keys).union(swept)


def _set_keys(request: ConfigRequest[Any], overrides: Sequence[Override], keys: dict[str, Key]) -> frozenset[str]:
    values: Any = OmegaConf.to_container(_without_hydra(_load(request, overrides, keys, of_schema=_unset)))
    table = table_of(request.schema)
    return frozenset(table.current_name(path) for path, value in leaves(values) if value != MISSING)


def _unset(schema: type) -> dict[str, Any]:
    """Return the schema's keys without values."""
    unset = OmegaConf.create({})
    for path, value in leaves(defaults(schema)):
        OmegaConf.update(unset, path, {} if isinstance(value, Mapping) else MISSING, force_add=True)
    plain: Any = OmegaConf.to_container(unset)
    return cast(dict[str, Any], plain)


def compose_sweep(request: ConfigRequest[JobT], choose: LayoutChooser | None = None) -> list[JobT]:
    """Compose the configuration of every run of a sweep, in order, to find wrong runs before the first starts.

    For a sweeper that samples values (Optuna), one possible run is composed; the others are checked when they start.

    Raises:
        ConfigError: as :func:`compose`, with the overrides of the wrong run; or two runs write the same path.
    """
    parsed, configs = _parse(request), []
    check_plugins(parsed, multirun=True)
    runs = runs_of(parsed)
    samples = sweeper_of(parsed) != "basic"
    for number, overrides in enumerate(runs * 2 if samples else runs):  # twice, to see the paths that runs share
        try:
            run = ConfigRequest(request.schema, request.config_name, overrides, request.config_dir)
            # as when it starts: files without an explicit path go to the folder of each run
            builder = partial(build, files_root=f"<folder of the sweep>/{number}")
            configs.append(_compose(run, builder, choose=choose).config)
        except InvalidConfigError as error:
            raise InvalidConfigError(error.problems, run=" ".join(overrides)) from error
        except ConfigError as error:
            text = f"In the run of the sweep with {' '.join(overrides)}:\n{error.text}"
            raise ConfigError(text, code=error.code) from error
    check_sweep_outputs(configs)
    return configs[: len(runs)]


def check_run_folder(run: ComposedRun[Any]) -> None:
    """Check that Hydra can create the folder of a run.

    Raises:
        ConfigError: this user may not write there.
    """
    _check_folder("hydra.run.dir", run.values.hydra.run.dir)


def check_sweep_folder(request: ConfigRequest[Any]) -> None:
    """Check that Hydra can create the folder of a sweep.

    Args:
        request: already checked by :func:`compose_sweep`.

    Raises:
        ConfigError: this user may not write there.
    """
    keys, parsed = dict(walk(request.schema)), _without_verls_groups(_parse(request), request)
    values = _load(request, [o for o in parsed if not o.is_sweep_override()], keys)
    _check_folder("hydra.sweep.dir", values.hydra.sweep.dir)


def _check_folder(key: str, folder: str) -> None:
    if problem := write_error(Path(folder)):
        raise ConfigError(
            f"the folder of the run, {folder}, cannot be created ({problem}); start the command in another folder, or "
            f"{WRITABLE}: {key}",
            code="disk.not-writable",
        )


def run_once(
    request: ConfigRequest[Any], run: ComposedRun[Any], name: str, task: Callable[[DictConfig], object]
) -> None:
    """Run a task as Hydra's entry point does, which would compose the configuration twice more.

    Args:
        request: of the run.
        run: its folder is created; Hydra's callbacks are called.
        name: the job's name in Hydra's files.
        task: takes the composed, untyped configuration.
    """
    values = run.values
    with _initialized(request, name):
        callbacks = Callbacks(values)
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
        keep_standard_error_open()
        configure_log(values.hydra.hydra_logging, values.hydra.verbose)
        callbacks.on_run_start(config=values, config_name=_JOB)
        result = run_job(task, values, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=values, config_name=_JOB, job_return=result)
        run_and_report(lambda: result.return_value)  # raises, or prints and exits, if the task failed


def run_sweep(
    request: ConfigRequest[Any], name: str, task: Callable[[DictConfig], float | None], minimize: bool = False
) -> None:
    """Run a task under Hydra once per run of a sweep.

    Args:
        request: already checked by :func:`compose_sweep`.
        name: the job's name in Hydra's files.
        task: takes the composed, untyped configuration; returns the objective.
        minimize: whether the smallest objective is the best.
    """
    keys, parsed = dict(walk(request.schema)), _without_verls_groups(_parse(request), request)
    arguments = [f"hydra.job.name={name}", *(_reachable(override, keys, request) for override in parsed)]
    arguments += sweep_overrides(parsed, minimize)
    _register(request)
    keep_standard_error_open()
    with _arguments([*arguments, "--multirun"]), _sweep_files():
        hydra_main(version_base="1.3", config_path=str(_folders(request)[0]), config_name=_JOB)(task)()


def _parse(request: ConfigRequest[Any]) -> list[Override]:
    return parse_overrides(request.overrides, request.schema)


def _override_problem(override: Override, keys: dict[str, Key], request: ConfigRequest[Any]) -> Problem | None:
    path = override.key_or_group
    groups = table_of(request.schema).groups
    if path in groups and override.value() is not None and not isinstance(override.value(), dict):
        text = f"must be {groups[path]}, as verl's group; keys go below {path}."
        return Problem(path, override.value(), text, code="config.verl-group")
    if path.startswith("hydra.") or "/" in path or override.package is not None or _is_group(path, request):
        return None
    value = override.get_value_string() if override.value_type is not None else None
    free = any(p in keys and keys[p].is_mapping for p in _parents(path))
    if path not in keys and not free and not _is_verl_key(path, request):
        return unknown_key(path, value, list(keys))
    if override.is_sweep_override():
        text = "lists several values: add --multirun for one run each, or write a list as [a,b], a text as \"'a,b'\""
        return Problem(path, value, text, code="config.several-values")
    return None


def _is_group(path: str, request: ConfigRequest[Any]) -> bool:
    return "." not in path and any((folder / path).is_dir() for folder in _folders(request))


def _is_verl_key(path: str, request: ConfigRequest[Any]) -> bool:
    return is_verl_key(request.schema, path)


def _without_verls_groups(overrides: list[Override], request: ConfigRequest[Any]) -> list[Override]:
    """Drop overrides that choose what megarl is: groups of verl's configuration, such as ``engine=megatron``."""
    groups = table_of(request.schema).groups.items()
    return [o for o in overrides if o.is_sweep_override() or (o.key_or_group, o.value()) not in groups]


def _reachable(override: Override, keys: dict[str, Key], request: ConfigRequest[Any]) -> str:
    """The override's text, with ``++`` for keys that Hydra does not know: in a null or free section, or verl's.

    verl's scripts write a plus for keys outside verl's schema; the plus has no meaning for megarl's.
    """
    path, text = override.key_or_group, str(override.input_line)
    if _is_group(path, request) and not isinstance(override.value(), dict):
        return text
    hidden = any(p in keys and (keys[p].is_mapping or keys[p].default is None) for p in _parents(path))
    hidden = hidden or (path in keys and not override.is_sweep_override() and isinstance(override.value(), dict))
    if not (hidden or (path in keys and text.startswith("+")) or (path not in keys and _is_verl_key(path, request))):
        return text
    return f"++{text.lstrip('+')}" if text.lstrip("+").startswith(path) else text


def _parents(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def _load(
    request: ConfigRequest[Any],
    overrides: Sequence[Override],
    keys: dict[str, Key],
    name: str = "megarl",
    of_schema: Callable[[type], Mapping[str, Any]] = defaults,
) -> DictConfig:
    """Compose the values of all keys, and Hydra's section, on top of ``of_schema``'s values."""
    arguments = [f"hydra.job.name={name}"]
    arguments += [_reachable(override, keys, request) for override in overrides]
    _register(request, of_schema)
    try:
        with _initialized(request, name):
            composed: DictConfig = hydra_compose(_JOB, overrides=arguments, return_hydra_config=True)
            return composed
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        text = f"Config '{request.config_name}' cannot be composed. {error}"
        raise ConfigError(text, code="config.cannot-compose") from error


def _initialized(request: ConfigRequest[Any], name: str) -> AbstractContextManager[None]:
    GlobalHydra.instance().clear()
    context: AbstractContextManager[None] = initialize_config_dir(
        str(_folders(request)[0]), job_name=name, version_base="1.3"
    )
    return context


def _without_hydra(values: DictConfig) -> DictConfig:
    plain = copy.deepcopy(values)
    with open_dict(plain):
        plain.pop("hydra", None)
    return plain


def _register(request: ConfigRequest[Any], values: Callable[[type], Mapping[str, Any]] = defaults) -> None:
    """Register the schema's values and the primary config, which puts the user's YAML on top of them."""
    schema: Any = request.schema
    folders = _folders(request)
    _find(request.config_name, folders)
    of_schema = f"{_DEFAULTS}_{schema.__name__}_{values.__name__}"
    primary = {
        # the run writes its log itself; see megarl.base.logs
        "defaults": [of_schema, f"{request.config_name}@_global_", "_self_", {"override hydra/job_logging": "none"}],
        "hydra": {
            "output_subdir": None,  # the run stores these files itself, without secrets
            "searchpath": [f"file://{folder}" for folder in folders[1:]],
            "run": {"dir": _RUN_FOLDER},
            "sweep": {"dir": _RUN_FOLDER, "subdir": "${hydra.job.num}"},
            "callbacks": SWEEP_CALLBACK,
        },
    }
    TextConfigSource.register(schema)
    store = ConfigStore.instance()
    if f"{of_schema}.yaml" not in store.repo:  # storing them takes a tenth of a composition
        store.store(of_schema, values(schema))
    store.store(_JOB, primary)


def _folders(request: ConfigRequest[Any]) -> list[Path]:
    user = [Path(request.config_dir).resolve()] if request.config_dir else []
    if user and not user[0].is_dir():
        raise ConfigError(f"--config-dir={request.config_dir}: no such folder", code="config.no-config-dir")
    return [*user, REPOSITORY_CONFIGS]


def _find(config_name: str, folders: list[Path]) -> None:
    if any((folder / f"{config_name}.yaml").is_file() for folder in folders):
        return
    files = [file.relative_to(folder) for folder in folders for file in folder.rglob("*.yaml")]
    names = sorted(str(file.with_suffix("")) for file in files if file.parts[0] not in (HARDWARE, EXPERIMENT))
    nearest, searched = " or ".join(nearest_keys(config_name, names)), ", ".join(map(str, folders))
    guess = f" Did you mean {nearest}?" if nearest else ""
    raise ConfigError(
        f"--config-name={config_name}: no {config_name}.yaml in {searched}.{guess} There are: {', '.join(names)}",
        code="config.no-config-file",
    )


@contextmanager
def _sweep_files() -> Iterator[None]:
    """Write the files of Hydra's sweepers as files of a run: without secrets, and later if the disk is full."""

    original: Callable[..., None] = OmegaConf.save

    def save(config: Any, f: str | Path | IO[Any], resolve: bool = False) -> None:
        if not isinstance(f, str | Path):
            original(config, f, resolve)
            return
        values = config if isinstance(config, DictConfig) else OmegaConf.create(config)
        RUN_WRITER.replace(Path(f), OmegaConf.to_yaml(redact(OmegaConf.to_container(values, resolve=resolve))))

    OmegaConf.save = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        OmegaConf.save = staticmethod(original)  # type: ignore[method-assign]


@contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv``, which Hydra's entry point reads."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def to_yaml(config: JobConfig) -> str:
    """Render the complete configuration as YAML in its stored form, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(stored_config(config)))
