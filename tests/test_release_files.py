"""Version, licence, citation and changelog files are consistent."""

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import megarl

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_equal_everywhere():
    assert version(PROJECT["name"]) == megarl.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == megarl.__version__


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_bytes()
    # checksum of https://www.apache.org/licenses/LICENSE-2.0.txt
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["license"] == "Apache-2.0"


def test_citation_file_is_valid():
    """Required keys and value types of the Citation File Format, schema 1.2.0."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] in ("software", "dataset")
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert citation["authors"] and all(
        author.get("name") or author.get("family-names") for author in citation["authors"]
    )
    assert citation["license"] == "Apache-2.0" and all(isinstance(word, str) for word in citation["keywords"])


def test_changelog_follows_keep_a_changelog():
    """Versions, and below them kinds of changes: https://keepachangelog.com/en/1.1.0/."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_workflow_runs_each_python_with_its_megatron():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"].values()
    pins = (ROOT / "megarl" / "pins" / "default.txt").read_text(encoding="utf-8")
    expected = [
        (version.rpartition(".")[0], sign)
        for version, sign in re.findall(r"^megatron-core==(\S+) ; python_version (\S+)", pins, re.M)
    ]
    pythons = {"<": "3.11", ">=": "3.12"}
    assert [(entry["megatron"], entry["python"]) for entry in job["strategy"]["matrix"]["include"]] == [
        (megatron, pythons[sign]) for megatron, sign in expected
    ]
    assert any("bash launch/test.sh" in step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize(("tag", "accepted"), [(f"v{megarl.__version__}", True), ("v99.0.0", False)])
def test_release_workflow_checks_the_tag_and_takes_the_notes(tag, accepted, tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    (script,) = [step["run"] for step in workflow["jobs"]["draft"]["steps"] if "notes.md\n" in step.get("run", "")]
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    variables = {**os.environ, "GITHUB_REF_NAME": tag, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, env=variables, check=False)
    assert (result.returncode == 0) is accepted
    if accepted:
        notes = (tmp_path / "notes.md").read_text(encoding="utf-8")
        assert re.findall(r"^## \[(.+?)\]", notes, re.M) == [megarl.__version__] and "### Added" in notes


INSTALLS_BY_NAME = re.compile(r"pip install[^\n`#;]*(?<![/\w'])'?megarl(\[|['\s`\"]|$)")
REGISTRY_HOSTS = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com")
TEXTS = (
    "Dockerfile.cpu",
    "Dockerfile.gpu",
    ".py",
    ".md",
    ".sh",
    ".yaml",
    ".yml",
    ".toml",
    ".txt",
    ".cfg",
    ".ipynb",
    ".json",
)


def test_no_text_installs_megarl_by_name_or_names_a_registry():
    """The name belongs to another project on the public registry."""
    assert INSTALLS_BY_NAME.search("run pip install 'megarl[gpu]' first")
    assert INSTALLS_BY_NAME.search("pip install -c megarl/pins/default.txt megarl")
    assert not INSTALLS_BY_NAME.search("pip install dist/megarl-0.1.0-py3-none-any.whl")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    names = {name for name in listed if name.endswith(TEXTS)} - {"tests/test_release_files.py"}
    files = [ROOT / name for name in sorted(names)]
    assert len(files) > 500
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert not INSTALLS_BY_NAME.search(text), f"{file}: {INSTALLS_BY_NAME.search(text)}"
            assert not REGISTRY_HOSTS.search(text), f"{file}: {REGISTRY_HOSTS.search(text)}"
