"""Mean final hidden states of rows equal Hugging Face's, in every layout and of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import Setup, engine
from family_cases import MODELS as FAMILIES
from tiny_models import rows, save_model

from megarl.megatron import PackedMicroBatch
from megarl.megatron.layers.outputs import POOLED
from megarl.models import ParallelLayout

LAYOUTS = {
    "tp1": Setup(ParallelLayout()),
    "tp2": Setup(ParallelLayout(tp=2)),
    "tp2sp": Setup(ParallelLayout(tp=2), sequence_parallel=True),
    "pp2": Setup(ParallelLayout(pp=2)),
    "cp2": Setup(ParallelLayout(cp=2)),
    "dp2": Setup(ParallelLayout(dp=2)),
    "ep2": Setup(ParallelLayout(dp=2, ep=2), rows_per_micro_batch=2),
    "pp2vpp2": Setup(ParallelLayout(pp=2, vpp=2), rows_per_micro_batch=2),
    "tp2cp2sp": Setup(ParallelLayout(tp=2, cp=2), sequence_parallel=True, rows_per_micro_batch=8),
    "tp2pp2sp": Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2", "num_hidden_layers": 4},
    "qwen3": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    **{name: settings for name, settings in FAMILIES.items() if "critic" not in settings},
}
CASES = [
    *(("qwen2", layout) for layout in LAYOUTS if layout != "ep2"),
    ("mixtral", "ep2"),
    *((model, "tp1") for model in MODELS if model != "qwen2"),
]
UNMARKED_ROW = 6


def marks(row, number):
    """Marked response tokens of a row: all but every third, and none of one row."""
    kept = torch.arange(len(row.response)) % 3 != 2
    return kept.long() * (number != UNMARKED_ROW)


def mean_hidden(place, path, setup, batch, share_prompts=False):
    """Vectors of this data-parallel rank's rows; None if the engine returns nothing."""
    with engine(place, path, setup) as built:
        mine, size = list(enumerate(batch))[built.runtime.coordinate.dp :: setup.layout.dp], setup.rows_per_micro_batch
        groups = [mine[start : start + size] for start in range(0, len(mine), size)]
        packed = [
            PackedMicroBatch.from_rows(
                [(row.prompt, row.response) for _, row in group],
                {POOLED: torch.cat([marks(row, number) for number, row in group])},
                share_prompts=share_prompts,
                at_tokens=True,
            )
            for group in groups
        ]
        means = built.mean_hidden(packed)
        return None if means is None else list(torch.cat(means))


class Reference:
    """A saved model, and plain transformers' vectors of the rows."""

    def __init__(self, path, settings):
        self.path = path
        self.model = save_model(path, **settings)
        self.vectors = self.of(rows())

    def of(self, batch):
        vectors = []
        for number, row in enumerate(batch):
            with torch.no_grad():
                output = self.model(torch.cat([row.prompt, row.response])[None], output_hidden_states=True)
            states = output.hidden_states[-1][0, len(row.prompt) :]
            chosen = [state for state, kept in zip(states, marks(row, number), strict=True) if kept]
            vectors.append(sum(chosen) / len(chosen) if chosen else torch.zeros(states.shape[1]))
        return vectors


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {name: Reference(tmp_path_factory.mktemp(name), settings) for name, settings in MODELS.items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_mean_hidden_states_equal_hugging_face(pool, references, model, layout):
    setup, reference = LAYOUTS[layout], references[model]
    answers = pool.run(mean_hidden, setup.layout.world_size, reference.path, setup, rows())
    for rank, answer in enumerate(answers):
        where = setup.layout.coordinate(rank)
        assert (answer is not None) == (where.pp == setup.layout.pp - 1)
        for ours, theirs in zip(
            answer or [], reference.vectors[where.dp :: setup.layout.dp], strict=answer is not None
        ):
            assert ours.dtype is torch.float32 and (ours - theirs).abs().max() < 1e-5


def test_mean_hidden_states_with_shared_prompts(pool, references):
    reference, setup = references["qwen3"], LAYOUTS["tp1"]._replace(rows_per_micro_batch=8)
    batch = [row._replace(prompt=rows()[number % 2].prompt) for number, row in enumerate(rows())]
    (answer,) = pool.run(mean_hidden, 1, reference.path, setup, batch, True)
    for ours, theirs in zip(answer, reference.of(batch), strict=True):
        assert (ours - theirs).abs().max() < 1e-5
    assert [bool(vector.any()) for vector in answer] == [number != UNMARKED_ROW for number in range(len(batch))]
