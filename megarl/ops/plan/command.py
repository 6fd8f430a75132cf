"""Command line of ``megarl plan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.base.commands import exit_code
from megarl.base.errors import ConfigError
from megarl.base.formatting import count_noun
from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.config.compose import Changes, ConfigRequest, compose, compose_draft
from megarl.config.schema.async_training import SYNC
from megarl.ops.plan.automatic import AutomaticLayout, automatic_layout, layout_lines
from megarl.ops.plan.calibration import fit, measured_run, write_calibration
from megarl.ops.plan.estimate import Estimate, estimate, overrides_of
from megarl.ops.plan.hardware import Hardware, hardware_for, hardware_of, known_hardware
from megarl.ops.plan.lengths import Lengths, lengths_of
from megarl.ops.plan.report import (
    ReportSection,
    plan_json,
    plan_sections,
    print_report,
    search_json,
    search_sections,
)
from megarl.ops.plan.search import search
from megarl.ops.plan.suggestion import find_suggestion
from megarl.ops.report.run_files import NoRunError, find_runs

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


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a configuration or search for layouts; returns 0, 1 if nothing fits, or 2 for wrong input."""
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    if options.top is not None and not options.search:
        parser.error("--top needs --search")
    if options.calibrate and (options.overrides or options.search):
        parser.error("--calibrate takes the configurations of its runs: no KEY=VALUE, no --search")
    return exit_code(lambda: _calibrate(options) if options.calibrate else _main(options))


def _main(options: argparse.Namespace) -> int:
    layouts: list[AutomaticLayout] = []

    def choose(build: Callable[[Changes], Any], fixed: frozenset[str]) -> AutomaticLayout:
        layouts.append(automatic_layout(build, fixed, options.hardware))
        return layouts[-1]

    config = compose_draft(_request(options)) if options.search else compose(_request(options), choose)
    for line in (line for layout in layouts for line in layout_lines(layout)):
        print(line, file=sys.stderr if options.json else sys.stdout)
    if options.search and isinstance(config, TrainConfig) and config.async_training.mode != SYNC:
        mode = config.async_training.mode
        raise ConfigError(
            f"async_training.mode={mode}: --search covers shared devices only; leave --search out, or set sync",
            code="plan.search-async",
        )
    hardware = (hardware_for if layouts else hardware_of)(config, options.hardware)
    lengths = lengths_of(config, options.lengths)
    action = _search if options.search else _plan
    return action(options, config, hardware, lengths)


def _plan(options: argparse.Namespace, config: Job, hardware: Hardware, lengths: Lengths) -> int:
    def confirm(changes: Changes) -> Estimate:
        return estimate(compose(_request(options, overrides_of(changes))), hardware, lengths)

    planned = estimate(config, hardware, lengths, with_sync=True)
    suggestion = None if planned.fits else find_suggestion(config, planned, confirm)
    if options.json:
        print(plan_json(planned, suggestion))
    else:
        print_report(plan_sections(planned, suggestion), Console())
    return 0 if planned.fits else EXIT_DOES_NOT_FIT


def _search(options: argparse.Namespace, config: Job, hardware: Hardware, lengths: Lengths) -> int:
    result = search(config, hardware, lengths, options.top or DEFAULT_TOP)
    if options.json:
        print(search_json(result))
    else:
        print_report(search_sections(result, hardware.name), Console())
    return 0 if result.best else EXIT_DOES_NOT_FIT


def _calibrate(options: argparse.Namespace) -> int:
    try:
        folders = find_runs(options.calibrate)
    except NoRunError as error:
        raise ConfigError(f"--calibrate {error}", code="plan.calibrate-folder") from error
    calibration = fit([measured_run(folder, options.hardware) for folder in folders])
    write_calibration(calibration, options.out)
    lines = [f"{count_noun(len(folders), 'run')}; written to {options.out}, for --hardware {options.out}"]
    rows = [
        [phase, f"{share:.2g}", f"{calibration.spread[phase]:.2f}"]
        for phase, share in calibration.hardware.efficiencies.items()
    ]
    head = ["phase", "fraction of the peak speeds", "largest / smallest of the runs"]
    print_report([ReportSection("Calibration", lines, head, rows)], Console())
    return 0


def _request(options: argparse.Namespace, extra: Sequence[str] = ()) -> ConfigRequest[Any]:
    schema, config_name = JOBS[options.job]
    name = (options.config_name or config_name).removesuffix(".yaml")
    return ConfigRequest(schema, name, (*options.overrides, *extra), options.config_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl plan",
        description="Plan a configuration before it starts: memory of each device and phase, FLOPs, weight sync and, "
        "if it does not fit, the smallest change that makes it fit; seconds for hardware that is calibrated by real "
        "runs. A model folder needs only its config.json. See docs/how_to/plan.md.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that differ from the YAML file's")
    parser.add_argument("--config-name", "-cn", help="YAML file (default: that of the job)")
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")
    parser.add_argument("--job", choices=sorted(JOBS), default="train", help="kind of job (default: train)")
    hardware = ", ".join(known_hardware())
    parser.add_argument("--hardware", help=f"{hardware}, or a custom file; default: trainer.hardware")
    parser.add_argument("--lengths", metavar="PROMPT,RESPONSE", help="mean tokens (default: the longest allowed)")
    parser.add_argument(
        "--calibrate",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="fit the speed of each phase to the runs in these folders",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("calibrated.yaml"),
        help="with --calibrate: the hardware file to write",
    )
    parser.add_argument("--search", action="store_true", help="find the layouts of the lowest cost that fit")
    parser.add_argument("--top", type=_positive, metavar="N", help=f"with --search: layouts to list ({DEFAULT_TOP})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
