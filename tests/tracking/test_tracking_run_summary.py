import pytest

from megarl.tracking.run_summary import plain_summary, sparkline, summary_facts


def test_sparkline_shows_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_unknown_entries_are_skipped():
    assert summary_facts({"steps": None, "val_accuracy_before": None}) == []
    assert plain_summary({"val_accuracy_after": 0.5, "steps": 3}, "run") == [
        "run: finished", "  held-out accuracy: 0.500", "  steps: 3",
    ]  # fmt: skip


def test_a_single_accuracy_is_no_change():
    assert summary_facts({"val_accuracy_before": 0.5}) == [("held-out accuracy", "0.500 before training")]
    assert summary_facts({"val_accuracy_after": 0.597}) == [("held-out accuracy", "0.597")]


def test_an_early_end_is_named():
    assert plain_summary({"stopped": "Ctrl-C"}, "run") == ["run: ended early (Ctrl-C)"]


def test_output_that_a_full_disk_refused_is_counted():
    assert plain_summary({"refused_output": 12345}, "run") == [
        "run: finished",
        "  console output: 12,345 characters refused by a full disk; metrics and logs have the rest",
    ]


@pytest.mark.parametrize(("before", "after", "text"), [(0.3, 0.9, "(+0.600)"), (0.9, 0.3, "(-0.600)")])
def test_accuracy_change_is_formatted(before, after, text):
    ((label, fact),) = summary_facts({"val_accuracy_before": before, "val_accuracy_after": after})
    assert label == "held-out accuracy" and fact.endswith(text)
