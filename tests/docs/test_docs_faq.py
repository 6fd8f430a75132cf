"""Every code that docs/reference/faq.md explains is a code of the package."""

import re

from support.doc_pages import ROOT

CODES = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "reference" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_explained_codes_exist():
    listed = set(
        re.findall(
            r"^\| `(.+?)` \|", (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert len(CODES) > 20 and len(set(CODES)) == len(CODES)
    assert set(CODES) <= listed, set(CODES) - listed
