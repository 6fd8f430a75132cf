"""One generation, from its configuration to its file of answers: what evaluation does, without a reward."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from megarl.config import GenerateConfig
from megarl.config.generate_schema import STANDARD_INPUT
from megarl.data import DataProto, sequence_lengths
from megarl.errors import DataError
from megarl.tracing import PHASE, span
from megarl.tracking import Console
from megarl.trainer.frozen_policy import STREAM, FrozenPolicy
from megarl.trainer.preflight import check_generation
from megarl.trainer.prompts import asked_loader

MESSAGES = "raw_prompt"
PROMPTS_FILE, ANSWERS_FILE = "prompts.jsonl", "answers.jsonl"
RESPONSES = "responses"
"""Column of the answers to a row's prompt, a list of texts, as verl's generation writes it."""
SHOWN = 8
"""Prompts whose answers are printed."""


def run(config: GenerateConfig, output_dir: Path) -> Path:
    """Has prompts answered as the configuration says.

    Args:
        config: complete, as ``megarl.config.build`` returns it; its model path becomes that of a Hugging Face folder.
        output_dir: folder of the run's files, which exists. A converted checkpoint goes beside it.

    Returns:
        The file with the answers: one row per prompt, with its columns and ``responses``, the texts of all answers;
        null for one whose conversation failed.

    Raises:
        MegarlError: something is wrong with configuration, data, model, resources or a worker; processes are gone.
    """
    policy = FrozenPolicy(config, output_dir)
    check_generation(config, policy.model.config)
    files = [*config.data.val_files, *asked_files(config.data.prompts, output_dir / PROMPTS_FILE)]
    loader = asked_loader(config, files, policy.tokenizer)
    target = Path(config.data.output_path or output_dir / ANSWERS_FILE)
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    with Console(quiet=config.trainer.quiet, title=config.trainer.experiment_name) as console:
        policy.convert(console)
        rows: list[dict[str, Any]] = []
        with policy.served(console) as rollout, console.phase("gen"), span("gen", PHASE):
            for number, prompts in enumerate(loader):
                answers = rollout.validate(prompts, STREAM, number)
                rows += answered_rows(prompts, answers, samples, policy.tokenizer)
        write_rows(target, rows)
        for row in rows[:SHOWN]:
            console.message(answers_line(row))
        failed = sum(text is None for row in rows for text in row[RESPONSES])
        console.message(f"answers: {target}" + (f" ({failed} conversations failed)" if failed else ""))
    return target


def answers_line(row: Mapping[str, Any]) -> str:
    """The last message of a prompt and its answers on one line, whatever lines they have themselves."""
    question, *answers = (" ".join(str(text).split()) for text in (row["prompt"][-1]["content"], *row[RESPONSES]))
    return f"{question}  ->  {' | '.join(answers)}"


def asked_files(prompts: list[str], target: Path) -> list[str]:
    """A file of the texts that are asked in place of files, or of the lines of the standard input; none where none are.

    Raises:
        DataError: the standard input has no line.
    """
    texts = list(prompts)
    if texts == [STANDARD_INPUT]:
        texts = [line.strip() for line in sys.stdin if line.strip()]
        if not texts:
            raise DataError("data.prompts=[-]: the standard input has no line")
    if not texts:
        return []
    rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in texts]
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return [str(target)]


def answered_rows(
    prompts: DataProto, answers: DataProto, samples: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The rows of a batch with the texts of their answers.

    Args:
        prompts: the batch.
        answers: ``samples`` adjacent rows for each prompt.
        samples: answers per prompt.
        tokenizer: decodes.
    """
    lengths = sequence_lengths(answers)[1].tolist()
    errors = answers.non_tensor_batch.get("agent_error", [None] * len(answers))
    texts = [
        None if error is not None else tokenizer.decode(ids[:length].tolist(), skip_special_tokens=True)
        for ids, length, error in zip(answers.tensors["responses"], lengths, errors, strict=True)
    ]
    columns = {name: values for name, values in prompts.non_tensor_batch.items() if name not in (MESSAGES, "index")}
    rows = []
    for row, messages in enumerate(prompts.non_tensor_batch[MESSAGES]):
        told = {name: values[row] for name, values in columns.items() if values[row] not in (None, {})}
        rows.append({"prompt": messages, **told, RESPONSES: texts[row * samples : (row + 1) * samples]})
    return rows


def write_rows(target: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines or parquet, by the file's suffix; it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
    else:
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(unfinished, target)
