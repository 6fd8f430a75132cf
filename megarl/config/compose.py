"""Hydra on top of the schema: YAML files and overrides in, a typed configuration or a list of problems out.

The schema's defaults are the first entry of a defaults list that this module builds. A YAML file therefore states only
values that differ, and needs no mention of the schema. Overrides of unknown keys are found before Hydra reads them.
Hydra only composes: the runs of a sweep are composed one by one, and megarl runs them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.base.errors import ConfigError
from megarl.base.files import WRITABLE, write_error
from megarl.config.build import build, build_draft, defaults, unknown_key, verl_notes
from megarl.config.keys import AUTO, Key, leaves, parents, walk
from megarl.config.overrides import TextConfigSource, parse_overrides, reading_files
from megarl.config.problems import InvalidConfigError, Problem, nearest_keys
from megarl.config.schema.jobs import JobConfig, JobT
from megarl.config.stored import check_sweep_outputs, stored_config
from megarl.config.sweeps import FOLDER_KEYS, SweepSettings, is_hydra, runs_of, sweep_settings
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
    """The configuration that a command line requests."""

    schema: type[JobT]
    config_name: str  # YAML file, without its suffix
    overrides: tuple[str, ...] = ()  # in Hydra's syntax, `key=value`
    config_dir: str | None = None  # folder to search before megarl's `configs/`


def compose(request: ConfigRequest[JobT], choose: LayoutChooser | None = None) -> JobT:
    """Compose the typed, complete and checked configuration of a single run.

    Args:
        choose: chooses the values of ``layout=auto``; None = they stay as they are.

    Raises:
        ConfigError: the YAML file is missing or malformed, an override is malformed, or the values are wrong (then an
            ``InvalidConfigError`` with every problem).
    """
    return compose_run(request, choose).config


class ChosenLayout(Protocol):
    """The layout that a planner chose for ``layout=auto``."""

    @property
    def changes(self) -> Mapping[str, Any]:
        """Values by key."""


class ComposedRun(NamedTuple, Generic[JobT]):
    """A run before its start."""

    config: JobT  # typed, complete and checked
    values: DictConfig  # the values it was built from
    overrides: tuple[str, ...]
    folder: Path  # absolute path of the run's folder, which may not exist yet
    notes: list[str]  # one line for each key of a file or override that has another name in megarl, or no effect
    layout: ChosenLayout | None  # the chosen values of `layout=auto`; None without them


class ComposedSweep(NamedTuple, Generic[JobT]):
    """A sweep before its first run."""

    request: ConfigRequest[JobT]
    folder: Path  # of the sweep, with the folders of its runs
    settings: SweepSettings
    runs: list[ComposedRun[JobT]]  # in order; for a search one possible run, as the others depend on results


Changes: TypeAlias = Mapping[str, Any]
LayoutChooser: TypeAlias = Callable[[Callable[[Changes], Any], frozenset[str]], ChosenLayout]
"""Chooses values for ``layout=auto``: from a function that builds the unchecked configuration with changes, and from
the keys that files or the command line set."""


def compose_run(request: ConfigRequest[JobT], choose: LayoutChooser | None = None) -> ComposedRun[JobT]:
    """Compose as :func:`compose`, and return also the values and the folder of the run."""
    sweep_settings(parse_overrides(request.overrides, request.schema), multirun=False)
    return _compose(request, choose)


def _compose(
    request: ConfigRequest[JobT],
    choose: LayoutChooser | None = None,
    place: tuple[Path, int] | None = None,
) -> ComposedRun[JobT]:
    """Compose a run; one of a sweep has a place: the sweep's folder and its number."""
    keys = dict(walk(request.schema))
    parsed = _without_verls_groups(parse_overrides(request.overrides, request.schema), request)
    problems = [problem for o in parsed if (problem := _override_problem(o, keys, request)) is not None]
    wrong, layout = {problem.path for problem in problems}, None
    valid = [override for override in parsed if override.key_or_group not in wrong]
    values, notes = _load(request, valid, keys)
    folder, broken = _pop_folder(values, place)
    overridden, root = {o.key_or_group for o in parsed}, str(folder) if place else None
    try:
        if choose is not None and not problems and values.get("layout") == AUTO:
            layout = fill_layout(request.schema, values, choose, _set_keys(request, valid, keys))
        config = build(request.schema, values, root, overridden)
    except InvalidConfigError as error:
        raise InvalidConfigError([*problems, *error.problems]) from error
    if problems:
        raise InvalidConfigError(problems)
    if broken is not None:
        raise ConfigError(f"the folder of the run has no name. {broken}", code="config.cannot-compose") from broken
    notes += verl_notes(request.schema, values, overridden)
    return ComposedRun(config, values, request.overrides, folder, notes, layout)


