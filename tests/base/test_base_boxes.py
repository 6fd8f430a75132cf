"""Boxed answers; the expected contents are LaTeX's arguments of the commands."""

import pytest

from megarl.base.boxes import last_box


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"so \boxed5.", "5"),
        (r"is $\boxed 7$, not 8", "7"),
        (r"\(\boxed-3\)", "-3"),
        (r"**\boxed 12**", "12"),
        (r"\boxed 1.5.", "1.5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\fbox{1} \boxed{2}", "2"),
        (r"\boxed{a{b}c} x", "a{b}c"),
        (r"\boxed{\text{a {b}}}", r"\text{a {b}}"),
        (r"\boxed{}", ""),
        (r"\boxed{a{b}c} \boxed{open", None),
        (r"\boxedx{5}", None),
        (r"\boxed", None),
        ("none", None),
    ],
)
def test_last_box(text, content):
    assert last_box(text) == content
