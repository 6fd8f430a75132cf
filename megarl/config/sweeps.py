"""Sweeps: how the runs are chosen and started, and the overrides of each run.

The keys have the names of Hydra's launchers and of its sweeper for Optuna.
"""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from megarl.base.errors import ConfigError
from megarl.base.packages import is_installed
from megarl.base.provenance import install_command
from megarl.config.build import read
from megarl.config.keys import key, section
from megarl.config.problems import nearest_keys

FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode")
"""Hydra's keys that a run reads."""
_SWEEPER, _LAUNCHER = "hydra/sweeper", "hydra/launcher"
_PACKAGES = {
    _SWEEPER: {"basic": "", "optuna": "optuna"},
    _LAUNCHER: {"basic": "", "submitit_local": "submitit", "submitit_slurm": "submitit"},
}
"""Choices with the package that each needs."""
_OF_SWEEPS = (_SWEEPER, _LAUNCHER, "hydra.sweeper.", "hydra.launcher.")


@dataclass(frozen=True)
class SamplerKeys:
    """Optuna's sampler, a tree-structured Parzen estimator."""

    seed: int | None = key(None, "Seed of the sampler.")


@dataclass(frozen=True)
class SearchKeys:
    """Search by Optuna, ``hydra/sweeper=optuna``."""

    n_trials: int = key(20, "Runs.", at_least=1)
    n_jobs: int = key(1, "Runs at the same time, with a launcher.", at_least=1)
    direction: str | None = key(None, "null = that of the objective.", choices=("minimize", "maximize"))
    storage: str | None = key(None, "Address of the study's database; null = the study ends with the command.")
    study_name: str | None = key(None, "Study in the database to continue, or a new one.")
    sampler: SamplerKeys = section(SamplerKeys)


@dataclass(frozen=True)
class _HydraSection:
    sweeper: SearchKeys = section(SearchKeys)
    launcher: dict[str, Any] = key({}, "Parameters of submitit.")


@dataclass(frozen=True)
class _HydraKeys:
    hydra: _HydraSection = section(_HydraSection)


class SweepSettings(NamedTuple):
    """How the runs of a sweep are chosen and started."""

    search: SearchKeys | None = None  # the search by Optuna; None = all combinations of values
    cluster: str | None = None  # submitit's, `local` or `slurm`; None = the runs follow each other in this process
    parameters: Mapping[str, Any] = {}  # of submitit


def is_hydra(override: str) -> bool:
    """Whether an override, or its key, is Hydra's."""
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


def of_job(overrides: Iterable[str]) -> list[str]:
    """Return the overrides of the job's own keys."""
    return [override for override in overrides if not is_hydra(override)]


def sweep_settings(overrides: Sequence[Override], *, multirun: bool) -> SweepSettings:
    """Read the settings of a sweep from Hydra's keys on the command line.

    Raises:
        ConfigError: a key or its value is wrong, needs a package, or needs a sweep.
    """
    values: DictConfig = OmegaConf.create({})
    names = {_SWEEPER: "basic", _LAUNCHER: "basic"}
    for override in overrides:
        path, text = override.key_or_group, str(override.input_line)
        if not is_hydra(path) or (path in FOLDER_KEYS and not override.is_sweep_override()):
            continue
        if override.is_sweep_override():
            raise ConfigError(f"{text}: all runs have one value of this key", code="config.sweep-over-hydra")
        if not multirun and path.startswith(_OF_SWEEPS):
            raise ConfigError(f"{text}: only a sweep uses it; add --multirun", code="config.needs-multirun")
        if "/" in path:
            names[path] = _choice(path, str(override.value()), text)
        else:
            OmegaConf.update(values, path, override.value(), force_add=True)
    if not multirun:
        return SweepSettings()
    keys: _HydraKeys = read(_HydraKeys, cast(dict[str, Any], OmegaConf.to_container(values)))
    search = keys.hydra.sweeper if names[_SWEEPER] == "optuna" else None
    cluster = names[_LAUNCHER].removeprefix("submitit_") if names[_LAUNCHER] != "basic" else None
    return SweepSettings(search, cluster, keys.hydra.launcher)


def _choice(path: str, name: str, text: str) -> str:
    packages = _PACKAGES.get(path)
    if packages is None:
        raise ConfigError(f"{text}: there are {' and '.join(_PACKAGES)}", code="config.unknown-sweep-plugin")
    if name == "joblib":
        raise ConfigError(
            f"{text}: joblib is not supported; {path}=submitit_local starts the runs in processes on this machine",
            code="config.no-joblib",
        )
    if name not in packages:
        guess = " or ".join(nearest_keys(name, list(packages)))
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(f"{text}: {hint}there are {', '.join(packages)}", code="config.unknown-sweep-plugin")
    if packages[name] and not is_installed(packages[name]):
        raise ConfigError(
            f"{text}: {packages[name]} is not installed; {install_command('sweep')} installs it",
            code="config.sweep-not-installed",
        )
    return name


def runs_of(overrides: Sequence[Override], folders: Sequence[Path], *, is_search: bool) -> list[tuple[str, ...]]:
    """Return the overrides of each run: all combinations of values, or for a search the first values.

    ``folders`` have the YAML files that ``glob`` matches.

    Raises:
        ConfigError: an interval without a search, or a pattern without a file.
    """
    words = [list(_words(o, folders, is_search)) for o in overrides if not is_hydra(o.key_or_group)]
    hydra = [str(o.input_line) for o in overrides if o.key_or_group in FOLDER_KEYS]
    return [(*run, *hydra) for run in itertools.product(*(some[:1] if is_search else some for some in words))]


def _words(override: Override, folders: Sequence[Path], is_search: bool) -> Iterator[str]:
    value, text = override.value(), str(override.input_line)
    if not override.is_sweep_override():
        yield text
    elif isinstance(value, IntervalSweep):
        if not is_search:
            raise ConfigError(
                f"{text}: values are sampled from an interval by hydra/sweeper=optuna only; list them, or add it",
                code="config.sweep-interval",
            )
        yield f"{override.get_key_element()}={value.start}"
    else:
        texts = texts_of(override, folders)
        if not texts:
            raise ConfigError(f"{text}: there is no such value", code="config.malformed-sweep")
        yield from (f"{override.get_key_element()}={text}" for text in texts)


def texts_of(override: Override, folders: Sequence[Path]) -> list[str]:
    """Return the values that an override lists (no interval), as texts; ``glob`` matches YAML files in ``folders``."""
    value = override.value()
    if isinstance(value, Glob):
        files = [file for folder in folders for file in folder.joinpath(override.key_or_group).glob("*.yaml")]
        return list(value.filter(sorted({file.stem for file in files})))
    return list(override.sweep_string_iterator())
