"""The command line of the conversion: ``megarl convert`` and ``tools/convert_ckpt.py``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.convert.comparison import compare, describe
from megarl.convert.conversion import Options, convert
from megarl.convert.inspection import describe_source
from megarl.convert.open import ROLES, open_source
from megarl.convert.source import HUGGING_FACE, MEGARL, Source
from megarl.errors import CheckpointError, MegarlError
from megarl.own_module import import_own

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_KINDS = {"hf-to-megatron": MEGARL, "megatron-to-hf": HUGGING_FACE}


def main(argv: Sequence[str] | None = None, program: str = "megarl convert") -> int:
    """Runs one command.

    Args:
        argv: its arguments; None = those of the process.
        program: its name in the help.

    Returns:
        The exit code: 0; 1 for an error or checkpoints that differ; 2 for a wrong command line; 130 after Ctrl-C.
    """
    arguments = _parser(program).parse_args(argv)
    try:
        import_own(*arguments.external_lib)
        code: int = arguments.run(arguments)
        return code
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def _convert(arguments: argparse.Namespace) -> int:
    kind = _KINDS[arguments.command]
    source = open_source(arguments.source, arguments.model, arguments.role)
    if kind == MEGARL and source.kind != HUGGING_FACE:
        raise CheckpointError(f"{source.path} is a {source.kind} checkpoint already, expected a Hugging Face folder")
    if kind == HUGGING_FACE and source.kind == HUGGING_FACE:
        raise CheckpointError(f"{source.path} is a Hugging Face folder already, expected a Megatron checkpoint")
    _tell(source)
    options = Options(
        dtype=getattr(torch, arguments.dtype) if arguments.dtype != "auto" else None,
        keep_value_head=arguments.value_head == "keep",
        max_shard_bytes=arguments.max_shard_size,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        restart=arguments.restart,
    )
    outcome = convert(source, arguments.destination, kind, options)
    again = f", {outcome.reused} of them from the interrupted conversion" if outcome.reused else ""
    print(
        f"{arguments.destination}: {outcome.tensors:,} tensors, {outcome.nbytes / 1e9:,.3f} GB in {outcome.files} "
        f"files{again}"
    )
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    print(describe_source(open_source(arguments.folder, arguments.model, arguments.role), arguments.tensors))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    sources: list[Source] = []
    for path, other in ((arguments.a, arguments.b), (arguments.b, arguments.a)):
        sources.append(_open_beside(path, other, arguments))
    result = compare(sources[0], sources[1], arguments.workers)
    print(describe(result, arguments.a, arguments.b))
    return 0 if result.equal else EXIT_FAILED


def _open_beside(path: Path, other: Path, arguments: argparse.Namespace) -> Source:
    """Opens a checkpoint, by the other one's config where it has none."""
    try:
        return open_source(path, arguments.model, arguments.role)
    except CheckpointError as error:
        if arguments.model is None and "--model" in str(error) and (other / "config.json").is_file():
            return open_source(path, other, arguments.role)
        raise


def _tell(source: Source) -> None:
    print(f"{source.path}: {source.kind}, {source.config.architecture}", file=sys.stderr)
    if source.left_out:
        shown = ", ".join(source.left_out[:5]) + (" ..." if len(source.left_out) > 5 else "")
        print(f"not part of the model, left out: {len(source.left_out)} tensors ({shown})", file=sys.stderr)
    if source.state:
        print(f"not weights, left out: {', '.join(source.state)}", file=sys.stderr)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Converts, inspects and compares checkpoints. Needs no GPU and little memory."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = {
        "hf-to-megatron": "Hugging Face folder to megarl's checkpoint of a role",
        "megatron-to-hf": "checkpoint of megarl's, or of Megatron-Core (torch_dist), to a Hugging Face folder",
    }
    for name, text in texts.items():
        command = _command(commands, name, text, _convert)
        command.add_argument("source", type=Path, metavar="SRC", help="folder to read")
        command.add_argument("destination", type=Path, metavar="DST", help="folder to make")
        _add_output_options(command)
    inspect = _command(commands, "inspect", "tell what a checkpoint holds; reads no weights", _inspect)
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = _command(commands, "verify", "compare two checkpoints tensor by tensor; 1 if they differ", _verify)
    verify.add_argument("a", type=Path, metavar="A")
    verify.add_argument("b", type=Path, metavar="B")
    _add_workers(verify)
    return parser


def _command(commands, name, text, run):  # type: ignore[no-untyped-def]
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    command.add_argument(
        "--model", type=Path, metavar="FOLDER", help="Hugging Face folder with config and tokenizer, if SRC has none"
    )
    command.add_argument(
        "--external-lib",
        action="append",
        default=[],
        metavar="MODULE",
        help="module of your own that declares the model's family, as path.py or package.module; repeatable",
    )
    command.add_argument("--role", choices=ROLES, help="whose checkpoint, where there are several (the actor's)")
    return command


def _add_output_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number format of the weights; auto keeps theirs",
    )
    command.add_argument(
        "--value-head",
        choices=("keep", "strip"),
        default="keep",
        help="what becomes of a critic's scalar head",
    )
    command.add_argument(
        "--max-shard-size", type=_size, default=5 * 10**9, metavar="SIZE", help="largest file, such as 5GB (default)"
    )
    _add_workers(command)
    command.add_argument("--overwrite", action="store_true", help="replace DST when the new one is complete")
    command.add_argument("--restart", action="store_true", help="discard what an interrupted conversion finished")


def _add_workers(command: argparse.ArgumentParser) -> None:
    default = min(8, len(os.sched_getaffinity(0)))
    command.add_argument(
        "--workers", type=_count, default=default, metavar="N", help=f"threads that read and write (default {default})"
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB or 1GiB")
    return int(float(match[1]) * unit)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
