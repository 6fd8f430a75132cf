"""A model family declared in a user file (`external_lib`): training, export and conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import CliRun

from megarl import cli

FAMILY = """
from megarl.models import register_family
from megarl.models.families.qwen2 import Qwen2


@register_family("OursForCausalLM")
class Ours(Qwen2):
    name = "ours"
"""


@pytest.fixture(scope="module")
def family(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model`` of an unknown architecture and ``ours.py`` with its declaration."""
    folder = tmp_path_factory.mktemp("family")
    shutil.copytree(task / "model", folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["OursForCausalLM"]}))
    (folder / "ours.py").write_text(FAMILY)
    return folder


@pytest.fixture
def keys(family: Path, small: list[str]) -> list[str]:
    """One step with an export of a model whose family is not registered."""
    return [
        *("--config-name", "quickstart", *small, "trainer.experiment_name=ours", "trainer.total_training_steps=1"),
        *(f"actor_rollout_ref.model.path={family}/model", "trainer.hf_export_dir=export"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]


def test_unknown_family_is_refused(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_job("train", keys) == 2
    assert "'OursForCausalLM' has no weight map" in capsys.readouterr().err


def test_every_process_imports_external_lib(keys: list[str], family: Path, start: Callable[..., CliRun]) -> None:
    run = start(*keys, f"actor_rollout_ref.model.external_lib={family}/ours.py")
    assert run.wait() == 0, run.output
    assert json.loads((run.folder / "export" / "config.json").read_text())["architectures"] == ["OursForCausalLM"]


def test_convert_imports_external_lib(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The file has not been imported in this process.
    assert cli.main(["convert", "inspect", str(family / "model")]) == 1
    assert "external_lib" in capsys.readouterr().err
    assert cli.main(["convert", "inspect", str(family / "model"), "--external-lib", str(family / "ours.py")]) == 0
    assert "OursForCausalLM" in capsys.readouterr().out


def test_import_error_names_the_config_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import missing_module")
    key = "actor_rollout_ref.model.external_lib"
    code = cli.run_job("train", ["--config-name", "quickstart", f"{key}=[{tmp_path}/broken.py,no.such.module]"])
    error = capsys.readouterr().err
    assert code == 2 and error.count(key) >= 2
    assert "No module named 'missing_module'" in error and "importing no.such.module failed" in error
