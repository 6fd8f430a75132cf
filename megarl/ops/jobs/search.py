"""Search of values by Optuna: it suggests the overrides of runs, and learns their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optuna
import yaml
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from megarl.base.run_writer import RUN_WRITER
from megarl.config.compose import ComposedSweep, config_folders
from megarl.config.overrides import parse_overrides
from megarl.config.sweeps import FOLDER_KEYS, is_hydra, texts_of
from megarl.tracking.sweep import RunResult

BEST_FILE = "optimization_results.yaml"


def run_search(
    sweep: ComposedSweep[Any], minimize: bool, start: Callable[[Sequence[Sequence[str]]], list[RunResult]]
) -> None:
    """Run the trials of a study by ``start``, which takes overrides and returns results; write the best one.

    The smallest objective is the best with ``minimize``, unless ``direction`` is set.
    """
    keys, request = sweep.settings.search, sweep.request
    assert keys is not None
    words = parse_overrides(request.overrides, request.schema)
    parsed = [o for o in words if not is_hydra(o.key_or_group) or o.key_or_group in FOLDER_KEYS]  # of the runs
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    space = {o.get_key_element(): _distribution(o, sweep) for o in parsed if o.is_sweep_override()}
    study = optuna.create_study(
        storage=keys.storage,
        sampler=optuna.samplers.TPESampler(seed=keys.sampler.seed),
        study_name=keys.study_name,
        direction=keys.direction or ("minimize" if minimize else "maximize"),
        load_if_exists=True,
    )
    for done in range(0, keys.n_trials, keys.n_jobs):
        trials = [study.ask(space) for _ in range(min(keys.n_jobs, keys.n_trials - done))]
        runs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
        for trial, result in zip(trials, start(runs), strict=True):
            failed = result.value is None  # the sampler ignores it
            study.tell(trial, result.value, TrialState.FAIL if failed else None)
    if any(trial.state == TrialState.COMPLETE for trial in study.trials):
        best = {"name": "optuna", "best_params": study.best_params, "best_value": study.best_value}
        RUN_WRITER.replace(sweep.folder / BEST_FILE, yaml.safe_dump(best, sort_keys=False))


def _distribution(override: Override, sweep: ComposedSweep[Any]) -> BaseDistribution:
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        numbers, options = [value.start, value.end], {"log": "log" in value.tags}
    elif isinstance(value, RangeSweep) and not value.shuffle and value.step > 0:
        numbers, options = list(value.range()), {"step": value.step}
    else:
        assert isinstance(value, ChoiceSweep | Glob | RangeSweep)
        return CategoricalDistribution(texts_of(override, config_folders(sweep.request)))
    if all(isinstance(number, int) for number in numbers):
        return IntDistribution(numbers[0], numbers[-1], **options)
    return FloatDistribution(float(numbers[0]), float(numbers[-1]), **options)
