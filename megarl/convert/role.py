"""Reads megarl's own checkpoints of a role: tensors by Hugging Face name, in blocks of whatever layout saved them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.checkpoint_index import read_index
from megarl.convert.source import MEGARL, SCORE, Source, stored_tensors, whole, without_head_bias
from megarl.errors import CheckpointError
from megarl.models import ModelConfig, ParallelLayout, WeightMap

STATE_FILE = "state.json"
FORMAT = 1
WEIGHT = "weight/"


def open_role(path: Path, config: ModelConfig, companions: Path) -> Source:
    """Opens a role's checkpoint.

    Args:
        path: the folder with ``state.json``.
        config: the model.
        companions: folder with the model's config and tokenizer.

    Raises:
        CheckpointError: a file is missing, malformed or truncated, or the tensors are not those of the model.
    """
    facts = _facts(path)
    index = read_index(path)
    keys = [key for key in index.state_dict_metadata if key.startswith(WEIGHT)]
    stored = {t.name.removeprefix(WEIGHT): t for t in stored_tensors(path, index, keys).values()}
    shaped = config
    if SCORE[0] in stored and SCORE[1] not in stored:
        shaped = without_head_bias(config)
    expected = WeightMap(shaped, value_head=SCORE[0] in stored).hf_shapes()
    for name in [*expected, *stored]:
        if name not in stored or expected.get(name) != stored[name].shape:
            here = f"has shape {list(stored[name].shape)}" if name in stored else "is absent"
            there = f"of shape {list(expected[name])}" if name in expected else "not part of the model"
            raise CheckpointError(
                f"checkpoint {path}: tensor '{name}' {here}; by {companions}/config.json it is {there}"
            )
    source = Source(
        path,
        MEGARL,
        config,
        companions,
        {name: whole(name, stored[name]) for name in expected},
        state=tuple(sorted({key.partition("/")[0] for key in index.state_dict_metadata} - {"weight"})),
        facts=facts,
    )
    source.check_files()
    return source


def _facts(path: Path) -> dict[str, Any]:
    file = path / STATE_FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise CheckpointError(f"{file}: format={document['format']!r}, this megarl reads {FORMAT}")
        layout = ParallelLayout(**document["layout"]).describe()
        return {
            "saved by": f"megarl {document['megarl_version']} in {layout}",
            "number format": document["dtype"],
            "optimizer steps": document["steps"],
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is malformed: {error!r}") from error
