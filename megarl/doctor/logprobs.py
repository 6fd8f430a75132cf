"""The command line ``megarl doctor logprobs``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from megarl.data.rollout_dump import RolloutDump
from megarl.doctor.diagnosis import diagnose
from megarl.doctor.policy import PlainPolicy, retokenized
from megarl.doctor.report import render
from megarl.errors import DataError, MegarlError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: its arguments; None = those of the process.

    Returns:
        The exit code: 0 whatever the verdict is; 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        for path in dump_files(arguments.dumps):
            print(examine(path, arguments.model, arguments.rows, arguments.device), end="\n\n")
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def dump_files(given: Sequence[str]) -> Iterator[Path]:
    """The dumps that the arguments name: files, the ``.npz`` beside a ``.jsonl``, or all of a folder by their steps.

    Raises:
        DataError: one is not there.
    """
    for name in given:
        path = Path(name)
        if path.is_dir():
            files = sorted(path.glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
        else:
            files = [path.with_suffix(".npz") if path.suffix == ".jsonl" else path]
        if not files or not files[0].is_file():
            raise DataError(
                f"{files[0] if files else path / '*.npz'}: there is no such file; trainer.rollout_data_dir has one per "
                "step where actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        yield from files


def examine(path: Path, model: str, rows: int, device: str) -> str:
    """The report of one dump.

    Args:
        path: of the dump.
        model: Hugging Face folder of the weights that the step began with.
        rows: at most so many of its rows are looked at.
        device: where transformers compute.

    Raises:
        DataError, ModelError: the dump or the model cannot be read, or they do not fit.
    """
    dump = _head(RolloutDump.load(path), rows)
    engine, actor = (_written(dump, name) for name in ("rollout_log_probs", "old_log_probs"))
    if len(engine) == 0:
        raise DataError(f"{path} has no generated token")
    temperature = dump.facts.temperature
    rounded = PlainPolicy(model, torch.bfloat16, device).log_probs(dump, [temperature])[0]
    exact = PlainPolicy(model, torch.float32, device)
    in_bfloat16 = (dump.facts.engine_dtype == "bfloat16", dump.facts.actor_dtype == "bfloat16")
    found = diagnose(engine, actor, temperature, lambda each: exact.log_probs(dump, each), rounded, in_bfloat16)
    return render(str(path), dump, found, retokenized(dump, model))


def _head(dump: RolloutDump, rows: int) -> RolloutDump:
    values = {field.name: getattr(dump, field.name) for field in dataclasses.fields(dump)}
    return RolloutDump(**{name: value if name == "facts" else value[:rows] for name, value in values.items()})


def _written(dump: RolloutDump, name: str) -> np.ndarray:
    """What a side says of the generated tokens, row after row."""
    rows: list[np.ndarray] = getattr(dump, name)
    kept = [values[written.astype(bool)] for values, written in zip(rows, dump.generated, strict=True)]
    return np.concatenate(kept).astype(np.float64) if kept else np.zeros(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl doctor logprobs",
        description="Computes the log-probs of saved rollouts again and says why engine and actor differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="<step>.npz or folder of trainer.rollout_data_dir")
    parser.add_argument("--model", required=True, help="Hugging Face folder of the weights that the step began with")
    parser.add_argument("--rows", type=int, default=64, help="rows of each dump to look at")
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda")
    return parser
