"""Zig-zag division of packed sequences over context-parallel ranks covers every token once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.megatron import PackedMicroBatch
from megarl.megatron.layers.context_parallel import context_parallel_part, padded_lengths, rank_indices
from tests.megatron.test_megatron_packed import ROWS, make_rows

RANKS = st.integers(1, 5)
MULTIPLES = st.sampled_from([1, 2, 3, 4, 8])


def parts_of(packed, ranks, multiple):
    return [context_parallel_part(packed, ranks, rank, multiple) for rank in range(ranks)]


@settings(max_examples=80)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), RANKS, MULTIPLES)
def test_padding_is_minimal(lengths, ranks, multiple):
    padded = padded_lengths(lengths, ranks, multiple)
    unit = 2 * ranks if ranks > 1 else 1
    assert all(0 <= p - n < unit and p % unit == 0 for n, p in zip(lengths, padded, strict=False))
    share, rest = divmod(sum(padded), ranks)
    assert rest == 0
    assert share % multiple == 0
    assert padded_lengths(padded, ranks, multiple) == padded
    filler = padded[len(lengths) :]
    assert len(filler) <= 1
    # Any shorter filler would leave tokens that do not divide.
    assert all((sum(padded) - filler[0] + n) % (ranks * multiple) or n % unit for n in range(sum(filler)))


@settings(max_examples=80)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), RANKS)
def test_zigzag_balances_tokens_and_attention(chunks, ranks):
    lengths = [2 * ranks * chunk for chunk in chunks]
    held = [rank_indices(lengths, ranks, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert len({len(indices) for indices in held}) == 1
    assert len({int((positions[indices] + 1).sum()) for indices in held}) == 1


@settings(max_examples=80)
@given(ROWS, RANKS, MULTIPLES)
def test_parts_cover_every_token_once(lengths, ranks, multiple):
    packed = PackedMicroBatch.from_rows(make_rows(lengths))
    parts = parts_of(packed, ranks, multiple)
    whole: list[list[int]] = [[-1] * length for length in parts[0].lengths]
    for rank, part in enumerate(parts):
        assert len(part.tokens) == sum(part.lengths) // ranks
        assert len(part.tokens) % multiple == 0
        start = 0
        for sequence, length in zip(whole, part.lengths, strict=True):
            here = slice(start, start + length // ranks)
            pairs = list(zip(part.positions[here].tolist(), part.tokens[here].tolist(), strict=True))
            if ranks > 1:
                chunk = length // (2 * ranks)
                firsts = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
                assert [p for p, _ in pairs] == [first + i for first in firsts for i in range(chunk)]
            for position, token in pairs:
                assert sequence[position] == -1
                sequence[position] = token
            start = here.stop
    real = [list(tokens) for tokens in (part.tolist() for part in packed.tokens.split(packed.lengths))]
    padded = [tokens + [0] * (len(sequence) - len(tokens)) for tokens, sequence in zip(real, whole, strict=False)]
    assert whole[: len(real)] == padded
    assert not any(token for sequence in whole[len(real) :] for token in sequence)
    # Tokens that are not real: fewer than two per rank and sequence, beside the filler.
    computed = sum(len(part.tokens) for part in parts) - sum(len(sequence) for sequence in whole[len(real) :])
    assert 0 <= computed - packed.num_tokens <= (len(real) * (2 * ranks - 1) if ranks > 1 else 0)


@settings(max_examples=80)
@given(ROWS, RANKS, MULTIPLES)
def test_gathered_outputs_are_in_row_order(lengths, ranks, multiple):
    packed = PackedMicroBatch.from_rows(make_rows(lengths))
    parts = parts_of(packed, ranks, multiple)
    before, targets = packed.tokens[packed.read_at], packed.targets
    gathered = torch.full((ranks * parts[0].widest,), -1)
    for rank, part in enumerate(parts):
        assert torch.equal(part.tokens[part.read_at], before[part.local_indices])
        assert torch.equal(part.targets, targets[part.local_indices])
        assert part.local_indices.tolist() == sorted(part.local_indices.tolist())
        start = rank * part.widest
        gathered[start : start + len(part.local_indices)] = part.targets
    assert sorted(torch.cat([part.local_indices for part in parts]).tolist()) == list(range(len(targets)))
    for part in parts:
        assert torch.equal(gathered[part.sources], targets)


def test_single_rank_part_has_no_padding():
    packed = PackedMicroBatch.from_rows(make_rows([(3, 2), (1, 1), (2, 3)]))
    part = context_parallel_part(packed)
    assert torch.equal(part.tokens, packed.tokens)
    assert torch.equal(part.read_at, packed.read_at)
    assert part.lengths == packed.lengths == (2, 5, 5)
    assert part.runs() == ((1, 2), (2, 5))


def test_filler_is_a_separate_last_sequence():
    packed = PackedMicroBatch.from_rows(make_rows([(3, 2), (1, 1)]))
    assert context_parallel_part(packed, multiple=4).lengths == (2, 5, 1)
    assert context_parallel_part(packed, 2, 0, 4).lengths == (4, 8, 4)
    assert context_parallel_part(packed, 2, 0).runs() == ((1, 4), (1, 8))


def test_shared_prompts_raise_on_several_ranks():
    prompt = torch.tensor([5, 6])
    rows = [(prompt, torch.tensor([7])), (torch.tensor([9]), torch.tensor([8])), (prompt, torch.tensor([1, 2]))]
    packed = PackedMicroBatch.from_rows(rows, share_prompts=True)
    part = context_parallel_part(packed, multiple=4)
    assert part.tokens.tolist() == [9, 8, 5, 6, 7, 1, 2, 0]
    assert part.positions.tolist() == [0, 1, 0, 1, 2, 2, 3, 0]
    assert part.lengths == (2, 3, 4, 1)
    assert part.shared is not None
    assert part.tokens[part.shared.spread].tolist() == [9, 8, 5, 6, 7, 5, 6, 1, 2, 0]
    assert part.shared.spread[part.shared.kept].tolist() == list(range(8))
    assert part.read_at.tolist() == [3, 0, 3, 5]
    with raises("layout.cp-shared-prompts", "2 ranks"):
        context_parallel_part(packed, 2, 0)
