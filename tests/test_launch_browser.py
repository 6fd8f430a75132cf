"""Browser selection of launch/test.sh, and its message if there is none."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "browser.sh"


@pytest.mark.parametrize(
    ("variables", "programs", "code", "expected"),
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
def test_browser_selection(tmp_path, variables, programs, code, expected):
    """PATH contains the programs only; a fake ``apt-get`` creates a ``chromium`` there."""
    for name in programs:
        script = f'#!/bin/bash\n[ "$1" = install ] && printf "#!/bin/bash\\n" >"{tmp_path}/chromium"'
        script += f'\n/bin/chmod +x "{tmp_path}/chromium" 2>&-; true\n'
        (tmp_path / name).write_text("#!/bin/bash\necho 0\n" if name == "id" else script, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["/bin/bash", "-c", f'set -euo pipefail; source "{SCRIPT}"; find_browser'],
        env={"PATH": str(tmp_path), **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    if code:
        assert expected in result.stderr and not result.stdout
    else:
        assert result.stdout.strip() == str(tmp_path / expected) and os.access(tmp_path / expected, os.X_OK)
