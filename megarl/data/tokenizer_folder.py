"""Loading of the tokenizer of a model folder; imports transformers at the first call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.base.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, whatever it has.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        # Without False, transformers asks on a terminal whether to run code of the folder.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        tokenizer.get_vocab()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a malformed file raises any error there, and a panic of Rust is no Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"no tokenizer can be loaded from {path} ({reason:.300}); copy the tokenizer files of the model into the "
            "folder again, or name a folder that has them in the model's tokenizer_path",
            code="tokenizer.cannot-load",
        ) from error
    return tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder for a job.

    Raises:
        ModelError: it cannot be loaded, or has no vocabulary, no chat template or no end-of-sequence token.
    """
    tokenizer = open_tokenizer(path)
    # transformers builds an empty tokenizer for a folder without tokenizer files.
    special = {*map(str, tokenizer.added_tokens_decoder.values()), *tokenizer.all_special_tokens}
    if not tokenizer.get_vocab().keys() - special:
        raise ModelError(
            f"the tokenizer in {path} has no vocabulary: tokenizer.json (or vocab.json, tokenizer.model, ...) is "
            "missing there. Copy the tokenizer files of the model into the folder, or name a folder that has them in "
            "the model's tokenizer_path",
            code="tokenizer.no-vocabulary",
        )
    for name in ("chat_template", "eos_token"):
        if getattr(tokenizer, name, None) is None:
            text = f"the tokenizer in {path} has no {name}; set it in its tokenizer_config.json"
            raise ModelError(text, code="tokenizer.no-special-token")
    return tokenizer


def end_token_of(path: str | Path) -> int | None:
    """Return the end-of-sequence token of the tokenizer in a folder; None without a tokenizer, or if it has none.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    has_tokenizer = (Path(path) / "tokenizer_config.json").is_file()
    return open_tokenizer(path).eos_token_id if has_tokenizer else None
