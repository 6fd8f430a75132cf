"""Two small random models, a tokenizer with a merge, and rollout dumps with a known cause of log-prob differences."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.rollout_dump import DumpMetadata, RolloutDump

TEMPERATURE = 0.7
VOCAB = 67


def save_model(folder: Path, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Ids 0 to 65 are single letters; 66 is the merge of the first two."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = [*string.ascii_letters, *string.digits, *"!?+-"]
    vocabulary = {letter: index for index, letter in enumerate([*letters, letters[0] + letters[1]])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(letters[0], letters[1])]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder of a model, the model, and a second model."""
    folder = tmp_path_factory.mktemp("doctor")
    model, other = save_model(folder / "model", 1), save_model(folder / "other", 2)
    save_tokenizer(folder / "model")
    return folder / "model", model, other


def row_log_probs(model: Any, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    """Reference log-probs: a separate forward pass for each token."""
    ids, log_probs = prompt.tolist(), []
    with torch.no_grad():
        for token in response.tolist():
            logits = model(torch.tensor([ids])).logits[0, -1].float() / temperature
            log_probs.append((logits[token] - logits.logsumexp(-1)).item())
            ids.append(token)
    return np.array(log_probs, dtype=np.float32)


@pytest.fixture(scope="session")
def healthy(models: tuple[Path, Any, Any]) -> RolloutDump:
    """Dump in which engine and actor agree; two tokens are tool output, without an engine log-prob."""
    _, model, _ = models
    draw = np.random.default_rng(3)
    prompts = [draw.integers(2, VOCAB - 1, size) for size in (3, 5, 1, 4)]
    responses = [draw.integers(2, VOCAB - 1, size) for size in (6, 3, 7, 5)]
    generated = [np.ones(len(row), dtype=bool) for row in responses]
    generated[0][2:4] = False
    log_probs = [row_log_probs(model, *row, TEMPERATURE) for row in zip(prompts, responses, strict=True)]
    sampled = [np.where(mask, row, 0).astype(np.float32) for mask, row in zip(generated, log_probs, strict=True)]
    metadata = DumpMetadata(4, TEMPERATURE, "embedded", "float32", "float32")
    return RolloutDump(metadata, prompts, responses, generated, sampled, log_probs, np.full(4, 3))


@pytest.fixture(scope="session")
def computed_by(healthy: RolloutDump) -> Callable[..., RolloutDump]:
    """``computed_by(model, temperature, engine=True)``: the dump with the log-probs of one side recomputed."""

    def make(model: Any, temperature: float = TEMPERATURE, engine: bool = True) -> RolloutDump:
        rows = zip(healthy.prompts, healthy.responses, strict=True)
        log_probs = [row_log_probs(model, *row, temperature) for row in rows]
        return replace(healthy, **{"rollout_log_probs" if engine else "old_log_probs": log_probs})

    return make
