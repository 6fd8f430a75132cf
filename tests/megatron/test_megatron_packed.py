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


TOKENS = st.lists(st.sampled_from([-7, 3, 2**40]), max_size=6)
PARTS = st.tuples(TOKENS.filter(len), TOKENS)


def tree_nodes(rows):
    """For each token of each row, the tokens up to it and their experts: equal ones are one node of a prefix tree."""
    return [[tuple(row[: end + 1]) for end in range(len(row))] for row in rows]


@settings(max_examples=300)
@given(st.lists(PARTS, min_size=1, max_size=7), st.booleans(), st.data())
def test_equal_beginnings_are_stored_once(parts, replays, data):
    rows = [tuple(torch.tensor(part, dtype=torch.int64) for part in row) for row in parts]
    routes = None
    if replays:
        experts = [data.draw(st.lists(st.integers(0, 1), min_size=len(p + r), max_size=len(p + r))) for p, r in parts]
        routes = [torch.tensor(each, dtype=torch.int16).reshape(-1, 1, 1) for each in experts]
    packed, plain = (PackedMicroBatch.from_rows(rows, share_prompts=share, routes=routes) for share in (True, False))
    assert plain.shared is None and packed.lengths == plain.lengths and packed.order == plain.order
    nodes = tree_nodes(
        [list(zip(p + r, experts[n] if replays else p + r, strict=True)) for n, (p, r) in enumerate(parts)]
    )
    stored = len(set().union(*nodes))
    assert packed.num_tokens in (stored, plain.num_tokens)
    if packed.shared is None:
        repeats = len({tuple(prompt) for prompt, _ in parts}) < len(parts)
        assert stored == plain.num_tokens or (not repeats and 32 * (plain.num_tokens - stored) < plain.num_tokens)
        assert torch.equal(packed.tokens, plain.tokens) and torch.equal(packed.read_at, plain.read_at)
    else:
        assert torch.equal(packed.tokens[packed.shared.spread], plain.tokens)
        assert torch.equal(packed.shared.spread[packed.shared.kept], torch.arange(stored))
        assert torch.equal(packed.shared.kept, packed.shared.kept.sort().values)
        by_row = packed.per_row(torch.arange(stored))
        numbers = {
            node: number
            for row, of_row in enumerate(nodes)
            for node, number in zip(of_row, by_row[row].tolist(), strict=True)
        }
        assert sorted(numbers.values()) == list(range(stored)) and len(numbers) == stored
    for ours, theirs in zip(packed.per_row(packed.tokens), rows, strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    if routes is not None:
        for ours, theirs in zip(packed.per_row(packed.routes), routes, strict=True):
            assert torch.equal(ours, theirs)
    for form in ({}, {"at_tokens": True}, {"at_end": True}):
        shared, apart = (
            PackedMicroBatch.from_rows(rows, share_prompts=share, routes=routes, **form) for share in (True, False)
        )
        assert torch.equal(shared.targets, apart.targets)
        whole = torch.arange(apart.num_tokens) if shared.shared is None else shared.shared.spread
        assert torch.equal(shared.read_at, whole[apart.read_at])


def test_different_prompts_share_what_is_worth_the_copies():
    first, second = torch.arange(40), torch.arange(40).flip(0)
    for common, shares in ((5, False), (6, True)):  # two rows of 85 or 86 tokens
        rows = [(torch.cat([torch.full((common,), 77), own]), own) for own in (first, second)]
        packed = PackedMicroBatch.from_rows(rows, share_prompts=True)
        assert (packed.shared is not None) == shares
        assert packed.num_tokens == 2 * (common + 80) - common * shares


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
