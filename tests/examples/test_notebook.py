"""Cells of examples/quickstart.ipynb, executed in order with a small task."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.warm_drivers import write_interpreter

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SMALL = {
    "task_options": ["--hidden", "32", "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60"],
    "sft_overrides": {
        "trainer.total_training_steps": 2,
        "data.train_batch_size": 16,
        "trainer.n_gpus_per_node": 1,
    },
    "train_overrides": {
        "trainer.total_training_steps": 2,
        "data.train_batch_size": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
    },
}


def test_format():
    """The fields that version 4.5 of the notebook format requires; outputs are not committed."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all({"cell_type", "metadata", "source"} <= cell.keys() for cell in NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert [cell["metadata"].get("tags") for cell in CODE].index(["parameters"]) == 0


def test_parameters_of_the_test_are_those_of_the_notebook():
    targets = [node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
               for node in ast.parse("".join(CODE[0]["source"])).body
               if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    assert SMALL.keys() <= {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.slow
def test_cells_run(
    tmp_path,
    monkeypatch,
    capsys,
    shared_server,
    drivers,
):
    """The commands of the cells are forks, and so are their workers."""
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "executable", str(write_interpreter(tmp_path / "python", drivers.address)))
    for name, value in shared_server.items():
        monkeypatch.setenv(name, value)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CODE):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        if cell["metadata"].get("tags") == ["parameters"]:
            assert namespace["checkout"] == ROOT
            namespace |= {**SMALL, "folder": tmp_path}
    printed = capsys.readouterr().out
    assert "{'55': 1.0, '45': 0.25, '54': 0.0}" in printed
    assert list(namespace["scores"]) == [1, 2] and "step   2  mean reward" in printed
    run = namespace["run"]
    assert run.report.is_file() and (run.policy / "model.safetensors").is_file() and not run.running
    assert run.folder.is_relative_to(tmp_path / "outputs" / "notebook") and run.summary["steps"] == 2
    assert [trace.name for trace in run.plot("actor/entropy").data] == ["actor/entropy"]
    assert list(run.plot().data[0].y) == list(namespace["scores"].values())
    assert "What is 17 + 38?  ->" in printed
