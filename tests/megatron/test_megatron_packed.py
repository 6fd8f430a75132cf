import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.base.errors import DataError
from megarl.megatron import PackedMicroBatch

ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=9)


def make_rows(lengths):
    """Rows whose tokens are all different, so that each can be traced."""
    tokens = iter(range(1, 1000))
    return [tuple(torch.tensor([next(tokens) for _ in range(n)], dtype=torch.int64) for n in row) for row in lengths]


@settings(max_examples=60)
@given(ROWS)
def test_predictors_point_at_the_token_before_each_response_token(lengths):
    rows = make_rows(lengths)
    packed = PackedMicroBatch.from_rows(rows)
    expected_before, expected_targets = [], []
    for prompt, response in rows:
        tokens = [*prompt.tolist(), *response.tolist()]
        for index in range(len(prompt), len(tokens)):
            expected_before.append(tokens[index - 1])
            expected_targets.append(tokens[index])
    assert packed.tokens[packed.read_at].tolist() == expected_before
    assert packed.targets.tolist() == expected_targets
    assert packed.num_tokens == sum(p + r for p, r in lengths)
    assert len(packed.targets) == len(expected_targets)
    for part, (_, response) in zip(packed.split(packed.targets), rows, strict=True):
        assert part.tolist() == response.tolist()


@settings(max_examples=60)
@given(ROWS, st.booleans())
def test_sequence_outputs_are_at_the_last_token(lengths, share):
    rows = make_rows(lengths)
    rows += [(rows[0][0], torch.tensor([501, 502]))]  # of a prompt that there is already
    packed = PackedMicroBatch.from_rows(rows, {"place": torch.arange(len(rows))}, share_prompts=share, at_end=True)
    last = [int(torch.cat(row)[-1]) for row in rows]
    assert packed.tokens[packed.read_at].tolist() == packed.targets.tolist() == last
    assert packed.response_lengths == (1,) * len(rows)
    assert [part.tolist() for part in packed.split(packed.columns["place"])] == [[row] for row in range(len(rows))]


@settings(max_examples=60)
@given(ROWS)
def test_sequences_are_stored_in_order_of_length(lengths):
    rows = make_rows(lengths)
    packed = PackedMicroBatch.from_rows(rows)
    whole = {tuple(torch.cat(row).tolist()) for row in rows}
    stored = [tuple(part.tolist()) for part in packed.tokens.split(packed.lengths)]
    assert set(stored) == whole
    assert [len(sequence) for sequence in stored] == sorted(p + r for p, r in lengths)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_shared_prompt_is_stored_once(prompts, data):
    numbers = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=9))
    responses = data.draw(st.lists(st.integers(0, 5), min_size=len(numbers), max_size=len(numbers)))
    drawn = [prompt for prompt, _ in make_rows([(length, 0) for length in prompts])]
    rows = [
        (drawn[number], response + 500)
        for number, (_, response) in zip(numbers, make_rows([(0, length) for length in responses]), strict=True)
    ]
    packed, plain = (PackedMicroBatch.from_rows(rows, share_prompts=share) for share in (True, False))
    assert packed.num_tokens == sum(prompts[number] for number in set(numbers)) + sum(responses)
    assert torch.equal(packed.tokens[packed.read_at], plain.tokens[plain.read_at])
    assert torch.equal(packed.targets, plain.targets)
    assert packed.lengths == plain.lengths
    for share in (True, False):
        themselves = PackedMicroBatch.from_rows(rows, share_prompts=share, at_tokens=True)
        assert torch.equal(themselves.tokens[themselves.read_at], plain.targets)
    if packed.shared is None:
        assert len(set(numbers)) == len(numbers)
        assert torch.equal(packed.tokens, plain.tokens)
    else:
        assert torch.equal(packed.tokens[packed.shared.spread], plain.tokens)
        assert torch.equal(packed.shared.spread[packed.shared.kept], torch.arange(packed.num_tokens))


def test_columns_keep_row_order():
    packed = PackedMicroBatch.from_rows(make_rows([(1, 2), (2, 1)]), {"weights": torch.arange(3.0)})
    assert packed.to(torch.device("cpu")).columns["weights"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("lengths", "columns", "code", "named"),
    [
        ([], None, "batch.no-rows", []),
        ([(2, 1), (0, 3)], None, "batch.empty-prompt", ["row 1"]),
        ([(1, 2)], {"advantages": torch.zeros(3)}, "batch.column-length", ["'advantages'", "3 entries", "2 response"]),
    ],
)
def test_malformed_rows_raise(lengths, columns, code, named):
    with raises(code, *named, error=DataError):
        PackedMicroBatch.from_rows(make_rows(lengths), columns)
