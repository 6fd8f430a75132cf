"""The algorithms page lists exactly the registered names."""

import re
from pathlib import Path

import pytest

from megarl.algorithms import ADVANTAGES, AGGREGATIONS, KL_CONTROLLERS, POLICY_LOSSES
from megarl.base.algorithm_names import KL_KINDS
from megarl.config import TrainConfig
from megarl.config.keys import walk

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = {
    "Advantage estimators": ADVANTAGES,
    "Policy losses": POLICY_LOSSES,
    "Aggregation": AGGREGATIONS,
    "KL estimators": KL_KINDS,
    "Controllers of the KL in the reward": KL_CONTROLLERS,
}
KEYS = {path: item for path, item in walk(TrainConfig) if item.section is None}


def table(heading):
    """The rows of a section's first table, by cells."""
    section = "|" + PAGE.split(f"\n## {heading}\n")[1].partition("\n|")[2].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("heading", SECTIONS)
def test_tables_have_each_name_once(heading):
    names = [name for row in table(heading) for name in re.findall(r"`([^`]+)`", row[0])]
    own = {"path.py:function", "package.module.function"}
    assert sorted(set(names) - own) == sorted(SECTIONS[heading]) and len(set(names)) == len(names)


def test_aggregations_of_losses():
    named = {name: row[2].strip(" `") for row in table("Policy losses") for name in re.findall(r"`([^`]+)`", row[0])}
    assert {name: named[name] for name in POLICY_LOSSES} == {n: loss.aggregation for n, loss in POLICY_LOSSES.items()}


def test_defaults_are_those_of_the_schema():
    """Every "`key` = number" of the tables, and the defaults above them."""
    found = re.findall(r"`([a-z_.]+)` = ([0-9.]+)", PAGE)
    assert len(found) >= 10
    for name, value in found:
        meant = {item.default for path, item in KEYS.items() if path.endswith(f".{name}")}
        assert meant == {float(value)}, name
    for key in ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.kl_ctrl.type"):
        assert f"Key: `{key}`, default `{KEYS[key].default}`" in PAGE


def test_keys_with_a_whole_path_exist():
    named = re.findall(r"`((?:algorithm|actor_rollout_ref|critic|trainer|data)\.[a-z_.]+)", PAGE)
    known = set(KEYS) | {path.rsplit(".", 1)[0] for path in KEYS}
    assert not [name for name in named if name not in known]
