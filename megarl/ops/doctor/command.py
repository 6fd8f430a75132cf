"""``megarl doctor``: check this machine, all nodes of a cluster, or the log-probs of saved rollouts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from megarl.base.commands import EXIT_FAILED, exit_code
from megarl.base.errors import ConfigError
from megarl.config.short_flags import add_config_arguments
from megarl.ops.doctor.node import Needs, check_node, needs_of
from megarl.ops.doctor.node.results import reports_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if a check failed, 2 for wrong input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["logprobs"]:
        from megarl.ops.doctor import logprobs  # imports torch

        return logprobs.main(arguments[1:])
    if arguments[:1] == ["--accept"]:
        from megarl.ops.acceptance import command

        return command.main(arguments[1:])
    return exit_code(lambda: _check(_parser().parse_intermixed_args(arguments)))


def _check(options: argparse.Namespace) -> int:
    needs = _needs(options)
    if options.nodes:
        from megarl.ops.doctor.cluster import check_cluster  # imports Ray

        reports = check_cluster(needs, options.address)
    else:
        reports = [check_node(needs)]
    if options.json:
        values = [report.to_json() for report in reports]
        print(json.dumps({"nodes": values} if options.nodes else values[0]))
    else:
        print(reports_table(reports))
    return 0 if all(report.ok for report in reports) else EXIT_FAILED


def _needs(options: argparse.Namespace) -> Needs:
    """Requirements from the configuration, if one is named, and from options, which take precedence."""
    needs = Needs()
    if options.config_name is not None:
        from megarl.config import TrainConfig
        from megarl.config.compose import ConfigRequest, compose

        request = ConfigRequest(TrainConfig, options.config_name, tuple(options.overrides), options.config_dir)
        needs = needs_of(compose(request))
    elif options.overrides:
        raise ConfigError(f"{options.overrides[0]}: overrides need a --config-name", code="doctor.no-config-name")
    named = {name: getattr(options, name) for name in ("checkpoint_dir", "device", "devices")}
    named = {name: value for name, value in named.items() if value is not None}
    return replace(needs, ports=tuple(options.port), peers=tuple(options.peer), quick=options.quick, **named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl doctor",
        description="Check whether this machine, or every node of a cluster, is ready for a run, with a remedy for "
        "each failed check. `megarl doctor --accept --help`: run megarl's parts on this machine's GPU. `megarl doctor "
        "logprobs --help`: why the log-probs of engine and actor differ.",
    )
    add_config_arguments(parser, "YAML file of a training run, whose requirements are checked")
    parser.add_argument("--checkpoint-dir", help="folder to check for space and speed; default: the configuration's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the configuration's, or auto")
    parser.add_argument("--devices", type=int, help="GPUs, or processes on CPU, per node; default: the configuration's")
    parser.add_argument("--port", type=int, action="append", default=[], help="port that must be free; repeatable")
    parser.add_argument("--peer", action="append", default=[], help="node name that must resolve; repeatable")
    parser.add_argument("--quick", action="store_true", help="skip the slow checks: disk speed, all-reduce")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--nodes", action="store_true", help="check every node of a Ray cluster, and between nodes")
    parser.add_argument("--address", help="address of the cluster; default: RAY_ADDRESS, or a cluster here")
    return parser
