"""Package versions: the tested combinations match the pins, and conflicting requirements are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl.ops.doctor.node import Needs, Status
from megarl.ops.doctor.node.versions import (
    KNOWN_GOOD,
    PACKAGES,
    check_combination,
    check_requirements,
    check_versions,
    package_versions,
    version_differences,
)

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def pins(python: str, *files: str) -> dict[str, str]:
    """Return the pinned versions for a Python version by package."""
    versions = {}
    for file in files:
        for line in (LAUNCH / file).read_text().splitlines():
            line = re.sub(r"(^|\s+)#.*$", "", line)
            if line:
                requirement = Requirement(line)
                if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                    (pin,) = requirement.specifier
                    versions[requirement.name] = pin.version
    return versions


@pytest.mark.parametrize("combination", KNOWN_GOOD, ids=lambda combination: combination.name)
def test_tested_combinations_match_the_pins(combination) -> None:
    files = ["constraints.txt", *(["constraints-sglang.txt"] if "sglang" in combination.versions else [])]
    pinned = pins(combination.python, *files)
    assert combination.versions == {name: pinned[name] for name in PACKAGES if name in pinned}


def test_this_environment_is_a_tested_combination() -> None:
    results = {result.check: result for result in check_versions(Needs())}
    assert results["versions"].status is Status.PASS, results
    assert results["requirements"].status is Status.PASS, results


def test_differences_from_a_tested_combination() -> None:
    tested = KNOWN_GOOD[0]
    changed = {"python": "3.12.4", **tested.versions, "torch": "2.99.0+cu130", "transformer-engine": "2.9"}
    assert version_differences(changed, tested) == ["torch 2.13.0", "no transformer-engine"]
    warned = check_combination(changed)
    assert warned.status is Status.WARN and "torch 2.13.0, no transformer-engine" in warned.remedy
    built = {"python": "3.12.4", **tested.versions, "torch": "2.13.0+cpu"}
    assert check_combination(built).status is Status.PASS
    assert "python 3.12" in version_differences({**built, "python": "3.11.7"}, tested)


def test_conflicting_requirements() -> None:
    requires = {"sglang": ["torch==2.9.1", "transformers>=5", "flashinfer==1"], "torch": ["sympy>1; extra == 'opt'"]}
    versions = {"python": "3.12.1", "sglang": "0.5.9", "torch": "2.9.1+cu128", "transformers": "4.51"}
    clash = check_requirements(versions, lambda package: requires.get(package, []))
    assert clash.status is Status.FAIL
    assert clash.found == "sglang 0.5.9 requires transformers>=5, installed is 4.51"
    fine = check_requirements({**versions, "transformers": "5.19.0"}, lambda package: requires.get(package, []))
    assert fine.status is Status.PASS


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.ops.doctor.node import versions

    present = {name: version for name, version in package_versions((*PACKAGES, "megarl")).items() if name != "ray"}
    monkeypatch.setattr(versions, "package_versions", lambda packages: present)
    (result,) = check_versions(Needs())
    assert result.status is Status.FAIL and result.found == "not installed: ray"
