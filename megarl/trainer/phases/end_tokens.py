"""The tokens that end the policy's responses: for engines, penalties and masks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.base.errors import ModelError
from megarl.models import read_model_config
from megarl.models.end_tokens import GENERATION_FILE, EndTokens, read_end_tokens


def policy_end_tokens(folder: str, tokenizer: PreTrainedTokenizerBase, warn: Callable[[str], None]) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the policy, and name a disagreement of its files.

    Raises:
        ModelError: a file is malformed, or the model lacks one of the tokens.
    """
    ends = read_end_tokens(folder, tokenizer.eos_token_id)
    vocab_size = read_model_config(folder).vocab_size
    if ends.ids and ends.ids[-1] >= vocab_size:
        raise ModelError(
            f"{folder}: the end-of-sequence token {ends.ids[-1]} is beyond the model's vocabulary of {vocab_size} "
            f"tokens ({ends.describe()}); correct the file, or set the model's tokenizer_path to the tokenizer of the "
            "model",
            code="tokenizer.end-token-id",
        )
    if ends.disagree:
        warn(disagreement(folder, ends, tokenizer))
    return ends.ids


def disagreement(folder: str, ends: EndTokens, tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe files that name different ends of a sequence, and the remedy."""
    names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)}" for token in ends.ids)
    return (
        f"{folder}: the files name different ends of a sequence ({ends.describe()}); generation stops at any of them "
        f"({names}). Other programs may read one file: set eos_token_id={[*ends.ids]} in "
        f"{Path(folder) / GENERATION_FILE}"
    )
