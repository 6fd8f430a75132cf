"""Convert the original files of GSM8K, MATH, NQ and HotpotQA to parquet rows; see docs/how_to/data.md.

An :class:`Origin` describes the original files of a data set, and the rows are in verl's schema.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.base.boxes import last_box
from megarl.base.errors import DataError, MegarlError
from megarl.base.json_text import parse_json

Row = dict[str, Any]
SPLITS = ("train", "test")
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d.,]+)")
_MATH_LEVEL = re.compile(r"Level (\d+)")
_GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
_NQ_URL = "https://raw.githubusercontent.com/google-research-datasets/natural-questions/master/nq_open"
_HOTPOTQA_URL = "http://curtis.ml.cmu.edu/datasets/hotpot"
_ANSWER_FIELDS = ("golden_answers", "answer")
"""Fields of the answers: in Search-R1's files, and in the original files."""


@dataclass(frozen=True)
class Wording:
    """Prompt template of a data set's questions.

    Attributes:
        instruction: text that accompanies the question.
        before: whether it precedes the question, separated by a space; otherwise it follows.
        system_prompt: first message; None = no system message.
    """

    instruction: str = ""
    before: bool = False
    system_prompt: str | None = None

    def prompt(self, question: str) -> list[dict[str, str]]:
        """Build the chat messages of a question."""
        parts = (self.instruction, question) if self.before else (question, self.instruction)
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return [*system, {"role": "user", "content": " ".join(part for part in parts if part)}]


@dataclass(frozen=True)
class Origin:
    """Source files of a data set, and the conversion of their entries to rows.

    Attributes:
        data_source: name for reward functions and metrics; the same as verl's.
        ability: kind of task.
        wording: default prompt template.
        entries: iterates over the entries of a path, each with its location.
        convert: converts an entry to ``question``, ``ground_truth``, and further fields of ``extra_info``; raises
            KeyError, TypeError or ValueError for a malformed entry.
        urls: download addresses of the original files by split, if they can be downloaded directly.
    """

    data_source: str
    ability: str
    wording: Wording
    entries: Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]
    convert: Callable[[Mapping[str, Any]], Row]
    urls: Mapping[str, str]


def rows_of(origin: Origin, files: Iterable[str | Path], split: str, wording: Wording | None = None) -> list[Row]:
    """Convert original files to rows in verl's schema, numbered over all files.

    Args:
        origin: description of the data set.
        files: original files, or folders for a data set of folders.
        split: name of the split, written into each row.
        wording: prompt template; None = the data set's default.

    Raises:
        DataError: a file is missing or an entry is malformed; names it.
    """
    template, rows = wording or origin.wording, list[Row]()
    for file in files:
        for location, entry in origin.entries(Path(file).expanduser()):
            try:
                fields = origin.convert(entry)
                question, truth = str(fields.pop("question")), fields.pop("ground_truth")
            except (KeyError, TypeError, ValueError) as error:
                text = f"{location} is no entry of {origin.data_source}: {error!r}"
                raise DataError(text, code="data.entry-malformed") from error
            rows.append(
                {
                    "data_source": origin.data_source,
                    "prompt": template.prompt(question),
                    "ability": origin.ability,
                    "reward_model": {"style": "rule", "ground_truth": truth},
                    "extra_info": {"split": split, "index": len(rows), "question": question, **fields},
                }
            )
    if not rows:
        raise DataError(f"{', '.join(map(str, files)) or split}: there is no entry", code="data.no-rows")
    return rows


def write_parquet(rows: list[Row], path: Path) -> None:
    """Write rows as a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def file_entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the entries of a JSON-lines, JSON-list or parquet file, with their locations."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", code="data.file-missing")
    if path.suffix == ".parquet":
        return _numbered(path, pq.read_table(path).to_pylist())
    with path.open("rb") as file:
        is_list = file.read(256).lstrip().startswith(b"[")
    return _numbered(path, _parse_json(path, path.read_bytes())) if is_list else _lines(path)


def math_entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the entries of a split's folder (``<subject>/<number>.json``), or of a file."""
    if not path.is_dir():
        yield from file_entries(path)
        return
    for file in sorted(path.glob("*/*.json"), key=lambda file: (file.parent.name, int(file.stem), file.name)):
        yield str(file), _parse_json(file, file.read_bytes())


