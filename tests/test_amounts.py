"""Numbers as users read them."""

from __future__ import annotations

from megarl.amounts import GIB, MIB, gib, some


def test_nouns_agree_with_their_count() -> None:
    assert [some(count, "node") for count in (0, 1, 2, 1024)] == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]


def test_small_amounts_keep_digits_that_say_something() -> None:
    assert [gib(n) for n in (0, 3 * MIB, 51 * MIB, 52 * MIB, 1.25 * GIB, 2048 * GIB)] == [
        *("0.000", "0.003", "0.050", "0.1", "1.2", "2,048.0")
    ]
