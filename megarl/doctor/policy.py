"""What plain transformers say of a dump's tokens: the third opinion beside engine and actor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.data.rollout_dump import RolloutDump
from megarl.errors import ModelError


class PlainPolicy:
    """A causal language model of a Hugging Face folder, one row at a time.

    Args:
        folder: with configuration and weights.
        dtype: number format to compute in.
        device: where to.

    Raises:
        ModelError: the folder's model cannot be loaded.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"no language model can be loaded from {folder}: {error}") from error
        self.model = model.to(device).eval()
        self.folder, self.device = folder, device

    @torch.no_grad()
    def log_probs(self, dump: RolloutDump, temperatures: Sequence[float]) -> np.ndarray:
        """Log-probs of the generated tokens, row after row, at several temperatures; ``[temperatures, tokens]``.

        Raises:
            ModelError: the dump has a token that the model has not.
        """
        parts = [self._row(dump, row, temperatures) for row in range(len(dump))]
        return np.concatenate(parts, axis=1)

    def _row(self, dump: RolloutDump, row: int, temperatures: Sequence[float]) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([dump.prompts[row], dump.responses[row]]).astype(np.int64))
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= vocabulary:
            raise ModelError(f"row {row} of the dump has token {int(ids.max())}; {self.folder} knows {vocabulary}")
        ids = ids.to(self.device)
        logits = self.model(ids[None]).logits[0, len(dump.prompts[row]) - 1 : -1].float()
        written = torch.from_numpy(dump.generated[row].astype(bool)).to(self.device)
        logits, chosen = logits[written], ids[len(dump.prompts[row]) :][written]
        each = [(logits / t).log_softmax(-1).gather(1, chosen[:, None])[:, 0] for t in temperatures]
        return torch.stack(each).double().cpu().numpy()


def retokenized(dump: RolloutDump, folder: str | Path) -> int | None:
    """Rows whose response has other ids once its text is encoded again; None where the folder has no tokenizer."""
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError):
        return None
    return sum(
        tokenizer.encode(tokenizer.decode(ids.tolist()), add_special_tokens=False) != ids.tolist()
        for ids in dump.responses
    )
