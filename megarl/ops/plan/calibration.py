"""Calibration: the fraction of the peak speeds that each phase reaches, fitted to measured runs.

A run folder has the configuration, from which the plan computes the cost of each phase, and the measured seconds
(``timing_s/<phase>``). The efficiency of a phase is its cost divided by the median of its seconds; that of several runs
is the geometric mean. It covers what the cost leaves out: narrow products, launches, calls between processes. The
result is a hardware file with ``efficiencies``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import yaml

from megarl.base.atomic_write import atomic_write_text
from megarl.base.errors import ConfigError
from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.config.build import build
from megarl.config.schema.async_training import SYNC
from megarl.ops.plan.estimate import Estimate, estimate
from megarl.ops.plan.hardware import Hardware, hardware_of
from megarl.ops.plan.lengths import Lengths
from megarl.ops.report.run_files import read_run
from megarl.tracking.jsonl_files import METRICS_FILE, MetricsRow

_SUPERVISED: Mapping[str, type[SupervisedConfig]] = {
    "sft": SFTConfig,
    "reward-model": RewardTrainingConfig,
    "preference": PreferenceConfig,
    "dpo": PreferenceConfig,
}
"""Schemas of supervised jobs by the name in ``run.json``."""


class Calibration(NamedTuple):
    """Hardware with fitted efficiencies."""

    hardware: Hardware  # the hardware of the runs
    spread: Mapping[str, float]  # largest efficiency of a run over the smallest, by phase


class MeasuredRun(NamedTuple):
    """A run: its plan with the measured lengths, and measured seconds by phase (medians over its steady steps)."""

    plan: Estimate
    seconds: Mapping[str, float]


def measured_run(folder: Path, hardware_name: str | None = None) -> MeasuredRun:
    """Read the folder of a run and plan its configuration.

    Args:
        folder: folder with ``config.yaml``, ``run.json`` and ``metrics.jsonl``.
        hardware_name: hardware file; None = ``trainer.hardware``.

    Raises:
        ConfigError: a file is missing or invalid, the run was asynchronous, or it has no second step.
        ModelError: a model folder of the run cannot be read.
    """
    record = read_run(folder)
    if record.problems or not record.config:
        reason = "; ".join(record.problems) or "no config.yaml"
        raise ConfigError(f"--calibrate {folder}: no folder of a run: {reason}", code="plan.calibrate-folder")
    rows = [row for row in record.rows if "timing_s/step" in row][1:]
    schema: type[TrainConfig | SupervisedConfig] = _SUPERVISED.get(str(record.facts.get("job")), TrainConfig)
    config = build(schema, record.config)
    if isinstance(config, TrainConfig) and config.async_training.mode != SYNC:
        raise ConfigError(
            f"--calibrate {folder}: async_training.mode={config.async_training.mode}, and its phases overlap; "
            "name runs with async_training.mode=sync",
            code="plan.calibrate-async",
        )
    if not rows:
        raise ConfigError(
            f"--calibrate {folder}: {METRICS_FILE} needs two steps or more; the first does not count",
            code="plan.calibrate-steps",
        )
    plan = estimate(config, replace(hardware_of(config, hardware_name), efficiencies={}), _lengths(config, rows))
    costs = {phase.phase: phase.cost.total for phase in plan.step.phases if phase.cost.total}
    seconds = {phase: _over(rows, f"timing_s/{phase}", statistics.median) for phase in costs}
    if isinstance(config, SupervisedConfig):  # one timer covers all passes: each gets its share of the cost
        update = seconds["update"]
        seconds = {phase: update * cost / sum(costs.values()) for phase, cost in costs.items()}
    return MeasuredRun(plan, {phase: taken for phase, taken in seconds.items() if taken > 0})


def _lengths(config: TrainConfig | SupervisedConfig, rows: Sequence[MetricsRow]) -> Lengths:
    if isinstance(config, SupervisedConfig):
        sequences = config.data.train_batch_size * config.sequences_per_row
        tokens = _over(rows, "perf/total_num_tokens", statistics.mean) / sequences
        return Lengths(0.0, tokens, tokens, "measured")
    names = ("prompt_length/mean", "response_length/mean", "response_length/max")
    prompt, response, longest = (_over(rows, name, statistics.mean) for name in names)
    return Lengths(prompt, response, longest, "measured")


def _over(rows: Sequence[MetricsRow], name: str, statistic: Callable[[list[float]], float]) -> float:
    """Return a statistic of a metric over the steps that have it; 0 if none has."""
    values = [row[name] for row in rows if name in row]
    return statistic(values) if values else 0.0


def fit(runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit the efficiencies of all phases that some run has.

    Raises:
        ConfigError: the runs have different hardware.
    """
    hardware = runs[0].plan.hardware
    if names := {run.plan.hardware.name for run in runs} - {hardware.name}:
        raise ConfigError(
            f"--calibrate: the runs have hardware {', '.join(sorted({hardware.name, *names}))}; calibrate each by "
            "itself, or name one by --hardware",
            code="plan.calibrate-hardware",
        )
    fitted: dict[str, list[float]] = {}
    for run in runs:
        for phase in run.plan.step.phases:
            if phase.phase in run.seconds:
                fitted.setdefault(phase.phase, []).append(phase.cost.total / run.seconds[phase.phase])
    efficiencies = {phase: statistics.geometric_mean(values) for phase, values in fitted.items()}
    spread = {phase: max(values) / min(values) for phase, values in fitted.items()}
    return Calibration(replace(hardware, efficiencies=efficiencies), spread)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a hardware file with the efficiencies."""
    values = asdict(calibration.hardware)
    values["efficiencies"] = {phase: float(f"{share:.3g}") for phase, share in values["efficiencies"].items()}
    atomic_write_text(path, yaml.safe_dump(values, sort_keys=False))
