"""The command line ``megarl plan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megarl.config import RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.config.compose import Request, compose
from megarl.errors import ConfigError, ModelError
from megarl.plan.estimate import Estimate, estimate
from megarl.plan.hardware import Hardware, hardware_of, known_hardware
from megarl.plan.lengths import Lengths, lengths_of
from megarl.plan.report import as_json, plan_blocks, search_blocks, search_json, show
from megarl.plan.search import search
from megarl.plan.verdict import Remedy, find_remedy

JOBS: dict[str, tuple[type[Any], str]] = {
    "train": (TrainConfig, "ppo"),
    "sft": (SFTConfig, "sft"),
    "reward-model": (RewardTrainingConfig, "reward_model"),
}
"""Jobs that can be planned: their schema, and the configuration where none is named."""
EXIT_DOES_NOT_FIT, EXIT_BAD_CONFIG = 1, 2
DEFAULT_TOP = 10
"""How many layouts a search lists."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plans a configuration, or searches for layouts, and prints what was found.

    Args:
        argv: the command's arguments; None = those of the process.

    Returns:
        The exit code: 0, 1 where nothing fits, 2 for a wrong configuration or command line.
    """
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    if options.top is not None and not options.search:
        parser.error("--top is for --search")
    try:
        config = compose(_request(options))
        hardware = hardware_of(config, options.hardware)
        lengths = lengths_of(config, options.lengths)
        act = _search if options.search else _plan
        return act(options, config, hardware, lengths)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG


def _plan(
    options: argparse.Namespace, config: TrainConfig | SupervisedConfig, hardware: Hardware, lengths: Lengths
) -> int:
    def confirm(remedy: Remedy) -> Estimate:
        other = compose(_request(options, remedy.overrides()))
        return estimate(other, hardware, lengths, with_sync=False)

    found = estimate(config, hardware, lengths)
    remedy = None if found.fits else find_remedy(config, found, confirm)
    if options.json:
        print(as_json(found, remedy))
    else:
        show(plan_blocks(found, remedy), Console())
    return 0 if found.fits else EXIT_DOES_NOT_FIT


def _search(
    options: argparse.Namespace, config: TrainConfig | SupervisedConfig, hardware: Hardware, lengths: Lengths
) -> int:
    found = search(config, hardware, lengths, options.top or DEFAULT_TOP)
    if options.json:
        print(search_json(found))
    else:
        show(search_blocks(found, hardware.name), Console())
    return 0 if found.best else EXIT_DOES_NOT_FIT


def _request(options: argparse.Namespace, more: Sequence[str] = ()) -> Request[Any]:
    schema, config_name = JOBS[options.job]
    name = (options.config_name or config_name).removesuffix(".yaml")
    return Request(schema, name, (*options.overrides, *more), options.config_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl plan",
        description="What a configuration will take before it is started: memory of each device and phase, seconds of "
        "each phase, the weight sync, what limits, and if it does not fit, the smallest change that would. A model "
        "folder needs only its config.json. See docs/plan.md.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that differ from the YAML file's")
    parser.add_argument("--config-name", "-cn", help="YAML file; where none is named ppo, sft or reward_model")
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")
    parser.add_argument("--job", choices=sorted(JOBS), default="train", help="whose configuration it is (train)")
    known = ", ".join(known_hardware())
    parser.add_argument("--hardware", help=f"{known}, or a file of your own; as trainer.hardware where left out")
    parser.add_argument("--lengths", help="of answers: mean=600,max=4096,sigma=0.8, or a file; see docs/plan.md")
    parser.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    parser.add_argument("--top", type=_positive, metavar="N", help=f"of --search: how many to list ({DEFAULT_TOP})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
