"""What a checkpoint holds, in a page for people; no weight is read."""

from __future__ import annotations

import math
from collections import Counter

from megarl.convert.source import Source


def describe_source(source: Source, with_tensors: bool = False) -> str:
    """Format, model, tensors, number formats and size.

    Args:
        source: an opened checkpoint.
        with_tensors: add a line for each tensor.
    """
    config = source.config
    formats: Counter[str] = Counter()
    for view in source.tensors.values():
        formats[str(view.dtype).removeprefix("torch.")] += math.prod(view.shape)
    nbytes = sum(view.nbytes for view in source.tensors.values())
    rows = {
        "folder": str(source.path),
        "format": {"megarl": "megarl role", "torch_dist": "Megatron-Core torch_dist"}.get(source.kind, source.kind),
        "model": f"{config.raw['architectures'][0]}, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}",
        "config from": str(source.companions),
        "parameters": f"{sum(formats.values()):,} in {len(source.tensors):,} tensors, {nbytes / 1e9:,.3f} GB",
        "number formats": ", ".join(f"{name} {count:,}" for name, count in formats.most_common()),
        "head": _head(source),
        "experts": f"{config.experts.count} in {sum(config.experts.layers)} layers" if config.experts else "none",
        "files of weights": str(len(source.files())),
        **{name: str(value) for name, value in source.facts.items()},
        "besides weights": ", ".join(source.state) or "nothing",
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines += [f"not read: {name}" for name in source.left_out]
    if with_tensors:
        lines += [
            f"  {name}  {list(view.shape)}  {str(view.dtype).removeprefix('torch.')}"
            for name, view in source.tensors.items()
        ]
    return "\n".join(lines)


def _head(source: Source) -> str:
    if source.has_value_head:
        return "scalar (value or reward), with bias" if "score.bias" in source.tensors else "scalar (value or reward)"
    if source.lacks:
        return f"none: {' and '.join(source.lacks)} absent"
    return "tied to the embedding" if source.config.tie_word_embeddings else "language model"