def _pop_folder(values: DictConfig, place: tuple[Path, int] | None) -> tuple[Path, OmegaConfBaseException | None]:
    """Remove Hydra's section, and return the folder of the run; it may refer to a value that is not set."""
    if values.hydra.mode == RunMode.MULTIRUN and place is None:
        raise ConfigError("hydra.mode=MULTIRUN: only a sweep uses it; add --multirun", code="config.needs-multirun")
    folder, broken = Path(), None
    try:
        if place is None:
            folder = Path(str(values.hydra.run.dir)).absolute()
        else:
            values.hydra.job.num = place[1]
            folder = (place[0] / str(values.hydra.sweep.subdir)).absolute()
    except OmegaConfBaseException as error:
        broken = error
    with open_dict(values):
        del values["hydra"]
    return folder, broken


def fill_layout(schema: type[JobT], values: DictConfig, choose: LayoutChooser, fixed: frozenset[str]) -> ChosenLayout:
    """Set the values of ``layout=auto`` in place and return them; keys that files or overrides set are ``fixed``.

    Raises:
        ConfigError, ModelError: nothing fits, or the values are wrong.
    """
    plain = copy.deepcopy(values)

    def draft(changes: Changes) -> JobT:
        return build_draft(schema, _updated(copy.deepcopy(plain), changes))

    layout = choose(draft, fixed)
    _updated(values, layout.changes)
    return layout


def _updated(values: DictConfig, changes: Changes) -> DictConfig:
    for key, value in changes.items():
        OmegaConf.update(values, key, value, force_add=True)
    return values


def _set_keys(request: ConfigRequest[Any], overrides: Sequence[Override], keys: dict[str, Key]) -> frozenset[str]:
    composed, _ = _load(request, overrides, keys, _unset)
    with open_dict(composed):
        del composed["hydra"]
    values: Any = OmegaConf.to_container(composed)
    table = table_of(request.schema)
    return frozenset(table.current_name(path) for path, value in leaves(values) if value != MISSING)


def _unset(schema: type) -> dict[str, Any]:
    """Return the schema's keys without values."""

    def without_values(section: Mapping[str, Any]) -> dict[str, Any]:
        return {name: without_values(v) if isinstance(v, Mapping) else MISSING for name, v in section.items()}

    return without_values(defaults(schema))


def compose_sweep(request: ConfigRequest[JobT], choose: LayoutChooser | None = None) -> ComposedSweep[JobT]:
    """Compose every run of a sweep, in order, to find wrong runs before the first starts.

    Raises:
        ConfigError: as :func:`compose`, with the overrides of the wrong run; or two runs write the same path.
    """
    parsed = parse_overrides(request.overrides, request.schema)
    settings = sweep_settings(parsed, multirun=True)
    folder = _sweep_folder(request, [o for o in parsed if not o.is_sweep_override()])
    words = runs_of(parsed, config_folders(request), is_search=settings.search is not None)
    # a search composes one run, twice to see the paths that its runs share
    numbered = enumerate(words if settings.search is None else words * 2)
    sweep = ComposedSweep(request, folder, settings, [])
    runs = [compose_run_of(sweep, overrides, number, choose) for number, overrides in numbered]
    check_sweep_outputs([run.config for run in runs])
    return sweep._replace(runs=runs[: len(words)])


def compose_run_of(
    sweep: ComposedSweep[JobT], overrides: Sequence[str], number: int, choose: LayoutChooser | None = None
) -> ComposedRun[JobT]:
    """Compose one run of a sweep; its files without an explicit path go to its own folder.

    Raises:
        ConfigError: as :func:`compose`, with the overrides of the run.
    """
    request = replace(sweep.request, overrides=tuple(overrides))
    text = " ".join(overrides)
    try:
        return _compose(request, choose, (sweep.folder, number))
    except InvalidConfigError as error:
        raise InvalidConfigError(error.problems, run=text) from error
    except ConfigError as error:
        raise ConfigError(f"In the run of the sweep with {text}:\n{error.text}", code=error.code) from error


