"""A model family declared in a user file (`external_lib`): training, export and conversion."""

import json
import shutil

import pytest
from support.cli_runs import RunFiles

from megarl import cli
from megarl.ops.report.findings import run_findings
from megarl.ops.report.run_files import read_run

FAMILY = """
from megarl.models import register_family
from megarl.models.families.qwen import Qwen2


@register_family("OursForCausalLM")
class Ours(Qwen2):
    name = "ours"
"""
OUT_OF_MEMORY = """
import torch
from torch.nn.modules.module import register_module_forward_pre_hook


def check_size(module, args):
    if type(module).__name__ == "VocabParallelEmbedding" and args[0].numel() > 100:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


register_module_forward_pre_hook(check_size)
"""
"""A device that holds micro-batches of 100 tokens, on all ranks."""
OTHER_MODEL = """
from megarl.rollout.embedded.decoder import TransformerDecoder

logits = TransformerDecoder.logits
TransformerDecoder.logits = lambda decoder, hidden: 1.3 * logits(decoder, hidden)
"""
"""An engine that computes another model than the actor."""


@pytest.fixture(scope="module")
def family(task, tmp_path_factory):
    """A folder with ``model`` of an unknown architecture and ``ours.py`` with its declaration."""
    folder = tmp_path_factory.mktemp("family")
    shutil.copytree(task / "model", folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text(encoding="utf-8")), "architectures": ["OursForCausalLM"]}),
        encoding="utf-8",
    )
    (folder / "ours.py").write_text(FAMILY, encoding="utf-8")
    (folder / "memory.py").write_text(OUT_OF_MEMORY, encoding="utf-8")
    (folder / "other.py").write_text(OTHER_MODEL, encoding="utf-8")
    return folder


@pytest.fixture
def keys(family, small):
    """One step with an export of a model whose family is not registered."""
    return [
        *("--config-name", "quickstart", *small, "trainer.experiment_name=ours", "trainer.total_training_steps=1"),
        *(f"actor_rollout_ref.model.path={family}/model", "trainer.hf_export_dir=export"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]


def test_unknown_family_is_refused(keys, capsys):
    assert cli.run_job("train", keys) == 2
    error = capsys.readouterr().err
    assert "OursForCausalLM" in error and "[model.no-weight-map]" in error


def test_every_process_imports_external_lib(keys, family, start):
    run = start(*keys, f"actor_rollout_ref.model.external_lib=[{family}/ours.py,{family}/memory.py,{family}/other.py]")
    assert run.wait() == 0, run.output
    assert json.loads((run.folder / "export" / "config.json").read_text(encoding="utf-8"))["architectures"] == [
        "OursForCausalLM"
    ]
    # The second file lets large micro-batches run out of memory, also where tensor-parallel ranks share a layer.
    (row,) = RunFiles(run.folder, "ours").steps.values()
    for role in ("actor", "critic"):
        assert row[f"{role}/out_of_memory"] >= 1 and row[f"{role}/update_micro_batch_limit"] < 8192
        assert f"step 1: {role} ran out of device memory" in " ".join(run.output.split())
    # With the third one the engine computes another model: named without calculate_log_probs, too.
    assert row["training/rollout_mismatch_excess"] > 1
    assert "step 1: the log-probs of engine and actor differ" in " ".join(run.output.split())
    found = [finding.metric for finding in run_findings(read_run(RunFiles(run.folder, "ours").newest))]
    assert "training/rollout_mismatch_excess" in found


def test_convert_imports_external_lib(family, capsys):
    # The file has not been imported in this process.
    assert cli.main(["convert", "inspect", str(family / "model")]) == 1
    assert "external_lib" in capsys.readouterr().err
    assert cli.main(["convert", "inspect", str(family / "model"), "--external-lib", str(family / "ours.py")]) == 0
    assert "OursForCausalLM" in capsys.readouterr().out


def test_import_error_names_the_config_key(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import missing_module", encoding="utf-8")
    key = "actor_rollout_ref.model.external_lib"
    code = cli.run_job("train", ["--config-name", "quickstart", f"{key}=[{tmp_path}/broken.py,no.such.module]"])
    error = capsys.readouterr().err
    assert code == 2 and error.count(key) >= 2
    assert error.count("[config.user-code-import]") == 2
    assert "No module named 'missing_module'" in error and "no.such.module" in error
