from megarl.base.formatting import table_lines


def test_columns_are_aligned():
    rows = [["name", "s", "note"], ["generation", "1.5", ""], ["sync", "12.25", "slow"]]
    assert table_lines(rows, "<>", indent="  ") == [
        "  name            s  note",
        "  generation    1.5",
        "  sync        12.25  slow",
    ]


def test_short_rows_and_empty_tables():
    assert table_lines([["a"], ["bb", "c"]]) == ["a", "bb  c"] and table_lines([]) == []
