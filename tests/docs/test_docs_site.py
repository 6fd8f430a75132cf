"""The documentation site that zensical builds."""

import re
import shutil
import subprocess
import sys

import pytest
from support.doc_pages import ROOT

API = {
    "python_api.html": ("megarl.api.train", "megarl.api.Run.plot", "ConfigError"),
    "api/rewards.html": ("megarl.rewards.registry.register_reward", "megarl.rewards.registry.check_signature"),
    "api/algorithms.html": ("megarl.algorithms.advantages.AdvantageInputs", "token_level_rewards"),
    "api/agents.html": ("megarl.agents.loop.AgentLoop.run", "megarl.agents.tools.tool.Tool.call"),
    "api/rollout.html": ("megarl.rollout.interface.RolloutEngine.poll", "finish_reason"),
    "api/data.html": ("megarl.data.protocol.DataProto.concat",),
    "api/registries.html": ("megarl.base.registry.Registry.find", "megarl.trainer.callbacks.Callback.on_step_end"),
}
"""Anchors of each API page, the first as a heading, and words of the docstrings."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; warnings (dead links and anchors, unknown objects of the API pages) are errors."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("megarl", "tools"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return folder / "site"


def test_every_page_is_built(site):
    for page in (ROOT / "docs").rglob("*.md"):
        html = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert title and re.sub(r"[`*]", "", title[1]) in re.sub(r"<[^>]+>", "", html), page.name


def test_site_loads_nothing_from_the_network(site):
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)")
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        external = [url for url in loaded.findall(page.read_text(encoding="utf-8")) if "canonical" not in url]
        assert not external, f"{page.name} loads {external}"


def test_api_pages_have_the_docstrings(site):
    for name, words in API.items():
        html = (site / "reference" / name).read_text(encoding="utf-8")
        assert f'id="{words[0]}"' in html and all(word in html for word in words[1:]), name
        assert ":class:" not in html and ":meth:" not in html, f"{name}: roles of Sphinx"
