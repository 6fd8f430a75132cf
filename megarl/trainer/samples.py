"""Answers as people read them, and the files they are dumped to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from megarl.config.schema import ActorRolloutRefConfig
from megarl.data import DataProto, sequence_lengths
from megarl.data.rollout_dump import DumpFacts, RolloutDump
from megarl.tracking.report.sample_files import write_samples

Sample = dict[str, Any]
Item = TypeVar("Item")


def describe_samples(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """Each scored row as ``input, output, gts, score, step``, plus what the reward function returned beside the score,
    ``data_source`` where the row has one, and ``response_length`` in tokens.

    A row whose reward failed has ``score`` None. Where tools or a search took part, ``masked`` tells which characters
    of ``output`` they wrote, as ``[begin, end]`` pairs; a conversation that failed has ``agent_error``.
    """
    prompt_lengths, response_lengths = (lengths.tolist() for lengths in sequence_lengths(batch))
    prompts, responses = batch.tensors["prompts"], batch.tensors["responses"]
    scores = batch.tensors["token_level_scores"].sum(-1).tolist()
    failed = batch.non_tensor_batch["reward_failed"]
    extras = [name for name in batch.non_tensor_batch if name.startswith("reward_extra_")]
    sources = batch.non_tensor_batch.get("data_source")
    samples = []
    for row, (prompt, response) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        samples.append(
            {
                "input": tokenizer.decode(prompts[row, prompts.shape[1] - prompt :].tolist(), skip_special_tokens=True),
                "output": tokenizer.decode(responses[row, :response].tolist(), skip_special_tokens=True),
                "gts": batch.non_tensor_batch["reward_model"][row]["ground_truth"],
                "score": None if failed[row] else scores[row],
                "step": step,
                **({"data_source": str(sources[row])} if sources is not None else {}),
                "response_length": response,
                **{name.removeprefix("reward_extra_"): batch.non_tensor_batch[name][row] for name in extras},
                **_agent_facts(batch, tokenizer, row, response),
            }
        )
    return samples


def _agent_facts(batch: DataProto, tokenizer: PreTrainedTokenizerBase, row: int, length: int) -> Sample:
    """What only conversations with tools or a search, and those that failed, have to tell."""
    facts: Sample = {}
    written = batch.tensors["generated_mask"][row, :length].tolist() if "generated_mask" in batch.tensors else []
    error = batch.non_tensor_batch["agent_error"][row] if "agent_error" in batch.non_tensor_batch else None
    if error is not None:
        facts["agent_error"] = error
    elif not all(written):
        facts["masked"] = _spans(batch.tensors["responses"][row, :length].tolist(), written, tokenizer)
    return facts


def _spans(ids: list[int], written: list[int], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Characters of the decoded ids where ``written`` is 0."""
    borders = [at for at in range(1, len(ids)) if written[at] != written[at - 1]]
    begins, ends = [0, *borders], [*borders, len(ids)]
    runs = [(begin, end) for begin, end in zip(begins, ends, strict=True) if not written[begin]]

    def characters(count: int) -> int:
        return len(tokenizer.decode(ids[:count], skip_special_tokens=True))

    return [[characters(begin), characters(end)] for begin, end in runs]


def dump_samples(folder: str | Path, step: int, samples: Iterable[Sample]) -> None:
    """Write ``<folder>/<step>.jsonl``, one sample per line; what is not JSON is written as its text."""
    write_samples(Path(folder) / f"{step}.jsonl", samples)


def dump_log_probs(folder: str | Path, step: int, batch: DataProto, config: ActorRolloutRefConfig) -> None:
    """Write ``<folder>/<step>.npz``: tokens and log-probs of engine and actor, for ``megarl doctor logprobs``."""
    rollout, actor = config.rollout, config.actor
    facts = DumpFacts(step, rollout.temperature, rollout.name, rollout.dtype, actor.megatron.dtype)
    RolloutDump.of(batch, facts).save(Path(folder) / f"{step}.npz")


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most ``count`` items, spread evenly over the sequence."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]
