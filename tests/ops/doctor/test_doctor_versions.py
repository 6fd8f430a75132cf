"""Package versions: constraint files meet all requirements, combinations match them, conflicts are reported."""

import os
import re
import shutil
import stat
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.ops.doctor.node import Needs, Status
from megarl.ops.doctor.node.versions import (
    CPU_STACKS,
    GPU_STACKS,
    PACKAGES,
    check_combination,
    check_requirements,
    check_versions,
    package_versions,
    stacks_of,
    version_differences,
)

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "GPU, SGLang": ("gpu", "sglang", "code", "math", "report"),
    "GPU, embedded engine": ("gpu", "code", "math", "report"),
}


def name_of(combination):
    return combination.name


def pins(python, file):
    """Return the pinned versions for a Python version by package."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    needed = [req for req in requirements if req.marker is None or req.marker.evaluate({"python_version": python})]
    return {canonicalize_name(req.name): pin.version for req in needed for pin in req.specifier}


def unmet(requirements, pinned, python):
    """Return the requirements without a pin that meets them, on Linux and without extras of the packages."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    parsed = [Requirement(text) for text in requirements]
    needed = [req for req in parsed if req.marker is None or req.marker.evaluate(environment)]
    met = [req.specifier.contains(pinned.get(canonicalize_name(req.name), "0.dev0"), True) for req in needed]
    return [str(requirement) for requirement, fine in zip(needed, met, strict=True) if not fine]


def known_distributions():
    """Packages with metadata on this machine: those of this environment, and of SGLang's if it exists."""
    yield from distributions()
    yield from distributions(path=[str(path) for path in ROOT.glob(".venv-sglang/lib/python*/site-packages")])


def declared(extras):
    """Return the requirements of ``pyproject.toml`` with those of some extras, without megarl's own."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [text for group in groups for text in group if not text.startswith(PROJECT["name"])]


@pytest.mark.parametrize("combination", CPU_STACKS + GPU_STACKS, ids=name_of)
def test_combinations_match_the_constraint_files(combination):
    """The files leave nothing that ``pyproject.toml`` declares without a version, for any extra of the stack."""
    pinned = pins(combination.python, combination.file)
    known = {**pins("3.12", "megarl/pins/sglang.txt"), **pinned} if "sglang" in combination.versions else pinned
    assert combination.versions == {name: known[name] for name in combination.versions}
    without = set() if combination.file.endswith("/sglang.txt") else {"sglang"}
    without |= {"dev"} if combination in GPU_STACKS else set()
    assert unmet(declared(PROJECT["optional-dependencies"].keys() - without), pinned, combination.python) == []


@pytest.mark.parametrize("combination", GPU_STACKS, ids=name_of)
def test_gpu_stacks_meet_all_requirements(combination):
    """Those in the metadata of each package in the pinned version."""
    pinned = pins(combination.python, combination.file)
    assert combination.versions == {name: pinned[name] for name in PACKAGES if name in pinned}
    checked = set()
    for distribution in known_distributions():
        name = canonicalize_name(distribution.name)
        if pinned.get(name) == distribution.version.split("+")[0]:
            assert unmet(distribution.requires or [], pinned, combination.python) == [], distribution.name
            checked.add(name)
    assert checked >= {"ray", "transformers"}


def test_sglang_contradicts_the_pins_for_cpus():
    """The reason for complete files per stack; without a contradiction one file would be enough."""
    requirements = next((item.requires for item in known_distributions() if item.name == "sglang"), None)
    if requirements is None:
        pytest.skip("SGLang's environment does not exist")
    assert "torch==2.14.1" in unmet(requirements, pins("3.12", "megarl/pins/default.txt"), "3.12")


INTERPRETER = """#!/usr/bin/env bash
case "$1 $2 $3" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) shift 2; echo "$@" >>"$LOG" ;;
esac
"""


@pytest.mark.parametrize("combination", GPU_STACKS, ids=name_of)
def test_gpu_environment_installs_torch_before_the_build_of_transformer_engine(combination, tmp_path):
    """The commands of pip are recorded: each has the stack's file alone, and the last does not isolate the build."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copytree(ROOT / "megarl/pins", tmp_path / "megarl/pins")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    interpreter = tmp_path / "python3.12"
    interpreter.write_text(INTERPRETER, encoding="utf-8")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    stack = {"GPU, SGLang": "sglang", "GPU, embedded engine": "embedded"}[combination.name]
    script = f"source launch/environment.sh && ensure_gpu_environment {stack} && echo $PATH"
    variables = {**os.environ, "PYTHON": str(interpreter), "LOG": str(tmp_path / "log")}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/.venv-gpu-{stack}/bin:")
    torch, tools, megarl = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    for command in (torch, tools, megarl):
        assert re.findall(r"-c (\S+)", command) == [str(tmp_path / combination.file)]
    assert torch.endswith(" torch") and "setuptools wheel" in tools
    assert megarl.endswith(f" --no-build-isolation -e {tmp_path}[{','.join(EXTRAS[combination.name])}]")


