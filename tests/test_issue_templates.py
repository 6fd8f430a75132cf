"""Issue forms have the structure that GitHub requires, and name existing commands and files."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(file for file in FOLDER.glob("*.yml") if file.name != "config.yml")
KEYS = {
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}


def elements(file):
    return yaml.safe_load(file.read_text(encoding="utf-8"))["body"]


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_form_is_valid(file):
    """The syntax for issue forms in GitHub's documentation."""
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "title", "labels"}
    for element in elements(file):
        assert element.keys() <= {"type", "id", "attributes", "validations"}
        assert set(element["attributes"]) <= KEYS[element["type"]]
        assert element["type"] == "markdown" or element["attributes"]["label"]
        assert element.get("validations", {}).keys() <= {"required"}
        assert element["type"] != "dropdown" or len(set(element["attributes"]["options"])) > 1
    names = [element["id"] for element in elements(file)]
    labels = [element["attributes"]["label"] for element in elements(file)]
    assert len(set(names)) == len(names) and len(set(labels)) == len(labels)


def test_forms_exist_and_the_configuration_is_valid():
    assert [file.stem for file in FORMS] == ["bug", "feature", "gpu_results"]
    assert yaml.safe_load((FOLDER / "config.yml").read_text(encoding="utf-8")).keys() <= {
        "blank_issues_enabled",
        "contact_links",
    }


def test_engines_are_those_of_the_configuration():
    from megarl.config.keys import keys_of
    from megarl.config.schema.rollout import RolloutConfig

    (name,) = [key for key in keys_of(RolloutConfig) if key.name == "name"]
    (engine,) = [element for element in elements(FOLDER / "bug.yml") if element["id"] == "engine"]
    assert set(name.limits.choices) | {"none"} == set(engine["attributes"]["options"])
