"""``megarl plan``: plans a configuration, searches for layouts, or calibrates a hardware file by runs.

The efficiency of a phase is its cost at peak speeds over the median of its measured seconds (``timing_s/<phase>``), the
geometric mean over several runs. It covers what the cost leaves out: narrow products, launches, calls between
processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from megarl.base.atomic_write import atomic_write_text
from megarl.base.commands import exit_code
from megarl.base.errors import ConfigError
from megarl.base.formatting import count_noun
from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.config.build import build
from megarl.config.compose import Changes, ConfigRequest, compose
from megarl.config.schema.algorithm import SYNC
from megarl.config.short_flags import add_config_arguments
from megarl.ops.plan.estimate import Estimate, estimate, find_suggestion
from megarl.ops.plan.flops import Lengths, lengths_of
from megarl.ops.plan.hardware import Hardware, hardware_for, hardware_of, known_hardware
from megarl.ops.plan.layout_choice import AutomaticLayout, automatic_layout, layout_lines
from megarl.ops.plan.report import (
    ReportSection,
    plan_json,
    plan_sections,
    print_report,
)
from megarl.ops.plan.search import SearchResult, search, search_json, search_sections
from megarl.ops.report.run_files import NoRunError, find_runs, read_run
from megarl.tracking.jsonl_files import METRICS_FILE, MetricsRow

Job = TrainConfig | SupervisedConfig
JOBS: dict[str, tuple[type[Any], str]] = {
    "train": (TrainConfig, "ppo"),
    "sft": (SFTConfig, "sft"),
    "reward-model": (RewardTrainingConfig, "reward_model"),
    "preference": (PreferenceConfig, "preference"),
}
"""Jobs that can be planned: schema and default configuration."""
EXIT_DOES_NOT_FIT = 1
DEFAULT_TOP = 10  # default number of layouts that a search lists


class Calibration(NamedTuple):
    """Hardware with fitted efficiencies."""

    hardware: Hardware  # the hardware of the runs
    spread: Mapping[str, float]  # largest efficiency of a run over the smallest, by phase


class MeasuredRun(NamedTuple):
    """A run: its plan with the measured lengths, and measured seconds by phase (medians over its steady steps)."""

    plan: Estimate
    seconds: Mapping[str, float]


def measured_run(folder: Path, hardware_name: str | None = None) -> MeasuredRun:
    """Read the folder of a run and plan its configuration for a hardware file, by default ``trainer.hardware``.

    Raises:
        ConfigError: a file is missing or invalid, the run was asynchronous, or it has no second step.
        ModelError: a model folder of the run cannot be read.
    """
    record = read_run(folder)
    if record.problems or not record.config:
        reason = "; ".join(record.problems) or "no config.yaml"
        raise ConfigError(f"--calibrate {folder}: no folder of a run: {reason}", code="plan.calibrate-folder")
    rows = [row for row in record.rows if "timing_s/step" in row][1:]
    job = str(record.facts.get("job"))
    config: Job = build(JOBS.get("preference" if job == "dpo" else job, JOBS["train"])[0], record.config)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a configuration or search for layouts; returns 0, 1 if nothing fits, or 2 for wrong input."""
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    if options.top is not None and not (options.search and options.top > 0):
        parser.error("--top needs --search, and a number of at least 1")
    if options.calibrate and (options.overrides or options.search):
        parser.error("--calibrate takes the configurations of its runs: no KEY=VALUE, no --search")
    action = _calibrate if options.calibrate else _search if options.search else _plan
    return exit_code(lambda: action(options))


def _plan(options: argparse.Namespace) -> int:
    layouts: list[AutomaticLayout] = []

    def choose(build: Callable[[Changes], Any], fixed: frozenset[str]) -> AutomaticLayout:
        layouts.append(automatic_layout(build, fixed, options.hardware))
        return layouts[-1]

    config = compose(_request(options, options.overrides), choose)
    for line in (line for layout in layouts for line in layout_lines(layout)):
        print(line, file=sys.stderr if options.json else sys.stdout)
    hardware = (hardware_for if layouts else hardware_of)(config, options.hardware)
    lengths = lengths_of(config, options.lengths)
    planned = estimate(config, hardware, lengths, with_sync=True)
    suggestion = None if planned.fits else find_suggestion(planned)
    if options.json:
        print(plan_json(planned, suggestion))
    else:
        print_report(plan_sections(planned, suggestion), Console())
    return 0 if planned.fits else EXIT_DOES_NOT_FIT


def _search(options: argparse.Namespace) -> int:
    results: list[SearchResult] = []

    def choose(build: Callable[[Changes], Any], _: frozenset[str]) -> SearchResult:
        config = build({})
        hardware, lengths = hardware_of(config, options.hardware), lengths_of(config, options.lengths)
        results.append(search(config, hardware, lengths, options.top or DEFAULT_TOP))
        return results[0]

    # layout=auto passes on the configuration before the checks that an invalid layout fails
    compose(_request(options, [*options.overrides, "layout=auto"]), choose)
    if options.json:
        print(search_json(results[0]))
    else:
        print_report(search_sections(results[0]), Console())
    return 0 if results[0].best else EXIT_DOES_NOT_FIT


def _request(options: argparse.Namespace, overrides: Sequence[str]) -> ConfigRequest[Any]:
    schema, name = JOBS[options.job]
    return ConfigRequest(schema, options.config_name or name, tuple(overrides), options.config_dir)


def _calibrate(options: argparse.Namespace) -> int:
    try:
        folders = find_runs(options.calibrate)
    except NoRunError as error:
        raise ConfigError(f"--calibrate {error}", code="plan.calibrate-folder") from error
    calibration = fit([measured_run(folder, options.hardware) for folder in folders])
    efficiencies = {phase: float(f"{share:.3g}") for phase, share in calibration.hardware.efficiencies.items()}
    values = asdict(replace(calibration.hardware, efficiencies=efficiencies))
    atomic_write_text(options.out, yaml.safe_dump(values, sort_keys=False))
    lines = [f"{count_noun(len(folders), 'run')}; written to {options.out}, for --hardware {options.out}"]
    rows = [
        [phase, f"{share:.2g}", f"{calibration.spread[phase]:.2f}"]
        for phase, share in calibration.hardware.efficiencies.items()
    ]
    head = ["phase", "fraction of the peak speeds", "largest / smallest of the runs"]
    print_report([ReportSection("Calibration", lines, head, rows)], Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl plan",
        description="Plan a configuration before it starts: memory of each device and phase, FLOPs, weight sync and, "
        "if it does not fit, the smallest change that makes it fit; seconds for hardware that is calibrated by real "
        "runs. A model folder needs only its config.json. See docs/how_to/plan.md.",
    )
    add_config_arguments(parser, "YAML file; default: the job's")
    parser.add_argument("--job", choices=sorted(JOBS), default="train", help="kind of job (default: train)")
    hardware = ", ".join(known_hardware())
    parser.add_argument("--hardware", help=f"{hardware}, or a custom file; default: trainer.hardware")
    parser.add_argument("--lengths", metavar="PROMPT,RESPONSE", help="mean tokens (default: the longest allowed)")
    text = "fit the speed of each phase to the runs in these folders"
    parser.add_argument("--calibrate", nargs="+", type=Path, metavar="RUN", help=text)
    text = "with --calibrate: the hardware file to write"
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("calibrated.yaml"), help=text)
    parser.add_argument("--search", action="store_true", help="find the layouts of the lowest cost that fit")
    parser.add_argument("--top", type=int, metavar="N", help=f"with --search: layouts to list ({DEFAULT_TOP})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
