"""Memory of the engine during inference: logits of one micro-batch at a time."""

import pytest
from alive import Alive
from engine_cases import Setup, engine, micro_batches
from tiny_models import TEMPERATURE, rows_of, save_model

from megarl.megatron import OutputOptions
from megarl.models import ParallelLayout

VOCAB, FLOAT32 = 8192, 4
"""Large enough that logits dominate the memory."""
PROMPT, RESPONSE = 4, 28
READ = {1: (28,), 2: (12, 16)}
"""Tokens of a row whose logits each context-parallel rank holds. Of two ranks, the first has tokens 0 to 7 and 24 to
31; logits are read at tokens 3 to 30.

"""
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "cp2": ParallelLayout(cp=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2", vocab_size=VOCAB, num_hidden_layers=4)
    return path


def peak(place, path, setup, rows, with_entropy):
    """Peak bytes besides weights during the log-probs of all micro-batches."""
    with engine(place, path, setup) as built:
        with Alive([param.data for chunk in built.chunks for param in chunk.parameters()]) as alive:
            built.forward(micro_batches(rows, setup), OutputOptions(TEMPERATURE, with_entropy))
        return alive.peak


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_micro_batch_of_logits_is_alive_at_a_time(pool, path, name, with_entropy):
    """The logits, the shifted ones and their exponentials, which entropies reuse."""
    layout = LAYOUTS[name]
    setup = Setup(layout, rows_per_micro_batch=1)
    actual = pool.run(peak, layout.world_size, path, setup, rows_of([(PROMPT, RESPONSE)] * 4), with_entropy)
    for rank, most in enumerate(actual):
        place = layout.coordinate(rank)
        if place.pp == layout.pp - 1:
            logits = READ[layout.cp][place.cp] * VOCAB * FLOAT32 // layout.tp
            assert most == pytest.approx(3 * logits, rel=0.05), f"rank {rank}"
