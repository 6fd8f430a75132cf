"""Every key of the schema is read by the code: an unread key would be accepted and have no effect.

The scan looks for ``section.key``. ``section`` is the section's name, a variable or parameter annotated with its class,
or a variable assigned from it. The scan misses reads under another alias: annotate the alias.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import megarl
from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.keys import walk

PACKAGE = Path(megarl.__file__).parent
CONFIG = PACKAGE / "config"
# In the config room, only the schema's properties, the batch plan and the correction bounds read keys for the trainer;
# the other modules check and copy.
READERS_IN_CONFIG = {CONFIG / "batch.py", *(CONFIG / "schema").glob("*.py")}
# The default of two other keys, read through them; and the key that decides how others are composed.
READ_ELSEWHERE = {"actor_rollout_ref.actor.clip_ratio", "layout"}


class Reads(ast.NodeVisitor):
    """Collects the ``(owner, key)`` pairs of a file; the owner is the name of a section or of a class."""

    def __init__(self, tree):
        self.aliases: dict[str, set[str]] = defaultdict(set)
        self.pairs: set[tuple[str, str]] = set()
        self.owners: list[str] = []  # classes around the current node
        self._find_aliases(tree)
        self.visit(tree)

    def _find_aliases(self, tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                target = node.arg if isinstance(node, ast.arg) else name_of(node.target)
                self.aliases[target] |= {name_of(part) for part in ast.walk(node.annotation)}
            elif isinstance(node, ast.Assign):
                for target, value in assigned(node):
                    branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                    self.aliases[name_of(target)] |= {name_of(branch) for branch in branches}

    def visit_ClassDef(self, node):
        self.owners.append(node.name)
        self.generic_visit(node)
        self.owners.pop()

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load):
            owner = name_of(node.value)
            owners = {owner} | self.aliases[owner] | (set(self.owners) if owner == "self" else set())
            self.pairs |= {(name, node.attr) for name in owners if name}
        self.generic_visit(node)


def name_of(node):
    """The last name of ``a.b.c`` or ``c``; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def assigned(node):
    """Targets of an assignment with their values; ``a, b = c, d`` is two."""
    pairs = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += list(zip(target.elts, node.value.elts, strict=False))
        else:
            pairs.append((target, node.value))
    return pairs


@pytest.fixture(scope="module")
def pairs():
    """The pairs of all files that read keys."""
    files = [f for f in PACKAGE.rglob("*.py") if CONFIG not in f.parents or f in READERS_IN_CONFIG]
    return set().union(*(Reads(ast.parse(file.read_text(encoding="utf-8"))).pairs for file in files))


def unread_keys(schema, pairs):
    """Paths of the keys that no pair reads."""
    sections = {path: item.section for path, item in walk(schema) if item.section is not None} | {"": schema}
    unread = []
    for path, item in walk(schema):
        section, _, name = path.rpartition(".")
        if item.section is not None or path in READ_ELSEWHERE:
            continue
        owners = {section.rpartition(".")[2], *(cls.__name__ for cls in sections[section].__mro__)}
        if not any((owner, name) in pairs for owner in owners):
            unread.append(path)
    return unread


@pytest.mark.parametrize(
    "schema", [TrainConfig, SFTConfig, RewardTrainingConfig, PreferenceConfig, EvaluateConfig, GenerateConfig]
)
def test_every_key_is_read(schema, pairs):
    unread = unread_keys(schema, pairs)
    assert not unread, f"nothing reads {', '.join(unread)}"


def test_the_scan_separates_reads_from_writes_and_other_owners():
    source = (
        "def f(config, keys: 'x', sampling: RolloutConfig | ValSamplingConfig):\n"
        "    config.trainer.seed = 1\n"
        "    settings, other = config.data, 3\n"
        "    one = config.critic if keys else config.actor\n"
        "    return settings.shuffle, sampling.n, config.trainer.nnodes, one.optim.lr, one.ppo_epochs\n"
        "class OptimConfig:\n"
        "    def g(self):\n"
        "        return self.eps\n"
    )
    pairs = Reads(ast.parse(source)).pairs
    assert {("data", "shuffle"), ("ValSamplingConfig", "n"), ("trainer", "nnodes"), ("optim", "lr")} <= pairs
    assert {("critic", "ppo_epochs"), ("actor", "ppo_epochs"), ("OptimConfig", "eps")} <= pairs
    assert ("trainer", "seed") not in pairs and ("trainer", "shuffle") not in pairs


def test_an_unread_key_is_found(pairs):
    without = {pair for pair in pairs if pair != ("kl_ctrl", "horizon") and pair[1] != "horizon"}
    assert "algorithm.kl_ctrl.horizon" in unread_keys(TrainConfig, without)
