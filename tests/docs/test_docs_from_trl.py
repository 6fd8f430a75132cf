"""docs/tutorials/from_trl.md lists every field of TRL's configurations, and names existing keys only."""

import dataclasses
import json
import re

import pytest
from support.doc_pages import ROOT

from megarl.config import TrainConfig
from megarl.config.keys import walk

PAGE = (ROOT / "docs" / "tutorials" / "from_trl.md").read_text(encoding="utf-8")
FIELDS = json.loads((ROOT / "tests" / "docs" / "trl_fields.json").read_text(encoding="utf-8"))


def rows(title):
    """Field names (first cell) and text (second cell) of the table under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return [(set(re.findall(r"`(\w+)`", first)), second) for first, second in cells if "`" in first]


@pytest.mark.parametrize("name", ["GRPOConfig", "RLOOConfig", "PPOConfig"])
def test_every_field_is_listed_once(name):
    listed = [field for fields, _ in rows(name) for field in fields]
    assert sorted(listed) == sorted(FIELDS[name])


def test_training_arguments_are_fields_of_transformers():
    from transformers import TrainingArguments  # imports peft, which takes seconds

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    listed = {field for names, _ in rows("TrainingArguments") for field in names}
    assert listed - fields <= {"run_name", "warmup_ratio"}  # not in every version of transformers


def test_named_keys_exist():
    keys = {path for path, _ in walk(TrainConfig)}
    sections = "data|actor_rollout_ref|critic|algorithm|reward|trainer"
    named = re.findall(rf"`((?:{sections})\.[\w.]+)(?:=[^`]*)?`", PAGE)
    assert len(named) > 60
    wrong = {name for name in named if name not in keys}
    assert not wrong
