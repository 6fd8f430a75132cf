"""Rewards of mathematics, with cases written by hand; sympy defines equality of expressions."""

import pytest
import sympy
from support.expected_errors import raises

from megarl.rewards.rules import gsm8k, math_dapo, mathematics
from megarl.rewards.rules.mathematics import normalize_math_answer


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so 5 + 7 = 12\n#### 12", "12", 1.0, 1.0),
        ("#### 11, no, #### 1,234.00", "#### 1234", 1.0, 1.0),
        ("It costs $1,234.", 1234, 0.0, 1.0),
        ("#### $-3", "work: 3 - 6 = -3\n#### -3", 1.0, 1.0),
        ("#### 12 apples in 3 bags", "12", 1.0, 0.1),
        ("#### 13", "12", 0.1, 0.1),
        ("none", "12", 0.0, 0.0),
        ("#### .5", "0.5", 1.0, 1.0),
        ("####12", "12", 1.0, 1.0),
    ],
)
def test_gsm8k(text, truth, strict, flexible):
    assert gsm8k("d", text, truth, {}, format_score=0.1)["score"] == strict
    result = gsm8k("d", text, truth, {}, method="flexible", format_score=0.1)
    assert result["score"] == flexible and result["acc"] == (flexible == 1.0)


def test_gsm8k_refuses_invalid_arguments():
    with pytest.raises(ValueError, match="has no number"):
        gsm8k("d", "#### 1", "one", {})
    with raises("reward.gsm8k-method", "method='loose'", "strict, flexible"):
        gsm8k("d", "#### 1", "1", {}, method="loose")


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{3} or rather \boxed{4}", "4", True),
        ("the answer is $x^2+2x+1$", "(x+1)^2", True),
        (r"\boxed{(1,2)}", "(1, 2)", True),
        (r"\boxed{(2,1)}", "(1, 2)", False),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{[0,1)}", "[0,1)", True),
        (r"\boxed{12}", r"We add them and get \boxed{12}.", True),
        (r"\boxed{\text{(B)}}", "B", True),
        ("It is 41.", "42", False),
        ("no idea", r"\frac{3}{4}", False),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
        (r"so \boxed {5}", "5", True),
        (r"so \boxed5.", "5", True),
        (r"it is \fbox{5}", "5", True),
        (r"\boxed{5}", r"$\fbox{5}$", True),
        *[(rf"\boxed{{{answer}}}", r"28\%", True) for answer in ("28", r"28\%", "28%", r"28\text{ percent}", "0.28")],
        *[(rf"\boxed{{28{sign}}}", "28", True) for sign in (r"\%", "%", r"\,\%", r" \text{percent}")],
        (r"\boxed{12.5}", r"12.5\%", True),
        (r"\boxed{28\%}", "0.28", True),
        (r"\boxed{33\frac{1}{3}}", r"33\frac{1}{3}\%", True),
        ("The answer is 28%.", r"28\%", True),
        ("28 percent", "28%", True),
        ("28%", "0.28", True),
        (r"\boxed{28\%}", r"0.28\%", False),
        ("It is 28%.", r"0.28\%", False),
        (r"\boxed{280}", r"28\%", False),
        (r"\boxed{28}", "0.28", False),
        (r"\boxed{17 \% 5}", "2", False),
    ],
)
def test_math(text, truth, right):
    result = mathematics("d", text, truth, {})
    assert result["score"] == result["acc"] == float(right)
    assert (result["pred"] is None) == (text == "no idea")


def test_first_truth_that_is_only_text_is_reported(caplog):
    for truth in (r"\frac{1}{", r"\frac{2}{"):
        assert mathematics("d", r"\boxed{1}", truth, {})["score"] == 0.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_math_agrees_with_sympy_on_polynomials():
    x = sympy.Symbol("x")
    for roots in ((1, 2), (-3, 5), (2, 2)):
        product = (x - roots[0]) * (x - roots[1])
        expanded, factored = sympy.latex(sympy.expand(product)), sympy.latex(product)
        assert mathematics("d", f"$\\boxed{{{expanded}}}$", factored, {})["score"] == 1.0
        assert mathematics("d", f"$\\boxed{{{expanded} + 1}}$", factored, {})["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("Answer: 34", "34", 1.0),
        ("answer: 1\nAnswer:  $1,000$.", "1000", 1.0),
        (r"Answer: x = \boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"Answer: 5 \text{ cm}", "5", 1.0),
        (r"Answer: \dfrac{1}{2}", r"\frac12", 1.0),
        (r"Answer: 90^\circ", "90", 1.0),
        ("Answer: 28%", r"28\%", 1.0),
        (r"Answer: 28 \text{ percent}", "28", 1.0),
        ("Answer: 35", "34", -1.0),
        ("34", "34", -1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),
    ],
)
def test_math_dapo(text, truth, score):
    assert math_dapo("d", text, truth, {})["score"] == score


def test_math_dapo_strict_box_verify():
    strict = {"strict_box_verify": True}
    assert math_dapo("d", r"\boxed{1} \boxed{\frac{1}{2}}", r"\frac{1}{2}", {}, **strict)["score"] == 1.0
    assert math_dapo("d", "Answer: 7", "7", {}, **strict) == {"score": -1.0, "acc": 0.0, "pred": ""}
    assert normalize_math_answer(r"3 \text{ and } 4") == "3,4"
