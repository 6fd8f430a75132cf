"""Small random Hugging Face models and their outputs, the reference for Megatron."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.models import ModelConfig, parse_model_config

VOCAB = 503  # a prime: no tensor-parallel size divides it
ROW_LENGTHS = [(3, 5), (7, 2), (4, 4), (1, 9), (5, 3), (2, 6), (6, 2), (9, 1)]
TEMPERATURE = 0.7


class Row(NamedTuple):
    prompt: Tensor
    response: Tensor
    weights: Tensor  # of its response tokens in the loss
    returns: Tensor  # that a critic is to predict


def settings_of(
    family: str, *, tied: bool = False, critic: bool | str = False, **changes: Any
) -> tuple[str, dict[str, Any]]:
    """Return the prefix of a family's classes in transformers, and the settings of a small model.

    ``critic`` is the type of its head, such as ``TokenClassification``, or true for ``SequenceClassification``.
    """
    words = re.split(r"(?<!\d)_|_(?!\d)", family)  # a version such as 3_5 is one word
    name = "".join(word.capitalize() for word in words)
    return name, {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        **({"head_dim": 12} if family == "qwen3" else {}),
        **({"num_labels": 1} if critic else {}),
        **changes,
    }


def class_name(name: str, critic: bool | str) -> str:
    """Return the name of a model's class in transformers."""
    head = critic if isinstance(critic, str) else "SequenceClassification" if critic else "CausalLM"
    # The text model of a multimodal one has a configuration of its own.
    return f"{name.removesuffix('Text')}For{head}" if head == "CausalLM" else f"{name}For{head}"


def model_config(family: str, *, critic: bool | str = False, **changes: Any) -> ModelConfig:
    """Return the configuration of a model of :func:`save_model` without the model."""
    import transformers

    name, settings = settings_of(family, critic=critic, **changes)
    raw = getattr(transformers, f"{name}Config")(**settings).to_dict()
    return parse_model_config(raw | {"architectures": [class_name(name, critic)]})


def save_model(path: Path, family: str, *, critic: bool | str = False, **changes: Any) -> Any:
    """Save a model with large random weights, so that errors show, and return it; arguments of :func:`settings_of`."""
    import transformers

    name, settings = settings_of(family, critic=critic, **changes)
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, class_name(name, critic))(config).float()
    with torch.no_grad():
        for key, param in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or "bias" in key:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(path)
    return model.eval()


def rows(seed: int = 0) -> list[Row]:
    return rows_of(ROW_LENGTHS, seed)


def rows_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Rows of the given prompt and response lengths."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for prompt, response in lengths:
        tokens = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (prompt, response)]
        numbers = torch.randn(2, response, generator=generator)
        result.append(Row(*tokens, weights=numbers[0] / 40, returns=numbers[1]))
    return result


def policy_reference(model: Any, row: Row, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a row's response tokens, differentiable."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0] / temperature
    log_probs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, row.response[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def value_reference(model: Any, row: Row) -> Tensor:
    """Values of the states before a row's response tokens, differentiable."""
    hidden = model.model(torch.cat([row.prompt, row.response])[None]).last_hidden_state[0]
    return model.score(hidden)[len(row.prompt) - 1 : -1, 0]
