"""The page for users of TRL has every field of TRL's configurations, and names keys that exist."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from doc_pages import ROOT
from transformers import TrainingArguments

from megarl.config import TrainConfig
from megarl.config.keys import walk

PAGE = (ROOT / "docs" / "from_trl.md").read_text()
FACTS = json.loads((ROOT / "tests" / "docs" / "trl_fields.json").read_text())


def rows(title: str) -> list[tuple[set[str], str]]:
    """Names in the first cell, and the second cell, of the table under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return [(set(re.findall(r"`(\w+)`", first)), second) for first, second in found if "`" in first]


@pytest.mark.parametrize("name", ["GRPOConfig", "PPOConfig"])
def test_every_field_is_told_once(name: str) -> None:
    told = [field for fields, _ in rows(name) for field in fields]
    assert sorted(told) == sorted(FACTS[name])


def test_what_is_told_of_transformers_are_its_fields() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    told = {field for names, _ in rows("TrainingArguments") for field in names}
    assert told - fields <= {"run_name", "warmup_ratio"}  # which come and go between its versions


def test_keys_that_it_names_exist() -> None:
    keys = {path for path, _ in walk(TrainConfig)}
    sections = "data|actor_rollout_ref|critic|algorithm|reward_model|custom_reward_function|trainer"
    named = re.findall(rf"`((?:{sections})\.[\w.]+)(?:=[^`]*)?`", PAGE)
    assert len(named) > 60
    wrong = {name for name in named if name not in keys and name != "reward_model.ground_truth"}
    assert not wrong
