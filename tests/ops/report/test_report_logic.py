"""Computations of the page's script, in a JavaScript engine without a browser, against Python."""

import json
import math
import struct
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import pytest
import quickjs
from hypothesis import given
from hypothesis import strategies as st

from megarl.tracking.token_columns import TokenValues

Call = Callable[..., Any]
ROLLOUTS = {
    "run": [0, 0, 1, 1],
    "step": [1, 5, 1, 7],
    "kind": ["train", "validation", "train", "validation"],
    "input": ["two plus two", "Three", "two plus two", "Three"],
    "output": ["it is four", "é FOUR", "five it", "three"],
    "gts": ["4", "3", "4", "3"],
    "images": [None, ["a1"], None, ["a1"]],
    "source": ["sums", "names", "sums", "names"],
    "score": [1.0, None, 0.0, 0.5],
    "length": [3, 1, None, 9],
}


@pytest.fixture(scope="module")
def call():
    """Call a function of the page's script with plain values; the result is JSON."""
    context = quickjs.Context()
    context.eval(resources.files("megarl.ops.report").joinpath("page", "logic.js").read_text(encoding="utf-8"))

    def run(function, *values):
        text = context.eval(f"JSON.stringify({function}({', '.join(json.dumps(value) for value in values)}))")
        return json.loads(text)

    return run


def rows(call, **filters):
    searched = "(rollouts, filters) => chooseRows(rollouts, filters, (index) => searchText(rollouts, index))"
    return call(f"({searched})", ROLLOUTS, filters)


@given(st.integers(0, 0xFFFF))
def test_half_precision_matches_python(call, word):
    (number,) = struct.unpack("<e", struct.pack("<H", word))
    function = "((word) => { const read = halfFloat(word); return Number.isFinite(read) ? read : String(read); })"
    read = call(function, word)
    if math.isfinite(number):
        assert read == number
    else:
        assert read == ("NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity")


@given(st.text(alphabet="aé🙂\n<", max_size=40), st.data())
def test_tokens_match_pythons_encoding(call, text, data):
    """Characters are code points, unlike in JavaScript's strings."""
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = [*borders, len(text)]
    counts = [end - begin for begin, end in zip([0, *borders], ends, strict=True)]
    values = np.arange(len(counts)) / 4
    coded = TokenValues.of(counts, {"a": values, "gone": np.where(values == 0.25, np.nan, 1.0)}).encoded()
    tokens = call("tokensOf", text, coded)
    assert [token["text"] for token in tokens] == [text[e - c : e] for c, e in zip(counts, ends, strict=True)]
    assert [token["values"]["a"] for token in tokens] == values.tolist()
    assert ["gone" in token["values"] for token in tokens] == [value != 0.25 for value in values]


def test_masked_spans(call):
    parts = call("maskedParts", "ab🙂cdef", [[1, 3], [5, 7]])
    texts = [(part["text"], part["masked"]) for part in parts]
    assert texts == [("a", False), ("b🙂", True), ("cd", False), ("ef", True)]


def test_smoothing_is_an_unbiased_exponential_mean(call):
    assert call("smooth", [1, 3, 0], 0) == [1, 3, 0]
    # by hand: weights 0.5 and 0.25 of the latest and the one before, over 0.75
    expected = [1.0, (0.5 * 3 + 0.25 * 1) / 0.75, (0.25 * 3 + 0.125) / 0.875]
    assert call("smooth", [1, 3, 0], 0.5) == pytest.approx(expected)
    assert call("smooth", [2] * 50, 0.98) == pytest.approx([2.0] * 50)


def test_steps_are_converted_to_time(call):
    clock = {"steps": [0, 10, 20], "seconds": [5, 105, 125]}
    steps = [-1, 0, 5, 10, 15, 20, 99]
    expected = np.interp(steps, clock["steps"], clock["seconds"])
    assert [call("secondsAt", clock, step) for step in steps] == pytest.approx(expected.tolist())
    assert call("secondsAt", {"steps": [], "seconds": []}, 3) is None
    run = {"axes": [[1, 20]], "metrics": {"a": {"x": 0, "y": [1, 2]}, "never": {"x": 0, "y": []}}, "clock": clock}
    assert call("curveOf", run, "a", "time")["x"] == pytest.approx([15 / 3600, 125 / 3600])
    assert call("curveOf", run, "a", "step")["x"] == [1, 20]
    assert call("curveOf", run, "b", "step") is None and call("curveOf", run, "never", "step") is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 1]), (0, 7, list(range(8))), (0, 63, [0, 10, 20, 30, 40, 50, 60]), (3, 5, [3, 4, 5]), (4, 4, [4])],
)
def test_labels_of_ranks_are_whole_and_differ(call, low, high, ticks):
    axis = call("wholeAxis", low, high)
    assert axis["tickmode"] == "linear" and axis["dtick"] == int(axis["dtick"]) >= 1
    first = math.ceil((low - axis["tick0"]) / axis["dtick"]) * axis["dtick"] + axis["tick0"]
    assert list(range(first, high + 1, axis["dtick"])) == ticks


