"""docs/tutorials: each page has pictures, and ``tools/draw_tutorials.py`` draws all of them."""

import re
from pathlib import Path

import pytest
from draw_tutorials import IMAGES, MAX_BYTES, PICTURES, Screen, typed
from support.doc_pages import ROOT, links

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def pictures(page):
    return [Path(link).name for link in links(page) if "images/tutorials/" in link]


def test_pictures_of_the_pages_are_those_of_the_script():
    shown = [name for page in PAGES for name in pictures(page)]
    assert len(PAGES) == 7 and all(pictures(page) for page in PAGES)
    assert sorted(shown) == sorted(PICTURES) == sorted(file.name for file in IMAGES.iterdir())


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_picture_is_small_and_shows_no_path_of_a_machine(name):
    content = (IMAGES / name).read_bytes()
    assert len(content) <= MAX_BYTES
    if name.endswith(".svg"):
        assert not re.search(rb"/(?:tmp|root|home|work)/", content)


def test_screen_shows_what_a_terminal_shows():
    """A live view of two lines is rewritten twice, cut within an escape sequence, and erased; then a bar ends."""
    screen = Screen()
    up = "\r\x1b[2K\x1b[1A\x1b[2K"
    output = f"start\r\nstep 1\r\nupdate{up}row 1\r\nstep 2\r\nsave{up}row 2\r\n 10%\r 20%\r\x1b[32mdone\x1b[0m\r\n"
    for letter in output:
        screen.feed(letter)
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in screen.shown] == ["start", "row 1", "row 2", "done"]


def test_commands_are_shown_without_the_text_of_files():
    code = "cat > a <<'END'\nx\nEND\nmegarl grpo \\\n  --data a\n"
    assert list(typed(code)) == ["$ cat > a <<'END'", "  ...", "$ megarl grpo \\", "  --data a"]
