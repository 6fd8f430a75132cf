"""The command line ``megarl doctor``: of this machine, of all nodes of a cluster, or of a run's saved log-probs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from megarl.doctor.node import Needs, NodeReport, examine, needs_of
from megarl.doctor.node.finding import table
from megarl.errors import ConfigError, MegarlError, ModelError

EXIT_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 2, 130

Everywhere: TypeAlias = Callable[[Needs, str | None], list[NodeReport]]
"""Examines every node of the Ray cluster at an address (None = ``RAY_ADDRESS``), and what is between them."""


def main(argv: Sequence[str] | None = None, everywhere: Everywhere | None = None) -> int:
    """Runs one command.

    Args:
        argv: its arguments; None = those of the process.
        everywhere: what ``--nodes`` does; None = there is no such option.

    Returns:
        The exit code: 0, 1 where a check failed, 2 for a wrong command line or configuration, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["logprobs"]:
        from megarl.doctor import logprobs  # imports torch

        return logprobs.main(arguments[1:])
    options = _parser(everywhere is not None).parse_intermixed_args(arguments)
    try:
        needs = _needs(options)
        reports = everywhere(needs, options.address) if everywhere and options.nodes else [examine(needs)]
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    except MegarlError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.json:
        values = [report.to_json() for report in reports]
        print(json.dumps({"nodes": values} if options.nodes else values[0]))
    else:
        print(table(reports))
    return 0 if all(report.ok for report in reports) else EXIT_FAILED


def _needs(options: argparse.Namespace) -> Needs:
    """What is asked for: by a configuration where one is named, and by options, which win.

    Raises:
        ConfigError: the configuration is wrong.
    """
    needs = Needs()
    if options.config_name is not None:
        from megarl.config import TrainConfig
        from megarl.config.compose import Request, compose

        name = options.config_name.removesuffix(".yaml")
        needs = needs_of(compose(Request(TrainConfig, name, tuple(options.overrides), options.config_dir)))
    elif options.overrides:
        raise ConfigError(f"{options.overrides[0]}: overrides need a --config-name")
    if options.checkpoint_dir is not None:
        needs = replace(needs, checkpoint_dir=options.checkpoint_dir)
    if options.device is not None:
        needs = replace(needs, device=options.device)
    if options.devices is not None:
        needs = replace(needs, devices=options.devices)
    ports = tuple(options.port)
    return replace(needs, ports=ports, peers=tuple(options.peer), quick=options.quick)


def _parser(nodes: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl doctor",
        description="Checks whether this machine, or all nodes of a cluster, have what a run needs, and says what to "
        "do where they do not. `megarl doctor logprobs --help`: why an engine's log-probs are not the actor's.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that differ from the YAML file's")
    parser.add_argument("--config-name", "-cn", help="YAML file of a training run, for what exactly it needs")
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")
    parser.add_argument("--checkpoint-dir", help="folder whose room and speed to look at; default: the configuration's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the configuration's, or auto")
    parser.add_argument("--devices", type=int, help="GPUs, or processes on CPU, per node; default: the configuration's")
    parser.add_argument("--port", type=int, action="append", default=[], help="that must be free; may be repeated")
    parser.add_argument("--peer", action="append", default=[], help="another node, whose name must resolve; repeatable")
    parser.add_argument("--quick", action="store_true", help="without what takes seconds: disk speed, all-reduce")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(nodes=False, address=None)
    if nodes:
        parser.add_argument("--nodes", action="store_true", help="on every node of a Ray cluster, and between them")
        parser.add_argument("--address", help="of the cluster; default: RAY_ADDRESS, or the one on this machine")
    return parser
