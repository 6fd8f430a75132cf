"""Versions: what is called tested is what the pins say, and what packages ask of each other is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl.doctor.node import Needs, Status
from megarl.doctor.node.versions import (
    KNOWN_GOOD,
    PACKAGES,
    check_versions,
    distance,
    installed,
    known_combination,
    requirements,
)

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def pins(python: str, *files: str) -> dict[str, str]:
    """Pinned versions for a Python by package, as pip reads the files."""
    found = {}
    for file in files:
        for line in (LAUNCH / file).read_text().splitlines():
            line = re.sub(r"(^|\s+)#.*$", "", line)
            if line:
                asked = Requirement(line)
                if asked.marker is None or asked.marker.evaluate({"python_version": python}):
                    (pin,) = asked.specifier
                    found[asked.name] = pin.version
    return found


@pytest.mark.parametrize("combination", KNOWN_GOOD, ids=lambda combination: combination.name)
def test_combinations_are_the_pins(combination) -> None:
    files = ["constraints.txt", *(["constraints-sglang.txt"] if "sglang" in combination.versions else [])]
    pinned = pins(combination.python, *files)
    assert combination.versions == {name: pinned[name] for name in PACKAGES if name in pinned}


def test_this_environment_is_tested_and_fits() -> None:
    findings = {finding.check: finding for finding in check_versions(Needs())}
    assert findings["versions"].status is Status.PASS, findings
    assert findings["requirements"].status is Status.PASS, findings


def test_distance_of_other_versions() -> None:
    tested = KNOWN_GOOD[0]
    other = {"python": "3.12.4", **tested.versions, "torch": "2.99.0+cu130", "transformer-engine": "2.9"}
    assert distance(other, tested) == ["torch 2.13.0", "no transformer-engine"]
    warned = known_combination(other)
    assert warned.status is Status.WARN and "torch 2.13.0, no transformer-engine" in warned.remedy
    built = {"python": "3.12.4", **tested.versions, "torch": "2.13.0+cpu"}
    assert known_combination(built).status is Status.PASS
    assert "python 3.12" in distance({**built, "python": "3.11.7"}, tested)


def test_packages_that_contradict_each_other() -> None:
    asked = {"sglang": ["torch==2.9.1", "transformers>=5", "flashinfer==1"], "torch": ["sympy>1; extra == 'opt'"]}
    found = {"python": "3.12.1", "sglang": "0.5.9", "torch": "2.9.1+cu128", "transformers": "4.51"}
    clash = requirements(found, lambda package: asked.get(package, []))
    assert clash.status is Status.FAIL
    assert clash.found == "sglang 0.5.9 asks for transformers>=5, there is 4.51"
    fine = requirements({**found, "transformers": "5.19.0"}, lambda package: asked.get(package, []))
    assert fine.status is Status.PASS


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.doctor.node import versions

    have = {name: version for name, version in installed((*PACKAGES, "megarl")).items() if name != "ray"}
    monkeypatch.setattr(versions, "installed", lambda packages: have)
    (finding,) = check_versions(Needs())
    assert finding.status is Status.FAIL and finding.found == "not installed: ray"
