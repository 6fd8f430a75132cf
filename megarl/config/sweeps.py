"""What of Hydra a sweep needs: plugins that must be installed, runs to check before they start, the sweep's folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from megarl.config.problems import nearest_keys
from megarl.errors import ConfigError

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
"""Launchers and sweepers by name, with the module of the package that brings each."""


class SweepFolder(Callback):
    """Notes the folder of the sweep that begins in this process; Hydra makes the instance."""

    noted: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before the first run."""
        SweepFolder.noted = Path(str(config.hydra.sweep.dir))


SWEEP_CALLBACK = {"sweep_folder": {"_target_": f"{__name__}.{SweepFolder.__name__}"}}


def check_plugins(overrides: Sequence[Override], *, multirun: bool) -> None:
    """Check that the launcher and the sweeper that are asked for are known, installed, and of use.

    Raises:
        ConfigError: says what to install, or what is near.
    """
    for override in overrides:
        known = PLUGINS.get(override.key_or_group)
        if known is None:
            continue
        name, text = str(override.value()), str(override.input_line)
        if not multirun:
            raise ConfigError(f"{text}: only a sweep has such; add --multirun")
        if name not in known:
            guess = " or ".join(nearest_keys(name, list(known)))
            hint = f"did you mean {guess}? " if guess else ""
            raise ConfigError(f"{text}: {hint}there are {', '.join(known)}")
        if known[name] and not _is_installed(known[name]):
            package = known[name].removeprefix("hydra_plugins.").replace("_", "-")
            raise ConfigError(f"{text}: {package} is not installed; pip install 'megarl[sweep]' has it")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the folder of plugins
        return False


def sweeper_of(overrides: Sequence[Override]) -> str:
    """Name of the sweeper that is asked for."""
    asked = [str(override.value()) for override in overrides if override.key_or_group == SWEEPER]
    return asked[-1] if asked else "basic"


def runs_of(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Overrides of the runs that can be checked before the sweep: all, or of a sweeper that draws, the first corner.

    Raises:
        ConfigError: the sweep asks for what its sweeper cannot do.
    """
    if sweeper_of(overrides) != "basic":
        return [tuple(_corner(override) for override in overrides)]
    drawn = [str(override.input_line) for override in overrides if isinstance(override.value(), IntervalSweep)]
    if drawn:
        raise ConfigError(
            f"{drawn[0]}: values are drawn from an interval by hydra/sweeper=optuna only; list them, or add it"
        )
    try:
        return [tuple(run) for run in BasicSweeper.split_arguments(list(overrides), None)[0]]
    except HydraException as error:
        raise ConfigError(f"The sweep cannot be read. {error}") from error


def _corner(override: Override) -> str:
    """An override with the first of the values that it may take."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        first = override.sweep_string_iterator() if not value.tags else iter([str(value.list[0])])
        return f"{override.get_key_element()}={next(iter(first))}"
    if isinstance(value, RangeSweep | IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return str(override.input_line)


def sweep_overrides(overrides: Sequence[Override], minimize: bool) -> list[str]:
    """What is added to a sweep: Optuna's direction, unless it is given, for its own default would look for the worst.

    Args:
        overrides: of the sweep.
        minimize: whether the smallest value is the best.
    """
    given = any(override.key_or_group == "hydra.sweeper.direction" for override in overrides)
    if given or sweeper_of(overrides) != "optuna":
        return []
    return [f"hydra.sweeper.direction={'minimize' if minimize else 'maximize'}"]
