"""Samples as readable records: JSONL dumps, log-prob dumps, and per-token values for the report."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.algorithms import sequence_counts, sequence_sums
from megarl.base.errors import DataError
from megarl.base.image_files import thumbnail
from megarl.base.image_tokens import Image, image_spans
from megarl.base.redaction import mask_known
from megarl.base.run_writer import RUN_WRITER
from megarl.config.schema.jobs import ActorRolloutRefConfig
from megarl.data import DataProto, sequence_lengths
from megarl.data.images import IMAGES
from megarl.data.rollout_dump import DumpMetadata, RolloutDump
from megarl.data.tokenizers import characters_per_token
from megarl.rewards.outcome import EXTRA
from megarl.rewards.scorer import decode_text
from megarl.tracking.sample_files import write_samples
from megarl.tracking.token_columns import TokenValues
from megarl.workers.row_math import FINISH_REASON, generated_tokens, row_sums, trained_tokens

Sample = dict[str, Any]
Item = TypeVar("Item")
_DECODED_AT_ONCE = 4
"""Images for thumbnails that are decoded at the same time; each takes three bytes per pixel."""

LATER_IMAGES = "later_images"
"""Field of a record, and column of a file, with the images that a response shows in later turns."""
_FIELDS = (
    *("input", "output", "gts", "score", "step", "data_source", "response_length", "advantage"),
    *("finish_reason", "masked", "agent_error", "tokens", IMAGES, LATER_IMAGES, "thumbnails"),
)
"""Fields of a record that no extra field of a reward function replaces."""

_TOKEN_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "advantage": (("advantages",), lambda advantages: advantages),
    "difference": (("old_log_probs", "rollout_log_probs"), lambda actor, engine: actor.float() - engine.float()),
    "mask": (("response_mask",), lambda mask: mask),
    "log_prob": (("old_log_probs",), lambda log_probs: log_probs),
    "entropy": (("entropys",), lambda entropy: entropy),
    "kl": (("old_log_probs", "ref_log_prob"), lambda actor, reference: actor.float() - reference.float()),
    "value": (("values",), lambda values: values),
    "reward": (("token_level_rewards",), lambda rewards: rewards),
}
"""Token columns of the report (:data:`megarl.tracking.token_columns.TOKEN_COLUMNS`): source tensors and function."""


def describe_samples(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """Decode each scored row to a record with the fields ``input, output, gts, score, step``.

    A record also has the extra fields of the reward function (``reward_extra_<name>`` for the name of a field of its
    own), ``data_source`` if the row has one, ``response_length`` in tokens, and ``finish_reason``. ``score`` is None if
    the reward failed. ``masked`` lists the characters of ``output`` that a tool or a search wrote, as ``[begin, end]``
    pairs. ``advantage`` is the mean over the trained tokens. A failed conversation has ``agent_error``.
    ``images`` and ``later_images`` have digests with images (:func:`images_by_turn`); :func:`stored_samples` keeps the
    digests.
    """
    scores = row_sums(batch, "token_level_scores").tolist()
    failed = batch.non_tensor_batch["reward_failed"]
    extras = {
        column if (name := column.removeprefix(EXTRA)) in _FIELDS else name: column
        for column in batch.non_tensor_batch
        if column.startswith(EXTRA)
    }
    sources, reasons, images = (batch.non_tensor_batch.get(name) for name in ("data_source", FINISH_REASON, IMAGES))
    advantages = _mean_advantages(batch)
    masks = batch.unpadded("generated_mask") if "generated_mask" in batch.tensors else None
    samples = []
    for row, (prompt, response) in enumerate(zip(batch.unpadded("prompts"), batch.unpadded("responses"), strict=True)):
        ids, generated = response.tolist(), [] if masks is None else masks[row].tolist()
        sample = {
            "input": decode_text(tokenizer, prompt.tolist()),
            "output": decode_text(tokenizer, ids),
            "gts": batch.non_tensor_batch["reward_model"][row]["ground_truth"],
            "score": None if failed[row] else scores[row],
            "step": step,
            **({"data_source": str(sources[row])} if sources is not None else {}),
            "response_length": len(ids),
            **({"finish_reason": reasons[row]} if reasons is not None else {}),
            **({"advantage": advantages[row]} if advantages is not None else {}),
            **({} if images is None else _named_images(images_by_turn(prompt, response, images[row]))),
            **{name: batch.non_tensor_batch[column][row] for name, column in extras.items()},
            **_conversation_fields(batch, tokenizer, row, ids, generated),
        }
        # A tool's result may show a key of the configuration.
        samples.append({name: mask_known(value) if isinstance(value, str) else value for name, value in sample.items()})
    return samples


def images_by_turn(prompt: Tensor, response: Tensor, images: Sequence[Image]) -> dict[str, list[Image]]:
    """Return an image for each ``<image>``: ``images`` of the prompt, and ``later_images`` of the response.

    Args:
        prompt: token ids, ``[tokens]``, as ``response``.
        images: of the row.
    """
    by_key = {image.key: image for image in images}
    turns = {IMAGES: prompt, LATER_IMAGES: response}
    return {name: [by_key[span.key] for span in image_spans(ids.numpy())] for name, ids in turns.items()}


def _named_images(turns: dict[str, list[Image]]) -> dict[str, list[tuple[str, Image]]]:
    """Images with their digests, as token ids have them; reads no file."""
    return {name: [(f"{image.key:x}", image) for image in images] for name, images in turns.items() if images}


def _mean_advantages(batch: DataProto) -> list[float | None] | None:
    """Mean advantage of each row over its trained tokens, None without any; None before advantages are computed."""
    if "advantages" not in batch.tensors:
        return None
    mask, lengths = trained_tokens(batch), sequence_lengths(batch)[1]
    sums = sequence_sums(batch.packed("advantages"), mask, lengths).tolist()
    counts = sequence_counts(mask, lengths).tolist()
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _conversation_fields(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, row: int, ids: list[int], generated: list[int]
) -> Sample:
    """Fields that only conversations with tools or searches, and failed ones, have."""
    fields: Sample = {}
    error = batch.non_tensor_batch["agent_error"][row] if "agent_error" in batch.non_tensor_batch else None
    if error is not None:
        fields["agent_error"] = error
    elif not all(generated):
        fields["masked"] = _masked_spans(ids, generated, tokenizer)
    return fields


def _masked_spans(ids: list[int], generated: list[int], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Character spans of the decoded ids where ``generated`` is 0."""
    borders = [index for index in range(1, len(ids)) if generated[index] != generated[index - 1]]
    begins, ends = [0, *borders], [*borders, len(ids)]
    runs = [(begin, end) for begin, end in zip(begins, ends, strict=True) if not generated[begin]]

    def characters(count: int) -> int:
        return len(decode_text(tokenizer, ids[:count]))

    return [[characters(begin), characters(end)] for begin, end in runs]


