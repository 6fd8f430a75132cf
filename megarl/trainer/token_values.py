"""What the report shows of single tokens, taken from a step's batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.data import DataProto, sequence_lengths
from megarl.data.token_text import characters_per_token
from megarl.tracking.report.tokens import TokenValues
from megarl.trainer.samples import Sample, describe_samples

_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "advantage": (("advantages",), lambda advantages: advantages),
    "difference": (("old_log_probs", "rollout_log_probs"), lambda actor, engine: actor.float() - engine.float()),
    "mask": (("response_mask",), lambda mask: mask),
    "log_prob": (("old_log_probs",), lambda log_probs: log_probs),
    "entropy": (("entropys",), lambda entropy: entropy),
    "kl": (("old_log_probs", "ref_log_prob"), lambda actor, reference: actor.float() - reference.float()),
    "value": (("values",), lambda values: values),
    "reward": (("token_level_rewards",), lambda rewards: rewards),
}
"""The report's token columns (:data:`megarl.tracking.report.tokens.TOKEN_COLUMNS`), and tensors they come of."""


def samples_with_tokens(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """As :func:`describe_samples`, each with ``tokens``: the values of those columns that the batch has.

    Answers whose tokens cannot be told apart in their text have none.
    """
    samples = describe_samples(batch, tokenizer, step)
    lengths = sequence_lengths(batch)[1].tolist()
    tensors = batch.tensors
    columns = {
        name: make(*(tensors[source] for source in sources))
        for name, (sources, make) in _COLUMNS.items()
        if all(source in tensors for source in sources)
    }
    if "difference" in columns and "generated_mask" in tensors:
        # the engine has no log-prob of what a tool or a search wrote
        columns["difference"] = columns["difference"] * tensors["generated_mask"]
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        characters = characters_per_token(tensors["responses"][row, :length].tolist(), tokenizer)
        if characters is None:
            continue
        values = {name: column[row, :length].float().numpy() for name, column in columns.items()}
        coded = TokenValues.of(characters, values).coded()
        if coded is not None:
            sample["tokens"] = coded
    return samples
