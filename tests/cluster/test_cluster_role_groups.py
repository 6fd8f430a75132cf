"""The typed worker groups declare the verbs of the workers, and mypy rejects a misspelt verb or a wrong argument."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megarl.cluster import role_groups
from megarl.cluster.agent_runner_worker import AgentRunnerWorker
from megarl.workers.dispatch import Dispatch, read_marks

ROOT = Path(__file__).parents[2]
WORKERS = {
    "ActorGroup": "actor.ActorWorker",
    "CriticGroup": "critic.CriticWorker",
    "KTOGroup": "kto.KTOWorker",
    "PreferenceGroup": "preference.PreferenceWorker",
    "ReferenceGroup": "frozen.ReferenceWorker",
    "RewardModelGroup": "reward_model.RewardModelWorker",
    "RewardTrainingGroup": "reward_model.RewardTrainingWorker",
    "RolloutGroup": "rollout.RolloutWorker",
    "RolloutNodeGroup": "rollout.RolloutNodeWorker",
    "SFTGroup": "supervised.SFTWorker",
    "TeacherGroup": "frozen.TeacherWorker",
}
ONE_RANK = {"accept", "completions", "forget"}
"""Verbs of ``Dispatch.RANK``, which are called on handles only."""


def worker_class(group):
    module, name = WORKERS[group].split(".")
    worker_cls: type = getattr(import_module(f"megarl.workers.{module}"), name)
    return worker_cls


def declared_verbs(group):
    """Declarations of a group class and its bases, which exist for type checkers only."""
    tree = ast.parse(Path(role_groups.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    verbs: dict[str, ast.FunctionDef] = {}
    name = group
    while name in classes:
        verbs = {node.name: node for node in ast.walk(classes[name]) if isinstance(node, ast.FunctionDef)} | verbs
        (base,) = classes[name].bases
        assert isinstance(base, ast.Name)
        name = base.id
    return verbs


def driver_type(worker_type, dispatch):
    """Return type of a verb as the driver sees it, from that of the worker's method."""
    if dispatch is Dispatch.ALL:
        return f"list[{worker_type}]"
    return worker_type.removesuffix(" | None") if dispatch is Dispatch.SPLIT else worker_type


@pytest.mark.parametrize("group", WORKERS)
def test_group_declares_exactly_the_verbs_of_its_worker(group):
    worker_cls = worker_class(group)
    marks = read_marks(worker_cls)
    declared = declared_verbs(group)
    assert set(declared) == set(marks) - ONE_RANK
    for verb, node in declared.items():
        signature = inspect.signature(getattr(worker_cls, verb))
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
        arguments = node.args.args[1:]
        assert [argument.arg for argument in arguments] == [parameter.name for parameter in parameters], verb
        for argument, parameter in zip(arguments, parameters, strict=True):
            assert argument.annotation is not None
            assert ast.unparse(argument.annotation) == parameter.annotation, (verb, argument.arg)
        optional = [parameter for parameter in parameters if parameter.default is not inspect.Parameter.empty]
        assert len(node.args.defaults) == len(optional), verb
        assert node.returns is not None
        assert ast.unparse(node.returns) == driver_type(signature.return_annotation, marks[verb].dispatch), verb


def test_verbs_submitted_by_name_exist():
    all_verbs = {verb for group in WORKERS for verb in read_marks(worker_class(group))}
    all_verbs |= set(read_marks(AgentRunnerWorker))
    submitted = set()
    for path in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"submit", "submit_on", "submit_scatter", "submit_gather"}
            ):
                submitted |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)} - {None}
    names = {verb for verb in submitted if isinstance(verb, str)}
    assert {"init_model", "connect_sync", "save_checkpoint"} <= names
    assert names <= all_verbs


def test_mypy_rejects_a_misspelt_verb_and_a_wrong_argument(tmp_path):
    script = tmp_path / "misspelt_verbs.py"
    script.write_text(
        "from megarl.cluster.role_groups import ActorGroup, RolloutGroup\n"
        "from megarl.cluster.worker_group import WorkerGroup\n"
        "from megarl.data import DataProto\n"
        "def step(actor: ActorGroup, rollout: RolloutGroup, group: WorkerGroup, batch: DataProto) -> object:\n"
        "    actor.update_acter(batch)\n"
        "    actor.update_actor('batch')\n"
        "    rollout.update_actor(batch)\n"
        "    group.update_actor(batch)\n"
        "    return actor.update_actor(batch)\n",
        encoding="utf-8",
    )
    # With the project's cache, which launch/test.sh has filled. Cached messages name the folder of an earlier run.
    result = subprocess.run([sys.executable, "-m", "mypy", str(script)], cwd=ROOT, capture_output=True, text=True)
    errors = [line.partition(": error: ")[2] for line in result.stdout.splitlines() if script.name in line]
    assert len(errors) == 4, result.stdout + result.stderr
    assert errors[0].startswith('"ActorGroup" has no attribute "update_acter"')
    assert errors[1].startswith('Argument 1 to "update_actor" of "ActorGroup" has incompatible type "str"')
    assert errors[2].startswith('"RolloutGroup" has no attribute "update_actor"')
    assert errors[3].startswith('"WorkerGroup" has no attribute "update_actor"')
