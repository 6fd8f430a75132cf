"""A step's rollout as numbers, saved to be looked into later: tokens, and what engine and actor said of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import torch

from megarl.data.sequences import sequence_lengths
from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.data.protocol import DataProto

Rows = list[np.ndarray]
_RAGGED = ("prompts", "responses", "generated", "rollout_log_probs", "old_log_probs")


@dataclass(frozen=True)
class DumpFacts:
    """How the tokens came about.

    Attributes:
        step: training step.
        temperature: that the tokens were sampled at and the actor's log-probs are taken at.
        engine: name of the rollout engine.
        engine_dtype: number format of its weights.
        actor_dtype: number format of the actor's.
    """

    step: int
    temperature: float
    engine: str
    engine_dtype: str
    actor_dtype: str


@dataclass(frozen=True)
class RolloutDump:
    """Rows without their padding; of each row the last four lists have an entry per response token.

    Attributes:
        facts: how the tokens came about.
        prompts: token ids.
        responses: token ids.
        generated: 1 = the policy wrote the token, 0 = a tool or a search.
        rollout_log_probs: the engine's log-probs.
        old_log_probs: the actor's.
        weight_versions: of the weights that the engine had, by row; -1 where that is not known.
    """

    facts: DumpFacts
    prompts: Rows
    responses: Rows
    generated: Rows
    rollout_log_probs: Rows
    old_log_probs: Rows
    weight_versions: np.ndarray

    def __len__(self) -> int:
        return len(self.responses)

    @classmethod
    def of(cls, batch: DataProto, facts: DumpFacts) -> RolloutDump:
        """The rollout of a batch that has both ``rollout_log_probs`` and ``old_log_probs``."""
        tensors = batch.tensors
        prompts, responses = (lengths.tolist() for lengths in sequence_lengths(batch))
        width = tensors["prompts"].shape[1]
        ids = [row[width - length :].numpy() for row, length in zip(tensors["prompts"], prompts, strict=True)]
        written = tensors.get("generated_mask")
        columns = {
            "responses": tensors["responses"],
            "generated": torch.ones_like(tensors["responses"]).bool() if written is None else written.bool(),
            "rollout_log_probs": tensors["rollout_log_probs"].float(),
            "old_log_probs": tensors["old_log_probs"].float(),
        }
        ragged = {
            name: [row[:length].numpy() for row, length in zip(column, responses, strict=True)]
            for name, column in columns.items()
        }
        versions = batch.non_tensor_batch.get("weight_version", np.full(len(batch), -1))
        return cls(facts, ids, **ragged, weight_versions=versions.astype(np.int64))

    def save(self, path: str | Path) -> None:
        """Write the dump as a compressed ``.npz`` file."""
        arrays: dict[str, np.ndarray] = {"facts": np.array(json.dumps(asdict(self.facts)))}
        for name in _RAGGED:
            rows: Rows = getattr(self, name)
            arrays[name] = np.concatenate(rows) if rows else np.zeros(0)
        arrays["prompt_lengths"] = np.array([len(row) for row in self.prompts], dtype=np.int64)
        arrays["response_lengths"] = np.array([len(row) for row in self.responses], dtype=np.int64)
        arrays["weight_versions"] = self.weight_versions
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> RolloutDump:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: the file cannot be read as a dump; says why.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            facts = DumpFacts(**json.loads(str(arrays["facts"])))
            prompts, responses = arrays["prompt_lengths"], arrays["response_lengths"]
            ragged = {name: _rows(arrays[name], prompts if name == "prompts" else responses) for name in _RAGGED}
            return cls(facts, **ragged, weight_versions=arrays["weight_versions"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise DataError(
                f"{path} is not a rollout dump (<step>.npz of trainer.rollout_data_dir): {error}"
            ) from error


def _rows(values: np.ndarray, lengths: np.ndarray) -> Rows:
    if int(np.sum(lengths)) != len(values):
        raise ValueError(f"{len(values)} entries, expected {int(np.sum(lengths))}")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
