"""A model family that only the user's own file declares: trained, exported, evaluated and read by the conversion."""

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
    """A folder with ``model``, which nobody but ``ours.py`` beside it knows."""
    folder = tmp_path_factory.mktemp("family")
    shutil.copytree(task / "model", folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["OursForCausalLM"]}))
    (folder / "ours.py").write_text(FAMILY)
    return folder


def test_every_process_knows_it(family: Path, small: list[str], start: Callable[..., CliRun]) -> None:
    keys = [
        *("--config-name", "quickstart", *small, "trainer.experiment_name=ours", "trainer.total_training_steps=1"),
        *(f"actor_rollout_ref.model.path={family}/model", "trainer.save_freq=1", "trainer.hf_export_dir=export"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]
    unknown = start(*keys)
    assert unknown.wait() == 2 and "'OursForCausalLM' has no weight map" in unknown.output, unknown.output
    run = start(*keys, f"actor_rollout_ref.model.external_lib={family}/ours.py", folder=unknown.folder)
    assert run.wait() == 0, run.output
    assert json.loads((run.folder / "export" / "config.json").read_text())["architectures"] == ["OursForCausalLM"]

    (checkpoint,) = run.folder.rglob("global_step_1")
    keys = [f"actor_rollout_ref.model.path={checkpoint}", small[1]]
    evaluated = start(
        *("--config-name", "quickstart_evaluate", *keys, "trainer.experiment_name=read"),
        f"actor_rollout_ref.model.external_lib={family}/ours.py",
        job="evaluate",
    )
    assert evaluated.wait() == 0, evaluated.output


def test_the_conversion_takes_it_by_an_option(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process nothing has imported the file yet.
    assert cli.main(["convert", "inspect", str(family / "model")]) == 1
    assert "external_lib" in capsys.readouterr().err
    assert cli.main(["convert", "inspect", str(family / "model"), "--external-lib", str(family / "ours.py")]) == 0
    assert "OursForCausalLM" in capsys.readouterr().out


def test_a_module_that_cannot_be_imported_is_told_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind")
    key = "actor_rollout_ref.model.external_lib"
    code = cli.run_job("train", ["--config-name", "quickstart", f"{key}=[{tmp_path}/broken.py,no.such.module]"])
    error = capsys.readouterr().err
    assert code == 2 and error.count(key) >= 2
    assert "No module named 'nothing_of_the_kind'" in error and "importing no.such.module failed" in error
