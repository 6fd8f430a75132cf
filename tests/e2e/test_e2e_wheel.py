"""The wheel and the source distribution: their files, and the wheel without a checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pyarrow.parquet as pq
import pytest
from support.cli_runs import ROOT

import megarl
from megarl.cli import COMMANDS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the source distribution of the files in git, and the wheel built from it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    packed = subprocess.run(["tar", "cf", "-", "--null", "-T", "-"], cwd=ROOT, input=names, capture_output=True)
    subprocess.run(["tar", "xf", "-"], cwd=source, input=packed.stdout, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return target


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Runs a command in an environment with the wheel and the dependencies of the test environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Folders in a .pth file come last in sys.path, and their own .pth files (an editable megarl) are ignored.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(*command, cwd):
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BASH_ENV")}
        environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        program = folder / "bin" / command[0]
        result = subprocess.run([program, *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result.stdout

    return run


def test_wheel_has_every_file_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (ROOT / "megarl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"megarl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert expected <= set(names), expected - set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    folders = {name.split("/")[0] for name in names}
    assert folders == {"megarl", f"megarl_llm-{megarl.__version__}.dist-info"}


def test_source_distribution_has_tests_and_docs(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for name in ("LICENSE", "CHANGELOG.md", "CITATION.cff", "mkdocs.yml", "docs/index.md", "megarl/pins/default.txt"):
        assert name in names, name
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")} <= names


def test_wheel_works_without_a_checkout(installed, tmp_path):
    location = installed("python", "-c", "import megarl; print(megarl.__file__)", cwd=tmp_path)
    assert "site-packages" in location and not location.startswith(str(ROOT))
    assert installed("megarl", "--version", cwd=tmp_path) == f"megarl {megarl.__version__}\n"
    assert "train" in installed("megarl", "--help", cwd=tmp_path)
    config = installed("megarl", "train", "--config-name", "quickstart", "--cfg", "job", cwd=tmp_path)
    assert "experiment_name: quickstart" in config
    model = f"actor_rollout_ref.model.path={ROOT}/tests/ops/plan/models/Qwen2.5-7B"
    layout = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    arguments = ("--config-name", "grpo", "--hardware", "h100", model, layout, "data.train_files=none")
    assert "Weight sync" in installed("megarl", "plan", *arguments, cwd=tmp_path)


@pytest.mark.release(twin="tests/e2e/test_e2e_wheel.py::test_wheel_has_every_file_of_the_package")
@pytest.mark.parametrize("name", list(COMMANDS))
def test_wheel_has_every_command(name, installed, tmp_path):
    assert f"usage: megarl {name}" in installed("megarl", name, "--help", cwd=tmp_path)


def test_wheel_runs_a_job(installed, task, tmp_path):
    """Generate four responses per prompt of a file and of the command line; Ray workers import the wheel."""
    model, data = f"actor_rollout_ref.model.path={task}/model", f"data.val_files={task}/data/test.parquet"
    prompt, output = 'data.prompts=["What is 1 + 2?"]', "data.output_path=answers.parquet"
    installed("megarl", "generate", "--config-name", "quickstart_generate", model, data, prompt, output, cwd=tmp_path)
    held_out = pq.read_table(task / "data" / "test.parquet").column("prompt").to_pylist()
    rows = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [*held_out, [{"role": "user", "content": "What is 1 + 2?"}]]
    answers = [text for row in rows for text in row["responses"]]
    assert len(answers) == 4 * len(rows) and None not in answers and len(set(answers)) > 4
