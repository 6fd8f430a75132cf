"""The generated reference page, and the list of algorithm names."""

from __future__ import annotations

from pathlib import Path

from megarl.base.algorithm_names import (
    ADV_ESTIMATORS,
    FULL_KL,
    KL_CONTROLLER_TYPES,
    KL_KINDS,
    LOSS_AGG_MODES,
    LOSS_MODES,
    REWEIGHT_KINDS,
    WEIGHT_SCHEDULES,
)
from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.keys import walk
from megarl.config.reference import render_reference

ROOT = Path(__file__).resolve().parents[2]


def test_committed_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run: python -m megarl.config.reference > docs/reference/config.md"


def test_every_key_is_on_the_page() -> None:
    page = render_reference()
    for schema in (TrainConfig, SFTConfig, RewardTrainingConfig, PreferenceConfig, EvaluateConfig, GenerateConfig):
        for path, item in walk(schema):
            if item.section is None:
                assert f"| `{item.name}` | " in page, path
                assert item.doc.replace("|", "\\|") in page, path


def test_algorithm_names_are_the_registered_names() -> None:
    """The schema offers the names of :mod:`megarl.base.algorithm_names`, since it may not import the registries."""
    from megarl.algorithms import ADVANTAGES, AGGREGATIONS, KL_CONTROLLERS, KL_ESTIMATORS, POLICY_LOSSES, SCHEDULES
    from megarl.algorithms.selection import REWEIGHT_METHODS

    assert set(LOSS_AGG_MODES) == set(AGGREGATIONS)
    assert set(KL_KINDS) - {FULL_KL} == set(KL_ESTIMATORS)
    assert {name: estimator.needs for name, estimator in ADVANTAGES.items()} == ADV_ESTIMATORS
    assert {name: loss.aggregation for name, loss in POLICY_LOSSES.items()} == LOSS_MODES
    assert set(REWEIGHT_KINDS) == set(REWEIGHT_METHODS)
    assert set(KL_CONTROLLER_TYPES) == set(KL_CONTROLLERS)
    assert set(WEIGHT_SCHEDULES) == set(SCHEDULES)
