"""The page on adding a family: its code runs, and its model equals transformers'."""

import re
from pathlib import Path

from megarl.models import declaration

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "add_a_model.md"


def run_page(place, text):
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    names = {"PORT": place.port}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names["config"].family


def test_the_code_of_the_page_runs(pool):
    text = PAGE.read_text(encoding="utf-8").partition("## How experts run")[0]  # the rest describes existing families
    assert pool.run(run_page, 1, text) == ["dots1"]
    for names in re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*) \|", text, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)", names):
            assert hasattr(declaration, name) or name == "megarl", name
