import pytest

from megarl.tracking.run_summary import duration, plain_summary, sparkline, summary_facts


def test_durations():
    assert [duration(seconds) for seconds in (8.26, 59.9, 192.2, 3599.9, 7500)] == [
        "8.3 s", "59.9 s", "3 min 12 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_sparkline_shows_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_what_is_not_known_is_left_out():
    assert summary_facts({"steps": None, "val_accuracy_before": None}) == []
    assert plain_summary({"val_accuracy_after": 0.5, "steps": 3}, "run") == [
        "run: finished", "  held-out accuracy: 0.500", "  steps: 3",
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "text"), [(0.3, 0.9, "(+0.600)"), (0.9, 0.3, "(-0.600)")])
def test_change_of_accuracy(before, after, text):
    ((label, fact),) = summary_facts({"val_accuracy_before": before, "val_accuracy_after": after})
    assert label == "held-out accuracy" and fact.endswith(text)
