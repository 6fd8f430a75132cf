"""Mean lengths: the longest allowed, or those of ``--lengths``."""

import pytest
from planned_jobs import MODELS, train_config
from support.expected_errors import raises

from megarl.config import SFTConfig
from megarl.config.build import build
from megarl.ops.plan.lengths import Lengths, lengths_of


def test_lengths_are_at_most_those_of_the_configuration():
    config = train_config("Qwen2.5-7B")
    assert lengths_of(config)[:3] == (1024, 1024, 1024)
    assert lengths_of(config, "200,600.5") == Lengths(200, 600.5, 1024, "--lengths")
    assert lengths_of(config, "2000,2000")[:2] == (1024, 1024)


def test_supervised_jobs_have_one_length():
    values = {"data": {"train_files": ["x"], "max_length": 100}, "model": {"path": str(MODELS / "Qwen2.5-7B")},
              "trainer": {"experiment_name": "planned"}}  # fmt: skip
    config = build(SFTConfig, values)
    assert lengths_of(config)[:3] == (0, 100, 100) and lengths_of(config, "30")[:2] == (0, 30)
    with raises("plan.lengths", "--lengths=10,20", "one number"):
        lengths_of(config, "10,20")


@pytest.mark.parametrize("text", ["600", "200,", "a,b", "200,-1", "200,nan", "0,5", "1,2,3", "mean=600"])
def test_other_texts_are_rejected(text):
    with raises("plan.lengths", f"--lengths={text}"):
        lengths_of(train_config("Qwen2.5-7B"), text)
