"""The generated reference page, and the list of algorithm names."""

import re
from pathlib import Path

import pytest
from list_keys import JOB_PAGES, render_reference

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
from megarl.config.keys import walk

ROOT = Path(__file__).resolve().parents[2]


def test_committed_pages_are_up_to_date():
    folder = ROOT / "docs" / "reference"
    files = [folder / "config.md", *(folder / "config").iterdir()]
    committed = {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}
    assert committed == render_reference(), "run: python tools/list_keys.py docs/reference"


@pytest.mark.parametrize("name", JOB_PAGES)
def test_every_key_is_on_the_page_of_its_job(name):
    """Or in a section that the page links to: a shared one, or one of training."""
    pages = render_reference()
    page, shared, training = pages[f"config/{name}.md"], pages["config.md"], pages["config/train.md"]
    for path, item in walk(JOB_PAGES[name]):
        if item.section is None:
            text = page + "".join(training for parent in parents(path) if f"(train.md#{parent})" in page)
            text += "".join(
                shared for parent in parents(path) if f"| `{parent.rpartition('.')[2]}` | section | " in text
            )
            words = re.split(r"docs/[\w/]+\.md[#\w-]*", item.doc.replace("|", "\\|"))  # which are links on the page
            assert f"| `{item.name}` | " in text and all(part in text for part in words), path


def parents(path):
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def test_headings_are_the_last_parts_of_paths_and_shared_sections_occur_once():
    pages = render_reference()
    for name in JOB_PAGES:
        headings = [line.lstrip("# ") for line in pages[f"config/{name}.md"].splitlines()[1:] if line.startswith("#")]
        assert headings and not any("." in heading for heading in headings)
    size = "| `tensor_model_parallel_size` | int | `1` | Tensor parallelism"
    assert {name for name, page in pages.items() if size in page} == {"config.md"}
    roles = ("actor_rollout_ref.ref", "critic", "distillation.teacher_models.<name>")
    assert all(f"- `{role}.megatron`\n" in pages["config.md"] for role in roles)


def test_algorithm_names_are_the_registered_names():
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