def _numbered(path: Path, entries: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, entry in enumerate(entries):
        yield f"{path}, entry {number}", entry


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                location = f"{path}, line {number}"
                yield location, _parse_json(location, line)


def _parse_json(location: Path | str, text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{location} is not JSON ({error})", code="data.not-json") from error


def gsm8k_entry(entry: Mapping[str, Any]) -> Row:
    """Convert ``question`` and ``answer``; the ground truth is the number after ``####``, without separators."""
    match = _GSM8K_ANSWER.search(entry["answer"])
    if match is None:
        raise ValueError("its answer has no number after ####")
    truth = match.group(1).replace(",", "")
    return {"question": entry["question"], "ground_truth": truth, "answer": entry["answer"]}


def math_entry(entry: Mapping[str, Any]) -> Row:
    """Convert ``problem`` and ``solution``; the ground truth is the content of the last ``\\boxed{...}``.

    ``difficulty`` is the number in ``level``, 0 without one.
    """
    level = _MATH_LEVEL.search(entry.get("level") or "")
    return {
        "question": entry["problem"],
        "ground_truth": boxed_ground_truth(entry["solution"]),
        "answer": entry["solution"],
        "difficulty": int(level.group(1)) if level else 0,
        "subject": entry.get("type") or "",
    }


def boxed_ground_truth(solution: str) -> str:
    """Return the content of the last box of a solution.

    Raises:
        ValueError: the solution has no box, or its braces do not match.
    """
    answer = last_box(solution)
    if answer is None:
        raise ValueError(r"its solution has no \boxed answer with matching braces")
    return answer


def question_entry(entry: Mapping[str, Any]) -> Row:
    """Convert ``question`` with ``golden_answers`` or ``answer``, a text or a list of accepted texts.

    The ground truth is ``{"target": [texts]}``; a question mark is added to a question without one.
    """
    answers = next((entry[name] for name in _ANSWER_FIELDS if entry.get(name) is not None), None)
    if answers is None:
        raise KeyError(_ANSWER_FIELDS)
    target = [answers] if isinstance(answers, str) else [str(answer) for answer in answers]
    if not target:
        raise ValueError("it has no answer")
    question = entry["question"].strip()
    return {
        "question": question if question.endswith("?") else f"{question}?",
        "ground_truth": {"target": target},
        "level": str(entry.get("level") or ""),
        "type": str(entry.get("type") or ""),
    }


GSM8K = Origin(
    data_source="openai/gsm8k",
    ability="math",
    wording=Wording('Think step by step, and give the final answer behind "####".'),
    entries=file_entries,
    convert=gsm8k_entry,
    urls={"train": f"{_GSM8K_URL}/train.jsonl", "test": f"{_GSM8K_URL}/test.jsonl"},
)
MATH = Origin(
    data_source="DigitalLearningGmbH/MATH-lighteval",
    ability="math",
    wording=Wording(r"Think step by step, and give the final answer in \boxed{}."),
    entries=math_entries,
    convert=math_entry,
    urls={},
)
_SEARCH_WORDING = Wording(
    "Answer the question below. Before each step, reason between <think> and </think>. If you lack knowledge, search "
    "for it with <search> query </search>; what is found comes back between <information> and </information>, and you "
    "may search as often as you like. Once you know the answer, give it between <answer> and </answer>, as short as it "
    "can be. Question:",
    before=True,
)
NQ = Origin(
    data_source="nq",
    ability="fact-reasoning",
    wording=_SEARCH_WORDING,
    entries=file_entries,
    convert=question_entry,
    urls={"train": f"{_NQ_URL}/NQ-open.train.jsonl", "test": f"{_NQ_URL}/NQ-open.dev.jsonl"},
)
HOTPOTQA = Origin(
    data_source="hotpotqa",
    ability="fact-reasoning",
    wording=_SEARCH_WORDING,
    entries=file_entries,
    convert=question_entry,
    urls={
        "train": f"{_HOTPOTQA_URL}/hotpot_train_v1.1.json",
        "test": f"{_HOTPOTQA_URL}/hotpot_dev_distractor_v1.json",
    },
)
ORIGINS = {"gsm8k": GSM8K, "math": MATH, "nq": NQ, "hotpotqa": HOTPOTQA}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        written = prepare(ORIGINS[options.data_set], options)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(written))
    return 0


def prepare(origin: Origin, options: argparse.Namespace) -> dict[str, int]:
    """Write the requested splits; return the number of rows of each file.

    Raises:
        DataError: no file is named, a file is missing, or an entry is malformed.
    """
    files = {split: list(getattr(options, split)) for split in SPLITS}
    if options.download:
        files |= {split: [_download(origin, split, options.out)] for split in SPLITS if not files[split]}
    if not any(files.values()):
        raise DataError("name files with --train and --test, or use --download", code="data.no-file-named")
    wording = _wording(origin.wording, options)
    written = {}
    for split, paths in files.items():
        if paths:
            output = options.out / f"{split}.parquet"
            rows = rows_of(origin, paths, split, wording)
            write_parquet(rows, output)
            written[str(output)] = len(rows)
    return written


def _wording(default: Wording, options: argparse.Namespace) -> Wording:
    instruction = default.instruction if options.instruction is None else options.instruction
    return dataclasses.replace(default, instruction=instruction, system_prompt=options.system_prompt)


def _download(origin: Origin, split: str, out: Path) -> Path:
    """Download the original file of a split unless it exists.

    Raises:
        DataError: the file cannot be downloaded.
    """
    if split not in origin.urls:
        raise DataError(f"{origin.data_source} has no download; name files with --{split}", code="data.no-download")
    url = origin.urls[split]
    target = out / "original" / url.rpartition("/")[2]
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        try:
            with urllib.request.urlopen(url, timeout=60) as source, unfinished.open("wb") as file:  # noqa: S310 - from a table
                shutil.copyfileobj(source, file)
        except OSError as error:
            text = f"{url} cannot be downloaded ({error}); name a file with --{split}"
            raise DataError(text, code="data.download-failed") from error
        unfinished.replace(target)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Turn the original files of a data set into parquet rows that megarl and verl read."
    )
    parser.add_argument("data_set", choices=ORIGINS)
    for split in SPLITS:
        help_text = f"original files (or folder) of the {split} split"
        parser.add_argument(f"--{split}", nargs="+", default=[], metavar="FILE", help=help_text)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--instruction", help="text next to each question instead of the default; '' = no text")
    parser.add_argument("--system-prompt", help="first message of each prompt; none by default")
    parser.add_argument("--download", action="store_true", help="download the splits without named files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
