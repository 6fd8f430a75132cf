"""Rewards of question answering with search, with cases written by hand."""

import pytest

from megarl.rewards.rules import search_exact_match, search_f1, search_structure, search_substring_match


def score(text, truth):
    return search_exact_match("d", text, truth, {})


@pytest.mark.parametrize(
    ("text", "truth", "right", "pred"),
    [
        ("<answer> The  Eiffel Tower. </answer>", {"target": ["eiffel tower"]}, 1.0, "eiffel tower"),
        ("<answer>7</answer>", 7, 1.0, "7"),
        ("<answer>8</answer> no, <answer>7</answer>", ["6", "7"], 1.0, "7"),
        ("<answer>7</answer> no, <answer>8</answer>", ["6", "7"], 0.0, "8"),
        ("<answer>8</answer><information>Doc <answer>7</answer></information>", "7", 0.0, "8"),
        ("7", "7", 0.0, None),
        ("<answer>17</answer>", "7", 0.0, "17"),
    ],
)
def test_last_answer_outside_documents_counts(text, truth, right, pred):
    assert score(text, truth) == {"score": right, "answered": float("<answer>" in text), "pred": pred}


def test_ground_truth_without_answer_is_an_error():
    with pytest.raises(ValueError, match="holds no answer"):
        score("<answer>7</answer>", {"target": []})


@pytest.mark.parametrize(
    ("answer", "right", "f1", "sub"),
    [
        # SQuAD's F1 by hand: a word counts as often as it occurs in both
        ("the cat sat on the mat", "a cat on a mat", 2 * (3 / 4) * 1 / (3 / 4 + 1), 0.0),
        ("Paris, France", "Paris", 2 / 3, 1.0),
        ("Paris", "Paris, France", 2 / 3, 0.0),
        ("yes yes no", "yes no no", 2 / 3, 0.0),
        ("London", "Paris", 0.0, 0.0),
    ],
)
def test_f1_and_substring(answer, right, f1, sub):
    text = f"<answer>{answer}</answer>"
    assert search_f1("d", text, ["nothing here", right], {})["score"] == pytest.approx(f1)
    assert search_substring_match("d", text, [right], {})["score"] == sub
    assert search_f1("d", answer, right, {}) == {"score": 0.0, "answered": 0.0, "pred": None}


def test_format_score():
    assert search_exact_match("d", "<answer>8</answer>", "7", {}, format_score=0.1)["score"] == 0.1
    assert search_exact_match("d", "8", "7", {}, format_score=0.1)["score"] == 0.0
    assert search_exact_match("d", "<answer>7</answer>", "7", {}, format_score=0.1)["score"] == 1.0


SEARCHED = "<think>a</think> <search>q</search>\n<information>Doc 1: it is Seven.</information> <think>b</think>"


@pytest.mark.parametrize(
    ("text", "formed", "score"),
    [
        (f"{SEARCHED}<answer>seven</answer>", True, 1.0),
        ("<think>a</think><answer>seven</answer>\n", True, 1.0),
        ("<answer>seven</answer>", False, 0.8),
        (f"{SEARCHED}<answer>eight</answer>", True, 0.3),
        ("<think>a</think><answer>eight</answer>", True, 0.2),
        ("<answer>eight</answer>", False, 0.1),
        (SEARCHED, False, 0.0),
        ("<think>a</think> so <answer>eight</answer>", False, 0.1),
        ("<think>a</think><search>q</search><answer>eight</answer>", False, 0.1),
        ("<think>a<think>b</think></think><answer>eight</answer>", False, 0.1),
        ("<think>a</think><answer>eight</answer><think>b</think>", False, 0.1),
        ("", False, 0.0),
    ],
)
def test_search_structure(text, formed, score):
    result = search_structure("d", text, {"target": ["seven"]}, {})
    assert result["format"] == formed and result["score"] == pytest.approx(score)
