"""Names of other frameworks lead to megarl's keys."""

from __future__ import annotations

import re

import pytest
from support.doc_pages import ROOT
from support.expected_errors import raises

from megarl.config import SFTConfig, TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.config.keys import walk
from megarl.config.synonyms import _KEYS, synonyms

TRAIN = [path for path, _ in walk(TrainConfig)]
SFT = [path for path, _ in walk(SFTConfig)]


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("learning_rate=1e-6", "actor_rollout_ref.actor.optim.lr or critic.optim.lr"),
        ("critic.learning_rate=1e-6", "critic.optim.lr"),
        ("trainer.output_dir=out", "trainer.default_local_dir or trainer.hf_export_dir"),
        ("n_samples_per_prompt=8", "actor_rollout_ref.rollout.n"),  # OpenRLHF, slime
        ("actor.eps_clip=0.2", "actor_rollout_ref.actor.clip_ratio"),  # OpenRLHF, slime
        ("actor_rollout_ref.actor.warmup_ratio=0.1", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"),  # TRL
        ("data.prompt_length=64", "data.max_prompt_length"),  # verl, in another section
        ("trainer.total_training_step=4", "trainer.total_training_steps"),  # by edit distance
    ],
)
def test_unknown_key_is_suggested_by_its_meaning_first(override, suggestion):
    with raises("config.unknown-key", f" {suggestion}?"):
        compose(ConfigRequest(TrainConfig, "quickstart", (override,)))


def test_other_jobs_have_other_keys():
    assert synonyms("learning_rate", SFT) == ["optim.lr"]
    assert synonyms("num_generations", SFT) == []


def test_suggested_keys_exist_and_have_other_names():
    names: list[str] = []
    for keys, others in _KEYS.items():
        assert set(keys.split()) <= {*TRAIN, *SFT}, keys
        names += others.split()
    assert len(names) == len(set(names)) > 120
    own = {path for path in (*TRAIN, *SFT) if path.rpartition(".")[2] in names}
    # Reward weights have a warm-up, too.
    assert {path.rpartition(".")[2] for path in own} == {"warmup_ratio"}


@pytest.mark.parametrize("page", ["tutorials/from_trl.md"])
def test_suggestions_agree_with_the_page_about_the_framework(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    checked = 0
    for first, second in rows:
        for name in re.findall(r"`(\w+)`", first):
            if (suggested := synonyms(name, TRAIN)) and "`" in second and not second.startswith("—"):
                assert any(key in second for key in suggested), (name, suggested, second)
                checked += 1
    assert checked > 40
