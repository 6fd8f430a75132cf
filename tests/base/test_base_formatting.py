"""Numbers as users read them."""

from megarl.base.formatting import (
    GIB,
    MIB,
    count_noun,
    duration,
    gib,
    gigabytes,
    metric_count,
    rough,
    table_lines,
)


def test_count_noun():
    assert [count_noun(count, "node") for count in (0, 1, 2, 1024)] == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]


def test_gib_keeps_three_decimals_of_small_sizes():
    assert [gib(n) for n in (0, 3 * MIB, 51 * MIB, 52 * MIB, 1.25 * GIB, 2048 * GIB)] == [
        *("0.000", "0.003", "0.050", "0.1", "1.2", "2,048.0")
    ]


def test_durations():
    assert [duration(seconds) for seconds in (8.26, 59.9, 192.2, 3599.9, 7500)] == [
        "8.3 s", "59.9 s", "3 min 12 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_sizes_counts_and_seconds():
    assert [gigabytes(nbytes) for nbytes in (3.1e6, 12.44e9)] == ["3.1 MB", "12.4 GB"]
    counts = {
        12: "12",
        1500: "1.5 K",
        494e6: "494 M",
        2.27e9: "2.27 B",
        3e12: "3 T",
        4.5e15: "4.5 P",
        1.92e19: "19.2 E",
    }
    assert [metric_count(number) for number in counts] == list(counts.values())


def test_estimates_have_two_digits():
    assert [rough(number) for number in (0, 0.01234, 1.26, 12.6, 987.0, 12345.0)] == [
        "0",
        "0.012",
        "1.3",
        "13",
        "990",
        "12,000",
    ]


def test_columns_are_aligned():
    rows = [["name", "s", "note"], ["generation", "1.5", ""], ["sync", "12.25", "slow"]]
    assert table_lines(rows, "<>", indent="  ") == [
        "  name            s  note",
        "  generation    1.5",
        "  sync        12.25  slow",
    ]


def test_short_rows_and_empty_tables():
    assert table_lines([["a"], ["bb", "c"]]) == ["a", "bb  c"] and table_lines([]) == []