def samples_with_tokens(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """Extend :func:`describe_samples` with ``tokens``: the per-token values that the batch has.

    A sample whose tokens cannot be mapped to its text has no ``tokens``.
    """
    samples = describe_samples(batch, tokenizer, step)
    columns = {
        name: compute(*(batch.packed(source) for source in sources))
        for name, (sources, compute) in _TOKEN_COLUMNS.items()
        if all(source in batch.tensors for source in sources)
    }
    if "difference" in columns:
        # The engine has no log-prob of tokens that a tool or a search wrote.
        columns["difference"] = columns["difference"] * generated_tokens(batch)
    lengths = sequence_lengths(batch)[1].tolist()
    rows = {name: column.split(lengths) for name, column in columns.items()}
    for row, (sample, ids) in enumerate(zip(samples, batch.unpadded("responses"), strict=True)):
        characters = characters_per_token(ids.tolist(), tokenizer)
        if characters is None:
            continue
        values = {name: parts[row].float().numpy() for name, parts in rows.items()}
        encoded = TokenValues.of(characters, values).encoded()
        if encoded is not None:
            sample["tokens"] = encoded
    return samples


def stored_samples(samples: Sequence[Sample], *, thumbnails: bool = False) -> Iterator[Sample]:
    """Yield samples for a file or a tracker: ``images`` and ``later_images`` have the digests alone.

    Args:
        thumbnails: add ``thumbnails``, base64 by digest, to the first sample of each image.
    """
    names = (IMAGES, LATER_IMAGES)
    images = dict(pair for sample in samples for name in names for pair in sample.get(name, ()) if thumbnails)
    with ThreadPoolExecutor(_DECODED_AT_ONCE) as pool:
        small = dict(zip(images, pool.map(_thumbnail, images.values()), strict=True))
    for sample in samples:
        shown = {name: [digest for digest, _ in sample[name]] for name in names if name in sample}
        digests = itertools.chain.from_iterable(shown.values())
        new = {digest: text for digest in digests if (text := small.pop(digest, None))}
        yield {**sample, **shown, **({"thumbnails": new} if new else {})}


def _thumbnail(image: Image) -> str | None:
    """Return the thumbnail of an image in base64; None if it cannot be decoded."""
    with contextlib.suppress(DataError):
        return base64.b64encode(thumbnail(image.data, "an image of a sample")).decode("ascii")
    return None


def dump_samples(folder: str | Path, step: int, samples: Sequence[Sample]) -> None:
    """Write ``<folder>/<step>.jsonl``, one sample per line; values that are not JSON are written as text."""
    write_samples(Path(folder) / f"{step}.jsonl", stored_samples(samples))


def dump_log_probs(folder: str | Path, step: int, batch: DataProto, config: ActorRolloutRefConfig) -> None:
    """Write ``<folder>/<step>.npz``: tokens and log-probs of engine and actor, for ``megarl doctor logprobs``."""
    rollout, actor = config.rollout, config.actor
    facts = DumpMetadata(step, rollout.temperature, rollout.name, rollout.dtype, actor.megatron.dtype)
    RUN_WRITER.replace(Path(folder) / f"{step}.npz", RolloutDump.of(batch, facts).encoded())


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """Pick at most ``count`` items, evenly spaced over the sequence."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def rows_of_groups(uids: Sequence[str], count: int) -> list[int]:
    """Pick at most ``count`` rows: all rows of evenly spaced groups, adjacent; a larger group is cut."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    largest = max(map(len, groups.values()), default=1)
    chosen = evenly_spaced(list(groups.values()), max(1, count // largest))
    return [row for rows in chosen for row in rows][:count]
