"""Hydra sweeps: check plugins, list the runs to check before the start, and record the folder of the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from megarl.base.errors import ConfigError
from megarl.base.packages import is_installed
from megarl.base.provenance import install_command
from megarl.config.problems import nearest_keys

SWEEPER = "hydra/sweeper"
PLUGINS = {
    "hydra/launcher": {
        "basic": "",
        "joblib": "hydra_plugins.hydra_joblib_launcher",
        "submitit_local": "hydra_plugins.hydra_submitit_launcher",
        "submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    },
    SWEEPER: {"basic": "", "optuna": "hydra_plugins.hydra_optuna_sweeper"},
}
"""Launchers and sweepers by name, with the module of the package that provides each."""


class SweepFolder(Callback):
    """Hydra callback that records the folder of the sweep of this process."""

    noted: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the folder; Hydra calls this before the first run."""
        SweepFolder.noted = Path(str(config.hydra.sweep.dir))


SWEEP_CALLBACK = {"sweep_folder": {"_target_": f"{__name__}.{SweepFolder.__name__}"}}


def check_plugins(overrides: Sequence[Override], *, multirun: bool) -> None:
    """Check that the requested launcher and sweeper are known, installed, and used in a sweep.

    Raises:
        ConfigError: with the package to install, or the nearest name.
    """
    for override in overrides:
        plugins = PLUGINS.get(override.key_or_group)
        if plugins is None:
            continue
        name, text = str(override.value()), str(override.input_line)
        if not multirun:
            raise ConfigError(f"{text}: only a sweep uses it; add --multirun", code="config.needs-multirun")
        if name not in plugins:
            guess = " or ".join(nearest_keys(name, list(plugins)))
            hint = f"did you mean {guess}? " if guess else ""
            raise ConfigError(f"{text}: {hint}there are {', '.join(plugins)}", code="config.unknown-sweep-plugin")
        if plugins[name] and not is_installed(plugins[name]):
            package = plugins[name].removeprefix("hydra_plugins.").replace("_", "-")
            raise ConfigError(
                f"{text}: {package} is not installed; {install_command('sweep')} installs it",
                code="config.sweep-not-installed",
            )


def sweeper_of(overrides: Sequence[Override]) -> str:
    """Name of the requested sweeper."""
    names = [str(override.value()) for override in overrides if override.key_or_group == SWEEPER]
    return names[-1] if names else "basic"


def runs_of(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of the runs to check: all, or the first corner if the sweeper samples values.

    Raises:
        ConfigError: the sweeper does not support an override.
    """
    if sweeper_of(overrides) != "basic":
        return [tuple(_corner(override) for override in overrides)]
    intervals = [str(override.input_line) for override in overrides if isinstance(override.value(), IntervalSweep)]
    if intervals:
        raise ConfigError(
            f"{intervals[0]}: values are sampled from an interval by hydra/sweeper=optuna only; list them, or add it",
            code="config.sweep-interval",
        )
    try:
        return [tuple(run) for run in BasicSweeper.split_arguments(list(overrides), None)[0]]
    except HydraException as error:
        raise ConfigError(f"The sweep cannot be read. {error}", code="config.malformed-sweep") from error


def _corner(override: Override) -> str:
    """An override with its first possible value."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        first = override.sweep_string_iterator() if not value.tags else iter([str(value.list[0])])
        return f"{override.get_key_element()}={next(iter(first))}"
    if isinstance(value, RangeSweep | IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return str(override.input_line)


def sweep_overrides(overrides: Sequence[Override], minimize: bool) -> list[str]:
    """Return the overrides to add to a sweep: Optuna's direction, unless set, since its default may be wrong.

    Args:
        overrides: of the sweep.
        minimize: whether the smallest objective is the best.
    """
    is_set = any(override.key_or_group == "hydra.sweeper.direction" for override in overrides)
    if is_set or sweeper_of(overrides) != "optuna":
        return []
    return [f"hydra.sweeper.direction={'minimize' if minimize else 'maximize'}"]
