"""End-of-sequence tokens: three files name them, and generation stops at any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.errors import ModelError
from megarl.base.json_text import read_json_object
from megarl.models.hf_config import read_model_config
from megarl.models.registry import entries

GENERATION_FILE = "generation_config.json"
_KEY = "eos_token_id"
_FROM_CONFIG = ("bos_token_id", "pad_token_id")
"""Fields that transformers takes from ``config.json`` if there is no generation config."""


class EndTokens(NamedTuple):
    """A model's end-of-sequence tokens, by the file that names them; the tokenizer's ends supervised responses."""

    config: tuple[int, ...]
    generation: tuple[int, ...]
    tokenizer: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, sorted. SGLang stops at the same tokens, vLLM at those of generation config and tokenizer."""
        return tuple(sorted({*self.config, *self.generation, *self.tokenizer}))

    @property
    def disagree(self) -> bool:
        """Whether transformers, which reads the generation config or else the config, does not stop at all of them."""
        return not {*self.config, *self.tokenizer} <= {*(self.generation or self.config)}

    def describe(self) -> str:
        """List the tokens of each file."""
        named = zip(("config.json", GENERATION_FILE, "tokenizer"), self, strict=True)
        return "; ".join(f"{source}: {', '.join(map(str, ids)) or 'none'}" for source, ids in named)


def read_end_tokens(folder: str | Path, tokenizer: int | None = None) -> EndTokens:
    """Read a model's end-of-sequence tokens, with that of its ``tokenizer`` if it has one.

    Raises:
        ModelError: the folder contains no model, or a file is malformed.
    """
    file = Path(folder) / GENERATION_FILE
    return EndTokens(
        eos_in(read_model_config(folder).settings),
        eos_in(read_json_object(file, ModelError), str(file)) if file.is_file() else (),
        () if tokenizer is None else (tokenizer,),
    )


def eos_in(settings: Mapping[str, Any], file: str = "config.json") -> tuple[int, ...]:
    """Read the setting ``eos_token_id``: one token, several or none.

    Raises:
        ModelError: it is neither a token id nor a list of them.
    """
    eos = settings.get(_KEY)
    ids = tuple(entries({_KEY: eos if eos is None or isinstance(eos, list) else [eos]}, _KEY, int, file))
    if any(token < 0 for token in ids):
        text = f"{file}: {_KEY}={eos!r:.80}, expected token ids; remove negative ones"
        raise ModelError(text, code="model.field-value")
    return ids


def generation_config_with(folder: Path, trained: int) -> dict[str, str]:
    """Return an export's generation config, text by file name, if training ended responses with another token.

    Raises:
        ModelError: a file of the folder is malformed.
    """
    ends = read_end_tokens(folder)
    names = ends.generation or ends.config
    if trained in names:
        return {}
    file = folder / GENERATION_FILE
    if file.is_file():
        settings = read_json_object(file, ModelError)
    else:
        raw = read_model_config(folder).settings
        settings = {name: raw[name] for name in _FROM_CONFIG if raw.get(name) is not None}
    return {GENERATION_FILE: json.dumps({**settings, _KEY: [trained, *names]}, indent=2) + "\n"}
