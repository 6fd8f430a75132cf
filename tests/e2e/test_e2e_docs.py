"""Runs the commands of the documentation in a checkout, before and after the quickstart.

``RELEASE=1`` runs them as the pages mark them. By default the doctor skips its slow checks, and jobs
of the pages :data:`CHECKED` end after the checks of their configuration.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_pages import AFTER_QUICKSTART, ALONE, ONE_STEP, QUICKSTART, ROOT, shell_blocks
from support.release import RELEASE

PINS = "megarl/pins/default.txt"
FOLDERS = ("benchmarks", "configs", "docs", "examples", "launch", "megarl/pins", "tools", "tests/ops/plan/models")
BLOCKS = shell_blocks()
MARKS = (ALONE, AFTER_QUICKSTART, ONE_STEP)
TESTED = {(block.mark, block.code): block for block in BLOCKS if block.mark in MARKS}
"""Equal blocks once, in the order of the pages."""
CHECKED = {
    "docs/how_to/debugging.md": "tests/workers/test_workers_exactness.py, tests/docs/test_docs_tools.py",
    "docs/how_to/layouts.md": "tests/e2e/test_e2e_pools.py",
    "docs/internals/weights.md": "tests/e2e/test_e2e_grpo.py",
    "docs/reference/metrics.md": "tests/examples/test_examples.py",
    "examples/README.md": "tests/examples/test_examples.py",
}
"""Pages whose jobs take no step, and the tests that run such jobs."""
IN_A_RELEASE = {
    # The blocks below it run the commands of the script.
    "bash launch/search_agent.sh": pytest.mark.release(twin="tests/e2e/test_e2e_docs.py::test_commands"),
    "megarl launch --no-doctor": pytest.mark.release(
        twin="tests/ops/launch/test_launch_cluster.py::test_local_cluster_refuses_clients_without_token_and_ends_on_sigterm"
    ),
}
"""Marks of blocks by the beginning of their code."""


def cases():
    for block in TESTED.values():
        marks = [mark for start, mark in IN_A_RELEASE.items() if block.code.startswith(start)]
        yield pytest.param(block, id=block.name, marks=marks)


def run(code, folder, how, warm):
    """Run commands in a folder; return their output."""
    environment = {
        **os.environ,
        **warm,
        "BASH_ENV": str(ROOT / "tests/e2e/short_jobs.sh"),
        "MEGARL_DOCS": how,
        "MEGARL_DOCTOR": "all" if RELEASE else "quick",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", "-euo", "pipefail", "-c", code]
    result = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, f"{code}\n{result.stdout[-4000:]}"
    return result.stdout


@pytest.fixture(scope="session")
def warm(shared_server, drivers):
    """Environment in which jobs, tools of the pages and workers are forks."""
    return {**shared_server, "WARM_DRIVERS": drivers.address}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A fresh clone with an installed environment."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        # Other tests write compiled modules of the checkout meanwhile.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    environment = folder / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".megarl"):
            (environment / entry.name).symlink_to(entry)
    script = f"source launch/environment.sh && _checksum {PINS}"
    pins = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True)
    (environment / ".megarl-pins").write_text(pins.stdout, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def after_quickstart(checkout, warm):
    """The checkout after the quickstart command of the pages."""
    commands = {block.code.partition("#")[0].strip() for block in BLOCKS if block.mark == QUICKSTART}
    assert len(commands) == 1, f"blocks marked {QUICKSTART!r} must be equal: {commands}"
    output = run(commands.pop(), checkout, "step", warm)
    assert "== 4/4" in output and "What is 25 + 4?" in output.partition("== 4/4")[2]
    return checkout


def test_quickstart_writes_a_report_and_a_model(after_quickstart):
    assert list((after_quickstart / "outputs/quickstart").glob("*/report.html"))
    assert (after_quickstart / "outputs/quickstart/trained/model.safetensors").is_file()


@pytest.mark.parametrize("block", cases())
def test_commands(block, request, warm):
    """In the order of a page: a block may use what the blocks above it have made."""
    folder = request.getfixturevalue("checkout" if block.mark == ALONE else "after_quickstart")
    takes_step = block.mark == ONE_STEP and (RELEASE or block.page not in CHECKED)
    run(block.code, folder, "step" if takes_step else "check", warm)
