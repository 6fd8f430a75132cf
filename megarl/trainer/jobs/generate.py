"""Generation job: responses of a policy with fixed weights to prompts, without a reward."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from megarl.agents.endpoint import check_endpoint
from megarl.base.atomic_write import atomic_write
from megarl.base.errors import DataError
from megarl.base.json_text import format_json
from megarl.cluster.agent_runners import AgentRunners
from megarl.config import GenerateConfig
from megarl.config.schema.jobs import STANDARD_INPUT
from megarl.data import DataProto
from megarl.data.images import IMAGES, stored_images, stored_message
from megarl.rewards.scorer import decode_text
from megarl.tracing import PHASE, span
from megarl.trainer.jobs.frozen_policy import STREAM, FrozenPolicy, FrozenReplicas
from megarl.trainer.jobs.preflight import check_generation
from megarl.trainer.jobs.session import open_job
from megarl.trainer.phases.data_loading import generation_loader
from megarl.trainer.phases.end_tokens import policy_end_tokens
from megarl.trainer.records.sample_records import LATER_IMAGES, images_by_turn

MESSAGES = "raw_prompt"
PROMPTS_FILE, ANSWERS_FILE = "prompts.jsonl", "answers.jsonl"
RESPONSES = "responses"
"""Column with a prompt's samples, a list of texts, as in verl's generation."""
_FILES = (IMAGES, LATER_IMAGES)
SHOWN = 8
"""Number of prompts whose samples are printed."""


def run(config: GenerateConfig, output_dir: Path) -> Path:
    """Generate responses to prompts.

    Returns:
        The output file: one row per prompt, with its columns and ``responses``, the texts of all samples. The text of a
        failed conversation is null.

    Raises:
        MegarlError: an error in configuration, data, model, resources or a worker; all processes are ended.
    """
    policy = FrozenPolicy(config, output_dir)
    check_generation(config, policy.model.config)
    files = [*config.data.val_files, *prompt_files(config.data.prompts, output_dir / PROMPTS_FILE)]
    loader = generation_loader(policy.with_model_folder, files, policy.tokenizer)
    target = Path(config.data.output_path or output_dir / ANSWERS_FILE)
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    config = policy.config
    with open_job(config, output_dir) as session:
        console = session.console
        policy.convert(console)
        end_tokens = policy_end_tokens(config.actor_rollout_ref.model.path, policy.tokenizer, console.warn)
        check_endpoint(config)
        pool = session.start()
        with session.starting_workers() as progress:
            runners = session.enter(AgentRunners(config, policy.tokenizer, pool))
            replicas = FrozenReplicas(config, pool, progress, end_tokens)
            runners.wait_ready()
        session.tracing.begin_step(0)
        rollouts = replicas.rollouts(policy.tokenizer, runners)
        rows: list[dict[str, Any]] = []
        with console.phase("gen"), span("gen", PHASE):
            for number, prompts in enumerate(loader):
                batch = rollouts.validate(prompts, STREAM, number)
                rows += answer_rows(prompts, batch, samples, policy.tokenizer)
        write_answers(target, rows)
        for row in rows[:SHOWN]:
            console.message(answers_line(row))
        failed = sum(text is None for row in rows for text in row[RESPONSES])
        console.message(f"answers: {target}" + (f" ({failed} conversations failed)" if failed else ""))
    return target


def answers_line(row: Mapping[str, Any]) -> str:
    """Format the last message of a prompt and its samples as one line."""
    question, *answers = (" ".join(str(text).split()) for text in (row["prompt"][-1]["content"], *row[RESPONSES]))
    return f"{question}  ->  {' | '.join(answers)}"


def prompt_files(prompts: list[str], target: Path) -> list[str]:
    """Write the texts of ``data.prompts``, or the lines of the standard input, to a JSONL file of prompts.

    Returns:
        The file; an empty list without prompts.

    Raises:
        DataError: the standard input has no line.
    """
    texts = list(prompts)
    if texts == [STANDARD_INPUT]:
        texts = [line.strip() for line in sys.stdin if line.strip()]
        if not texts:
            raise DataError(
                "data.prompts=[-]: the standard input has no line; write one prompt per line", code="data.no-stdin-line"
            )
    if not texts:
        return []
    rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in texts]
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return [str(target)]


def answer_rows(
    prompts: DataProto, batch: DataProto, samples: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Decode the samples of a batch into one output row per prompt; ``later_images`` has a list for each sample.

    Args:
        batch: ``samples`` adjacent rows per prompt.
    """
    errors = batch.non_tensor_batch.get("agent_error", [None] * len(batch))
    texts = [
        None if error is not None else decode_text(tokenizer, ids.numpy())
        for ids, error in zip(batch.unpadded("responses"), errors, strict=True)
    ]
    images = batch.non_tensor_batch.get(IMAGES, [()] * len(batch))
    turns = map(images_by_turn, batch.unpadded("prompts"), batch.unpadded("responses"), images)
    later = [stored_images(shown[LATER_IMAGES]) for shown in turns]
    columns = {name: values for name, values in prompts.non_tensor_batch.items() if name not in (MESSAGES, "index")}
    rows = []
    for row, messages in enumerate(prompts.non_tensor_batch[MESSAGES]):
        of_prompt = slice(row * samples, (row + 1) * samples)
        fields = {name: values[row] for name, values in columns.items() if values[row] not in (None, {})}
        if IMAGES in fields:
            fields |= {IMAGES: stored_images(fields[IMAGES]), LATER_IMAGES: later[of_prompt]}
        answers = texts[of_prompt]
        rows.append({"prompt": [*map(stored_message, messages)], **fields, RESPONSES: answers})
    return rows


def write_answers(target: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows atomically as Parquet (suffix ``.parquet``) or JSON lines, which hold no images."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as unfinished:
        if target.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), unfinished)
        else:
            texts = ({name: value for name, value in row.items() if name not in _FILES} for row in rows)
            lines = (format_json(row, ensure_ascii=False, default=str) for row in texts)
            unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
