"""Sums of a micro-batch's losses and metrics, against loops over rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.megatron import PackedMicroBatch
from megarl.workers.base import LOSS_WEIGHT, TOKEN_MEAN_WEIGHT, TokenLosses, weighted_sums

ROWS = st.lists(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=5), min_size=1, max_size=6
)  # of each response token: is it trained, has it the flag


@settings(max_examples=60)
@given(ROWS)
def test_rows_count_whose_trained_tokens_all_have_the_flag(rows):
    tokens = [token for row in rows for token in row]
    trained = torch.tensor([float(is_trained) for is_trained, _ in tokens])
    flags = torch.tensor([flag for _, flag in tokens], dtype=torch.bool)
    micro_batch = PackedMicroBatch.from_rows(
        [(torch.tensor([1]), torch.full((len(row),), 2)) for row in rows],
        {LOSS_WEIGHT: trained, TOKEN_MEAN_WEIGHT: trained / 7},
    )
    losses = TokenLosses(trained, {}, {}, {"solved": flags})
    _, metrics = weighted_sums(lambda outputs, batch: losses, 4, None, micro_batch)
    kept = [[flag for is_trained, flag in row if is_trained] for row in rows]
    assert metrics["solved"].item() == sum(bool(row) and all(row) for row in kept) / 4
