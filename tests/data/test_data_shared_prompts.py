import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import DataProto, fewest_micro_batches
from megarl.data.shared_prompts import (
    SharedPromptRows,
    micro_batch_units,
    partition_by_prompt,
    prompt_digests,
    split_units,
)
from megarl.models.sequence_cost import SequenceCost

COST = SequenceCost(linear=10.0, quadratic=1.0)


@st.composite
def shared_rows(draw):
    """Rows of up to five prompts in random order."""
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    numbers = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=12))
    responses = draw(st.lists(st.integers(0, 9), min_size=len(numbers), max_size=len(numbers)))
    return SharedPromptRows([prompts[number] for number in numbers], responses, numbers)


def tokens_of(rows, chosen):
    """Count tokens one by one: by prompt and position, or by row and position."""
    tokens = set()
    for row in chosen:
        tokens |= {("prompt", rows.prompt_ids[row], index) for index in range(rows.prompt_lengths[row])}
        tokens |= {("response", row, index) for index in range(rows.response_lengths[row])}
    return len(tokens)


def test_rows_are_grouped_by_prompt_tokens():
    batch = DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 5, 6], [5, 5, 6], [0, 5, 6], [0, 0, 6]]),  # 0 is padding, but in the last row
            "responses": torch.tensor([[1, 2], [1, 2], [3, 0], [4, 5]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
        }
    )
    rows = SharedPromptRows.of(batch)
    assert rows.prompt_lengths == [2, 3, 2, 2]
    assert rows.response_lengths == [2, 2, 1, 2]
    assert rows.by_prompt(range(4)) == [[0, 2], [1], [3]]
    digests = prompt_digests([row.numpy() for row in batch.unpadded("prompts")])
    without_prompts = batch.with_columns({"prompts": torch.ones(4, 3).long(), "prompt_digests": digests})
    assert SharedPromptRows.of(without_prompts) == rows


def test_prompts_with_other_experts_are_other_prompts():
    prompts, mask = torch.tensor([[5, 6], [5, 6], [5, 6]]), torch.ones(3, 3).long()
    batch = DataProto.from_dict({"prompts": prompts, "responses": prompts[:, :1], "attention_mask": mask})
    routes = [
        torch.tensor(experts, dtype=torch.int16).reshape(3, 1, 1) for experts in ([0, 1, 1], [0, 1, 0], [0, 0, 1])
    ]
    assert SharedPromptRows.of(batch, routes).by_prompt(range(3)) == [[0, 1], [2]]


@settings(max_examples=100)
@given(shared_rows(), st.integers(18, 60))
def test_micro_batch_units_fit_and_need_no_more_micro_batches(rows, budget):
    chosen = list(range(len(rows.prompt_ids)))
    units = micro_batch_units(rows, chosen, budget)
    assert sorted(itertools.chain(*units)) == chosen
    for unit in units:
        assert len({rows.prompt_ids[row] for row in unit}) == 1
        assert rows.tokens(unit) == tokens_of(rows, unit) <= budget
    alone = [rows.prompt_lengths[row] + rows.response_lengths[row] for row in chosen]
    needed = fewest_micro_batches([rows.tokens(unit) for unit in units], max_tokens=budget)
    assert needed <= fewest_micro_batches(alone, max_tokens=budget)


@settings(max_examples=60)
@given(shared_rows(), st.integers(1, 20))
def test_split_units_reaches_the_count(rows, count):
    chosen = list(range(len(rows.prompt_ids)))
    units = micro_batch_units(rows, chosen, 200)
    parts = split_units(units, count)
    assert sorted(itertools.chain(*parts)) == chosen
    assert len(parts) == max(len(units), min(count, len(chosen)))


def test_the_cost_counts_a_shared_prompt_once_and_attention_for_every_row():
    rows = SharedPromptRows([4, 4, 3], [2, 1, 5], [0, 0, 1])
    assert rows.cost([0, 1, 2], COST) == 10 * (4 + 2 + 1 + 3 + 5) + 6**2 + 5**2 + 8**2


@settings(max_examples=60)
@given(shared_rows(), st.integers(1, 3), st.booleans())
def test_ranks_get_complete_prompt_groups(rows, dp, equal):
    plan = partition_by_prompt(rows, COST, dp, len(rows.prompt_ids), equal=equal)
    sizes = [len(group) for group in rows.by_prompt(range(len(rows.prompt_ids)))]
    if plan is None:
        assert len(sizes) < dp or max(sizes) == 1 or (equal and (len(set(sizes)) > 1 or len(sizes) % dp))
        return
    assert sorted(itertools.chain(*plan)) == list(range(len(rows.prompt_ids)))
    owners = {(rows.prompt_ids[row], rank) for rank, part in enumerate(plan) for row in part}
    assert len(owners) == len(sizes)
    assert not equal or len({len(part) for part in plan}) == 1