def test_gpu_environment_of_an_unknown_stack():
    script = "source launch/environment.sh && ensure_gpu_environment vllm"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "choose sglang or embedded" in done.stderr


def test_versions_on_a_gpu_are_compared_with_the_stacks_file():
    sglang, embedded = GPU_STACKS
    versions = {"python": "3.12.4", **sglang.versions}
    stacks = stacks_of(versions, "auto")
    assert stacks is GPU_STACKS and stacks_of({"python": "3.12.4", **embedded.versions}, "auto") is GPU_STACKS
    assert stacks_of({"torch": "2.13.0"}, "auto") is CPU_STACKS and stacks_of({"torch": "2.13.0"}, "cuda") is GPU_STACKS
    match = check_combination(versions, stacks)
    assert match.status is Status.PASS
    assert match.observation.startswith(
        "chosen by requirements, not yet run together (GPU, SGLang; megarl/pins/sglang.txt)"
    )
    # SGLang's torch replaced by the one that is tested on a CPU
    moved = check_combination({**versions, "torch": "2.13.0+cu130"}, stacks)
    assert moved.status is Status.WARN
    assert moved.remedy == "not tested together; 'GPU, SGLang; megarl/pins/sglang.txt' has torch 2.14.1"
    clash = check_requirements(
        {**versions, "torch": "2.13.0"}, lambda package: ["torch==2.14.1"] if package == "sglang" else [], stacks
    )
    assert clash.status is Status.FAIL and "pip install -c megarl/pins/sglang.txt" in clash.remedy


def test_this_environment_is_a_tested_combination():
    results = {result.check: result for result in check_versions(Needs())}
    assert results["versions"].status is Status.PASS, results
    assert results["requirements"].status is Status.PASS, results


def test_differences_from_a_tested_combination():
    tested = CPU_STACKS[0]
    changed = {"python": "3.12.4", **tested.versions, "torch": "2.99.0+cu130", "transformer-engine": "2.9"}
    assert version_differences(changed, tested) == ["torch 2.13.0", "no transformer-engine"]
    warned = check_combination(changed)
    assert warned.status is Status.WARN and "torch 2.13.0, no transformer-engine" in warned.remedy
    built = {"python": "3.12.4", **tested.versions, "torch": "2.13.0+cpu"}
    assert check_combination(built).status is Status.PASS
    assert "python 3.12" in version_differences({**built, "python": "3.11.7"}, tested)


def test_conflicting_requirements():
    requires = {"sglang": ["torch==2.9.1", "transformers>=5", "flashinfer==1"], "torch": ["sympy>1; extra == 'opt'"]}
    versions = {"python": "3.12.1", "sglang": "0.5.9", "torch": "2.9.1+cu128", "transformers": "4.51"}
    clash = check_requirements(versions, lambda package: requires.get(package, []))
    assert clash.status is Status.FAIL
    assert clash.observation == "sglang 0.5.9 requires transformers>=5, installed is 4.51"
    fine = check_requirements({**versions, "transformers": "5.19.0"}, lambda package: requires.get(package, []))
    assert fine.status is Status.PASS


def test_missing_packages_are_named(monkeypatch):
    from megarl.ops.doctor.node import versions

    present = {name: version for name, version in package_versions((*PACKAGES, "megarl-llm")).items() if name != "ray"}
    monkeypatch.setattr(versions, "package_versions", lambda packages: present)
    (result,) = check_versions(Needs())
    assert result.status is Status.FAIL and result.observation == "not installed: ray"