@pytest.mark.parametrize(
    ("curves", "share", "expected"),
    [
        ([{"y": [0, 0, 0]}], True, [-0.03, 1.05]),
        ([{"y": [0.2, 0.9]}], True, [-0.03, 1.05]),
        ([{"y": [0.001, 0.002]}], True, [-0.00006, 0.0021]),
        ([{"y": [0.1], "low": [0.0], "high": [0.6]}], True, [-0.03, 1.05]),
        ([{"y": [-0.5, 0.5]}], True, "normal"),
        ([{"y": [0.5, 1.5]}], True, "nonnegative"),
        ([{"y": [0, 0]}], False, "nonnegative"),
        ([{"y": [0, 3]}, {"y": [-1]}], False, "normal"),
        ([], True, "normal"),
    ],
)
def test_axis_of_values(call, curves, share, expected):
    """A constant 0 has no axis from -1 to 1."""
    axis = call("valueAxis", curves, share)
    if isinstance(expected, str):
        assert axis == {"rangemode": expected}
    else:
        assert axis["range"] == pytest.approx(expected)


def test_axes_of_charts():
    """Two ranks and three steps: whole labels; a share that is 0: an axis from 0 to 1."""
    page, context = resources.files("megarl.ops.report").joinpath("page"), quickjs.Context()
    context.eval("var hiddenRuns = new Set(), isDark = () => false, IntersectionObserver = class {};")
    for name in ("logic.js", "curves.js"):
        context.eval(page.joinpath(name).read_text(encoding="utf-8"))
    ranks = {"steps": [1, 2, 3], "ranks": [0, 1], "each": 1, "mean": [1, 1, 1], "load": [[1, 1, 1], [1, 1, 1]]}
    run = {"name": "r", "ranks": {"m": ranks}, "axes": [[1, 2, 3]], "metrics": {"s": {"x": 0, "y": [0, 0, 0], "n": 3}}}
    context.eval(f"var data = {json.dumps({'runs': [run]})};")

    def layout(function, chart):
        return json.loads(context.eval(f"JSON.stringify({function}({json.dumps(chart)}))"))

    axes = layout("rankLayout", {"kind": "ranks", "series": [{"metric": "m", "label": "m"}]})
    assert axes["yaxis"]["range"] == [-0.5, 1.5] and axes["yaxis"]["dtick"] == axes["xaxis"]["dtick"] == 1
    share = {"kind": "line", "share": True, "series": [{"metric": "s", "label": "s"}]}
    axes = layout("layout", share)
    assert axes["yaxis"]["range"] == pytest.approx([-0.03, 1.05]) and axes["xaxis"]["dtick"] == 1
    context.eval("curveView.log = true")
    axes = layout("layout", share)
    assert axes["yaxis"]["type"] == "log" and "range" not in axes["yaxis"]


def test_search_and_filters(call):
    assert rows(call) == [0, 2, 1, 3], "by step"
    assert rows(call, text="FOUR") == [0, 1] and rows(call, text="it four") == [0]
    assert rows(call, text='"two plus"') == [0, 2] and rows(call, text='"plus two" names') == []
    assert rows(call, text="names") == [1, 3], "the data source is searched too"
    assert rows(call, low="0.5") == [0, 3] and rows(call, high="0.5") == [2, 3], "no score is in no range"
    assert rows(call, low="0", high="0") == [2]
    assert rows(call, firstStep="2", lastStep="5") == [1]
    assert rows(call, shortest="2") == [0, 3] and rows(call, longest="3") == [0, 1]
    assert rows(call, kind="validation", run="1") == [3] and rows(call, source="sums") == [0, 2]
    assert rows(call, run="0") == [0, 1], "the first run has the number 0"


GROUPED = {
    "run": [0] * 8,
    "step": [2, 2, 2, 2, 2, 2, 1, 2],
    "kind": ["train"] * 7 + ["validation"],
    "input": ["solved", "mixed", "failing", "mixed", "solved", "failing", "mixed", "mixed"],
    "score": [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, None],
    "length": [1, 8, 3, 4, 5, 6, 7, 2],
    "images": [None] * 8,
}


def test_answers_are_grouped_by_prompt_with_failing_and_mixed_groups_first(call):
    chosen = "(rollouts, filters) => chooseRows(rollouts, filters, () => '', groupAnswers(rollouts))"
    order = call(f"({chosen})", GROUPED, {"sort": "step", "down": True})
    assert order == [2, 5, 3, 1, 0, 4, 7, 6], "the latest step, its failing, mixed, solved and unscored prompts"
    by_length = call(f"({chosen})", GROUPED, {"sort": "length", "down": True})
    assert by_length == [1, 3, 6, 5, 2, 4, 0, 7], "a group is at the place of its first answer"
    sizes = call("((rollouts) => groupAnswers(rollouts).of.map((group) => group.rows.length))", GROUPED)
    assert sizes == [2, 2, 2, 2, 2, 2, 1, 1], "a step and a validation have groups of their own"


