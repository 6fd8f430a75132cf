"""Which browser launch/test.sh takes, and what it says where there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "browser.sh"


@pytest.mark.parametrize(
    ("variables", "there", "code", "told"),
    [
        ({}, ["google-chrome", "chromium"], 0, "chromium"),
        ({"BROWSER": "mine"}, ["mine", "chromium"], 0, "mine"),
        ({"BROWSER": "mine"}, ["chromium"], 1, "BROWSER=mine: no such program"),
        ({"BROWSER": "0"}, ["chromium"], 1, "BROWSER=0"),
        ({}, [], 1, "is on PATH"),
        ({"CI": "true"}, ["chromium"], 0, "chromium"),
        ({"CI": "true"}, ["id", "apt-get"], 0, "chromium"),
        ({"BROWSER": "install"}, ["id"], 1, "is on PATH"),
    ],
)
def test_the_browser_that_is_taken(
    tmp_path: Path, variables: dict[str, str], there: list[str], code: int, told: str
) -> None:
    """``apt-get`` is a stand-in that brings a chromium with it; the folder is the whole PATH."""
    for name in there:
        made = f'#!/bin/bash\n[ "$1" = install ] && printf "#!/bin/bash\\n" >"{tmp_path}/chromium"'
        made += f'\n/bin/chmod +x "{tmp_path}/chromium" 2>&-; true\n'
        (tmp_path / name).write_text("#!/bin/bash\necho 0\n" if name == "id" else made)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", f'set -euo pipefail; source "{SCRIPT}"; find_browser'],
        env={"PATH": str(tmp_path), **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if code:
        assert told in done.stderr and not done.stdout
    else:
        assert done.stdout.strip() == str(tmp_path / told) and os.access(tmp_path / told, os.X_OK)