def _sweep_folder(request: ConfigRequest[Any], overrides: list[Override]) -> Path:
    """Folder of a sweep, from the values that all its runs share, if they name it."""
    keys, shared = dict(walk(request.schema)), _without_verls_groups(overrides, request)
    valid = [override for override in shared if _override_problem(override, keys, request) is None]
    values, _ = _load(request, valid, keys)
    try:
        return Path(str(values.hydra.sweep.dir))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the folder of the sweep has no name. {error}", code="config.cannot-compose") from error


def check_folder(key: str, folder: Path) -> None:
    """Check that the folder of a run or a sweep can be created.

    Raises:
        ConfigError: this user may not write there.
    """
    if problem := write_error(folder):
        raise ConfigError(
            f"the folder of the run, {folder}, cannot be created ({problem}); start the command in another folder, or "
            f"{WRITABLE}: {key}",
            code="disk.not-writable",
        )


def _override_problem(override: Override, keys: dict[str, Key], request: ConfigRequest[Any]) -> Problem | None:
    path = override.key_or_group
    groups = table_of(request.schema).groups
    if path in groups and override.value() is not None and not isinstance(override.value(), dict):
        text = f"must be {groups[path]}, as verl's group; keys go below {path}."
        return Problem(path, override.value(), text, code="config.verl-group")
    value = override.get_value_string() if override.value_type is not None else None
    if is_hydra(path):
        return None if path in FOLDER_KEYS else unknown_key(path, value, list(FOLDER_KEYS))
    if "/" in path or override.package is not None or _is_group(path, request):
        return None
    free = any(p in keys and keys[p].is_mapping for p in parents(path))
    if path not in keys and not free and not is_verl_key(request.schema, path):
        return unknown_key(path, value, list(keys))
    if override.is_sweep_override():
        text = "lists several values: add --multirun for one run each, or write a list as [a,b], a text as \"'a,b'\""
        return Problem(path, value, text, code="config.several-values")
    return None


def _is_group(path: str, request: ConfigRequest[Any]) -> bool:
    return "." not in path and any((folder / path).is_dir() for folder in config_folders(request))


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
    hidden = any(p in keys and (keys[p].is_mapping or keys[p].default is None) for p in parents(path))
    hidden = hidden or (path in keys and not override.is_sweep_override() and isinstance(override.value(), dict))
    if not (hidden or (text.startswith("+") if path in keys else is_verl_key(request.schema, path))):
        return text
    return f"++{text.lstrip('+')}" if text.lstrip("+").startswith(path) else text


def _load(
    request: ConfigRequest[Any],
    overrides: Sequence[Override],
    keys: dict[str, Key],
    of_schema: Callable[[type], Mapping[str, Any]] = defaults,
) -> tuple[DictConfig, list[str]]:
    """Compose the values of all keys, and Hydra's section, on top of ``of_schema``'s values; with notes on names."""
    arguments = [_reachable(override, keys, request) for override in overrides]
    GlobalHydra.instance().clear()
    try:
        with reading_files(request.schema) as notes, initialize(None, "megarl", version_base="1.3"):
            _register(request, of_schema)
            composed: DictConfig = hydra_compose(_JOB, overrides=arguments, return_hydra_config=True)
            return composed, notes
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        text = f"Config '{request.config_name}' cannot be composed. {error}"
        raise ConfigError(text, code="config.cannot-compose") from error


def _register(request: ConfigRequest[Any], values: Callable[[type], Mapping[str, Any]] = defaults) -> None:
    """Register the schema's values and the primary config, which puts the user's YAML on top of them."""
    schema: Any = request.schema
    folders = config_folders(request)
    _find(request.config_name, folders)
    of_schema = f"{_DEFAULTS}_{schema.__name__}_{values.__name__}"
    primary = {
        "defaults": [of_schema, f"{request.config_name}@_global_", "_self_"],
        "hydra": {
            "searchpath": [f"{TextConfigSource.scheme()}://{folder}" for folder in folders],
            "run": {"dir": _RUN_FOLDER},
            "sweep": {"dir": _RUN_FOLDER, "subdir": "${hydra.job.num}"},
        },
    }
    store = ConfigStore.instance()
    if f"{of_schema}.yaml" not in store.repo:  # storing them takes a tenth of a composition
        store.store(of_schema, values(schema))
    store.store(_JOB, primary)


def config_folders(request: ConfigRequest[Any]) -> list[Path]:
    """Return the folders with YAML files, in the order of the search.

    Raises:
        ConfigError: ``--config-dir`` does not exist.
    """
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


def to_yaml(config: JobConfig) -> str:
    """Render the complete configuration as YAML in its stored form, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(stored_config(config)))