def test_description_of_a_group(call):
    describe = "((rollouts, row) => describeGroup(groupAnswers(rollouts).of[row]))"
    assert call(describe, GROUPED, 1) == "2 answers, mean reward 0.5, standard deviation 0.7071"
    assert call(describe, GROUPED, 0) == "2 answers, all with reward 1"
    assert call(describe, GROUPED, 7) == "1 answer, none with a reward"


def test_equal_texts_with_other_images_are_other_prompts(call):
    images = [None, ["a1"], None, ["b2"], None, None, None, None]
    sizes = "((rollouts) => groupAnswers(rollouts).of.map((group) => group.rows.length))"
    assert call(sizes, GROUPED | {"images": images}) == [2, 1, 2, 1, 2, 2, 1, 1]
    shared = call("sharedPrompts", ROLLOUTS | {"images": [None, ["a1"], None, ["b2"]]})
    assert [prompt["input"] for prompt in shared] == ["two plus two"]


@pytest.fixture
def elements():
    """The script of the answers, with elements as plain objects, and one thumbnail."""
    page, context = resources.files("megarl.ops.report").joinpath("page"), quickjs.Context()
    made = "({ tag, name, text, parts: [], append(...parts) { this.parts.push(...parts); } })"
    context.eval(f"var element = (tag, name, text) => {made};")
    context.eval(page.joinpath("rollouts.js").read_text(encoding="utf-8"))
    context.eval('var data = { thumbnails: { a1: "UklG" } };')
    return context


def test_images_of_a_text_are_elements_in_order(elements):
    (box,) = json.loads(elements.eval('JSON.stringify(imageElements(["a1", "b2"]))'))
    image, text = box["parts"]
    assert (image["tag"], image["src"], image["alt"]) == ("img", "data:image/webp;base64,UklG", "image 1 of 2")
    assert (text["tag"], text["text"]) == ("span", "image 2 of 2: not kept")
    assert elements.eval("imageElements(null).length") == 0


def test_images_of_later_turns_are_beside_the_answer(elements):
    elements.eval('rollouts = { input: ["<image>?"], output: ["<image>2"], images: [["b2"]], later_images: [["a1"]] };')
    prompt, answer = json.loads(elements.eval('JSON.stringify(["input", "output"].map((name) => cellOf(name, 0)))'))
    assert (prompt["parts"][0]["parts"][0]["tag"], answer["parts"][0]["parts"][0]["tag"]) == ("span", "img")


def test_sorting_puts_missing_values_last(call):
    assert rows(call, sort="score") == [2, 3, 0, 1] and rows(call, sort="score", down=True) == [0, 3, 2, 1]
    assert rows(call, sort="length", down=True) == [3, 0, 1, 2]
    assert rows(call, sort="input") == [1, 3, 0, 2], "sorting is stable"


def test_colour_strength(call):
    signed = {"scale": "signed", "low": -1, "high": 2}
    assert [call("strength", signed, value) for value in (-9, -1, 0, 1, 9)] == [-1, -0.5, 0, 0.5, 1]
    assert call("strength", {"scale": "signed", "low": 0, "high": 0}, 3) == 1
    low = {"scale": "low", "low": -4, "high": 0}
    assert [call("strength", low, value) for value in (-9, -4, -1, 0, 1)] == [-1, -1, -0.25, 0, 0]
    high = {"scale": "high", "low": 0, "high": 4}
    assert [call("strength", high, value) for value in (0, 1, 9)] == [0, 0.25, 1]
    assert call("strength", {"scale": "high", "low": 1, "high": 1}, 1) == 0
    mask = {"scale": "mask", "low": 0, "high": 1}
    assert [call("strength", mask, value) for value in (0, 1)] == [-1, 0]
    assert call("strength", mask) == 0


def test_shared_prompts_of_runs(call):
    shared = call("sharedPrompts", ROLLOUTS)
    assert [(prompt["input"], prompt["images"], prompt["answers"]) for prompt in shared] == [
        ("Three", ["a1"], {"0": [1], "1": [3]}), ("two plus two", None, {"0": [0], "1": [2]}),
    ]  # fmt: skip
    several = {"step": [1, 5, 5, 9]}
    assert call("latestAnswers", several, [0, 1, 2, 3], "") == [3]
    assert call("latestAnswers", several, [0, 1, 2, 3], 8) == [1, 2]
    assert call("latestAnswers", several, [0, 1, 2, 3], 0) == []


def test_number_formatting(call):
    values = [None, 0, 0.123456, 1234.5678, 1e-7, 12345678, -0.5]
    assert [call("formatNumber", value) for value in values] == [
        "\u2013", "0", "0.1235", "1234.57", "1.00e-7", "1.23e+7", "-0.5",
    ]  # fmt: skip
    curve = {"x": [1, 2], "steps": [1, 2], "y": [0.5, 2], "low": [0.25, 1]}
    assert call("describeCurve", "KL", curve) == "KL: from 0.5 at step 1 to 2 at step 2, between 0.25 and 2"
