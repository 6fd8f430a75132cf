"""Container files: Dockerfiles, the devcontainer, and the steps of the CPU image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
# https://docs.docker.com/reference/dockerfile/, without MAINTAINER, which is deprecated
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN"),
    *("SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
PIN = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*")


def instructions(file):
    """The instructions of a Dockerfile with their arguments; continued lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(file, name):
    return [rest for instruction, rest in instructions(file) if instruction == name]


def copies(file):
    """Sources and target of each COPY."""
    words = [[word for word in shlex.split(rest) if not word.startswith("--")] for rest in arguments(file, "COPY")]
    return [(sources, target) for *sources, target in words]


def test_instructions_of_a_continued_line(tmp_path):
    (tmp_path / "Dockerfile").write_text("# a\nFROM x:1.2.3\nRUN a \\\n # b\n && c\n", encoding="utf-8")
    assert [name for name, _ in instructions(tmp_path / "Dockerfile")] == ["FROM", "RUN"]
    assert shlex.split(arguments(tmp_path / "Dockerfile", "RUN")[0]) == ["a", "&&", "c"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_instructions_are_known(file):
    assert {name for name, _ in instructions(file)} <= INSTRUCTIONS
    assert instructions(file)[0][0] == "FROM"
    for command in arguments(file, "CMD"):
        assert all(isinstance(word, str) for word in json.loads(command)), "the form without a shell receives signals"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_base_images_are_pinned(file):
    stages: set[str] = set()
    for image, *name in (rest.split(" AS ") for rest in arguments(file, "FROM")):
        assert image in stages or PIN.fullmatch(image), f"{image}: a tag with a complete version is expected"
        stages |= set(name)
    assert not PIN.fullmatch("python:latest") and not PIN.fullmatch("python:3.11") and not PIN.fullmatch("python")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_copied_paths_are_in_the_repository(file):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.split("/")[0] for name in tracked}
    for sources, target in copies(file):
        assert all((ROOT / source).exists() and source in tops for source in sources), sources
        assert target == "./" or [target] == sources
    copied = {source for sources, _ in copies(file) for source in sources}
    graft = set(re.findall(r"^graft (\w+)$", (ROOT / "MANIFEST.in").read_text(encoding="utf-8"), re.MULTILINE))
    assert graft - {"docker"} <= copied, "the image has the folders of a source distribution"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_scripts_are_valid(file):
    """The steps run in bash with ``pipefail``, lists of packages are removed, and the functions exist."""
    assert json.loads(arguments(file, "SHELL")[0]) == ["/bin/bash", "-euo", "pipefail", "-c"]
    functions = []
    for script in arguments(file, "RUN"):
        checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        assert "apt-get update" not in script or script.endswith("rm -rf /var/lib/apt/lists/*")
        functions += re.findall(r"source launch/environment.sh && (\w+)", script)
    declared = subprocess.run(
        ["bash", "-c", f"source launch/environment.sh && declare -F {functions[0]}"], cwd=ROOT, capture_output=True
    )
    assert len(functions) == 1 and declared.returncode == 0, functions


def test_environment_on_the_path_is_the_installed_one():
    script = (ROOT / "launch/environment.sh").read_text(encoding="utf-8")
    for file in FILES:
        (function,) = re.findall(r"source launch/environment.sh && (\w+)", "\n".join(arguments(file, "RUN")))
        (environment,) = re.findall(rf'^{function}\(\) {{\n(?:.+\n)*?  _ensure "?([^\s"]+)', script, re.MULTILINE)
        environment = environment.replace("$stack", "$STACK")  # a build argument
        (path,) = [value for value in arguments(file, "ENV") if value.startswith("PATH=")]
        assert path == f"PATH=/megarl/{environment}/bin:$PATH"
        assert f"{environment.replace('$STACK', '*')}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


def test_steps_of_the_cpu_image(tmp_path):
    """The copied files and the steps after them suffice for a job; only the packages are those of this environment."""
    file = ROOT / "docker" / "Dockerfile.cpu"
    for sources, target in copies(file):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / source)
    environment = tmp_path / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".megarl"):
            (environment / entry.name).symlink_to(entry)
    pins = "source launch/environment.sh && _checksum megarl/pins/default.txt >.venv/.megarl-pins"
    subprocess.run(["bash", "-euo", "pipefail", "-c", pins], cwd=tmp_path, check=True)
    (install,) = [step for step in arguments(file, "RUN") if step.startswith("source launch/environment.sh")]
    job = (
        "python -c 'import megarl; print(megarl.__file__)' && python -m megarl train --config-name quickstart --cfg job"
    )
    result = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{install} && {job}"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == str(tmp_path / "megarl/__init__.py")
    assert "experiment_name: quickstart" in result.stdout and "Setting up" not in result.stderr


def test_devcontainer_builds_a_stage_of_the_cpu_image():
    folder = ROOT / ".devcontainer"
    config = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    build = config["build"]
    file = (folder / build["dockerfile"]).resolve()
    assert file == ROOT / "docker" / "Dockerfile.cpu" and (folder / build["context"]).resolve() == ROOT
    assert build["target"] in [rest.partition(" AS ")[2] for rest in arguments(file, "FROM")]
    assert config["remoteUser"] in arguments(file, "USER")
    program, option, script = shlex.split(config["postCreateCommand"])
    assert (program, option) == ("bash", "-c") and script in arguments(file, "RUN")
