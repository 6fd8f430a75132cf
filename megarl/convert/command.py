"""Command line of the checkpoint conversion: ``megarl convert`` and ``tools/convert_ckpt.py``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.base.commands import EXIT_FAILED, exit_code
from megarl.base.errors import CheckpointError
from megarl.base.formatting import table_lines
from megarl.base.user_code import import_user_modules
from megarl.convert.comparison import compare, describe
from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import ROLES, open_source
from megarl.convert.source import HUGGING_FACE, MEGARL, PEFT, CheckpointSource

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_KINDS = {"hf-to-megatron": MEGARL, "megatron-to-hf": HUGGING_FACE, "megatron-to-peft": PEFT}


def main(argv: Sequence[str] | None = None, program: str = "megarl convert") -> int:
    """Run one command; returns 0, 1 for an error or a difference, 2 for wrong arguments, 130 after Ctrl-C."""
    arguments = _parser(program).parse_args(argv)

    def run() -> int:
        import_user_modules(*arguments.external_lib)
        code: int = arguments.run(arguments)
        return code

    return exit_code(run, bad_input=(), interrupted="interrupted; run the same command again to resume")


def _convert(arguments: argparse.Namespace) -> int:
    kind = _KINDS[arguments.command]
    source = open_source(arguments.source, arguments.model, arguments.role)
    if kind == MEGARL and source.kind != HUGGING_FACE:
        text = f"{source.path} is a {source.kind} checkpoint already, expected a Hugging Face folder"
        raise CheckpointError(text, code="convert.same-format")
    if kind == HUGGING_FACE and source.kind == HUGGING_FACE:
        text = f"{source.path} is a Hugging Face folder already, expected a Megatron checkpoint"
        raise CheckpointError(text, code="convert.same-format")
    _print_source(source)
    options = ConversionOptions(
        dtype=getattr(torch, arguments.dtype) if arguments.dtype != "auto" else None,
        keep_value_head=arguments.value_head == "keep",
        max_shard_bytes=arguments.max_shard_size,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        restart=arguments.restart,
    )
    outcome = convert(source, arguments.destination, kind, options)
    reused = f", {outcome.reused} of them from the interrupted conversion" if outcome.reused else ""
    print(
        f"{arguments.destination}: {outcome.tensors:,} tensors, {outcome.nbytes / 1e9:,.3f} GB in {outcome.files} "
        f"files{reused}"
    )
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    print(describe_source(open_source(arguments.folder, arguments.model, arguments.role), arguments.tensors))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    pairs = ((arguments.a, arguments.b), (arguments.b, arguments.a))
    first, second = (_open_with_config_of(path, other_path, arguments) for path, other_path in pairs)
    result = compare(first, second, arguments.workers)
    print(describe(result, arguments.a, arguments.b))
    return 0 if result.equal else EXIT_FAILED


def _open_with_config_of(path: Path, other_path: Path, arguments: argparse.Namespace) -> CheckpointSource:
    """Open a checkpoint, with the config of the other one if it has none."""
    try:
        return open_source(path, arguments.model, arguments.role)
    except CheckpointError as error:
        needs_model = error.code in ("convert.unknown-model", "convert.base-model-missing")
        if arguments.model is None and needs_model and (other_path / "config.json").is_file():
            return open_source(path, other_path, arguments.role)
        raise


def _print_source(source: CheckpointSource) -> None:
    print(f"{source.path}: {source.kind}, {source.config.architecture}", file=sys.stderr)
    if source.left_out:
        names = ", ".join(source.left_out[:5]) + (" ..." if len(source.left_out) > 5 else "")
        print(f"not part of the model, skipped: {len(source.left_out)} tensors ({names})", file=sys.stderr)
    if source.carried:
        print(f"carried unchanged, not trained: {_carried(source)}", file=sys.stderr)
    if source.state:
        print(f"not weights, skipped: {', '.join(source.state)}", file=sys.stderr)


def _carried(source: CheckpointSource) -> str:
    folders = {chunk.file.parent for v in source.carried.values() for r in v.regions for chunk in r.stored.chunks}
    return f"{len(source.carried)} tensors of {', '.join(map(str, sorted(folders)))}"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Convert, inspect and compare checkpoints. Needs no GPU and little memory."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = {
        "hf-to-megatron": "Hugging Face folder to a megarl role checkpoint",
        "megatron-to-hf": "checkpoint of megarl or Megatron-Core (torch_dist), or adapters, to a Hugging Face folder",
        "megatron-to-peft": "checkpoint of low-rank adapters (LoRA) to a folder in peft's format",
    }
    for name, text in texts.items():
        command = _command(commands, name, text, _convert)
        command.add_argument("source", type=Path, metavar="SRC", help="folder to read")
        command.add_argument("destination", type=Path, metavar="DST", help="folder to write")
        _add_output_options(command)
    inspect = _command(commands, "inspect", "describe a checkpoint; reads no weights", _inspect)
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = _command(
        commands, "verify", "compare two checkpoints tensor by tensor; exit code 1 if they differ", _verify
    )
    verify.add_argument("a", type=Path, metavar="A")
    verify.add_argument("b", type=Path, metavar="B")
    _add_workers(verify)
    return parser


def _command(commands, name, text, run):  # type: ignore[no-untyped-def]
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    command.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder with config and tokenizer if SRC has none, or base model of adapters",
    )
    command.add_argument(
        "--external-lib",
        action="append",
        default=[],
        metavar="MODULE",
        help="user module that declares the model family, as path.py or package.module; repeatable",
    )
    command.add_argument("--role", choices=ROLES, help="role to read, if the folder has several (default: actor)")
    return command


def _add_output_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights; auto keeps their dtype",
    )
    command.add_argument(
        "--value-head",
        choices=("keep", "strip"),
        default="keep",
        help="keep or remove the scalar head of a critic",
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


def describe_source(source: CheckpointSource, with_tensors: bool = False) -> str:
    """Describe a checkpoint: format, model, tensors, dtypes and size; reads no weights."""
    config = source.config
    formats: Counter[str] = Counter()
    for view in source.tensors.values():
        formats[str(view.dtype).removeprefix("torch.")] += math.prod(view.shape)
    nbytes = sum(view.nbytes for view in source.tensors.values())
    rows = {
        "folder": str(source.path),
        "format": {"megarl": "megarl role", "torch_dist": "Megatron-Core torch_dist"}.get(source.kind, source.kind),
        "model": f"{config.raw['architectures'][0]}, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}",
        "config from": str(source.companions),
        "parameters": f"{sum(formats.values()):,} in {len(source.tensors):,} tensors, {nbytes / 1e9:,.3f} GB",
        "dtypes": ", ".join(f"{name} {count:,}" for name, count in formats.most_common()),
        "head": _head(source),
        "experts": f"{config.experts.count} in {sum(config.experts.layers)} layers" if config.experts else "none",
        "weight files": str(len(source.files())),
        **({"carried unchanged": _carried(source)} if source.carried else {}),
        **{name: str(value) for name, value in source.facts.items()},
        "other state": ", ".join(source.state) or "none",
    }
    lines = table_lines(list(rows.items()))
    lines += [f"not read: {name}" for name in source.left_out]
    for name, view in source.tensors.items() if with_tensors else ():
        lines.append(f"  {name}  {list(view.shape)}  {str(view.dtype).removeprefix('torch.')}")
    return "\n".join(lines)


def _head(source: CheckpointSource) -> str:
    if source.has_value_head:
        return "scalar (value or reward), with bias" if "score.bias" in source.tensors else "scalar (value or reward)"
    if source.lacks:
        return f"none: {' and '.join(source.lacks)} absent"
    return "tied to the embedding" if source.config.tie_word_embeddings else "language model"
