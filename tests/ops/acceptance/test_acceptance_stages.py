"""One run of the launch script runs every stage on the CPU with tiny sizes; a rerun continues after a time limit.

With ``RELEASE=1`` it makes every check. CI leaves out the families and jobs that
tests/megatron/test_megatron_families.py and tests/e2e have, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.release import RELEASE
from support.warm_drivers import write_interpreter

from megarl.ops.acceptance.models import FAMILIES
from megarl.ops.acceptance.stages import STAGES

ROOT = Path(__file__).parents[3]
COMPARED = [*FAMILIES] if RELEASE else ["qwen3_moe", "llama"]
LEFT_OUT = [] if RELEASE else [*(f"{name} " for name in FAMILIES if name not in COMPARED), "GRPO ", "PPO ", "kill "]
CHECKS = ("--checks", f"^(?!{'|'.join(LEFT_OUT)})") if LEFT_OUT else ()


def check(folder, *arguments, python=Path(sys.executable), env=None):
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "gpu_check.sh"), "--device", "cpu", "--out", str(folder), *arguments],
        env={**os.environ, "PYTHON": str(python), **(env or {})},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def rows(folder, stage):
    report = json.loads((folder / f"{stage}.json").read_text(encoding="utf-8"))
    assert report["is_complete"]
    return {row["check"]: row for row in report["results"]}


@pytest.fixture(scope="module")
def warm_python(tmp_path_factory, drivers):
    """Interpreter of processes that have imported torch, transformers and Megatron."""
    return write_interpreter(tmp_path_factory.mktemp("bin") / "python", drivers.address, "megarl.ops.acceptance")


@pytest.fixture(scope="module")
def accepted(tmp_path_factory, warm_python, shared_server):
    """Folder and output of a run of all stages; stages and jobs are forks."""
    folder = tmp_path_factory.mktemp("accepted")
    run = check(folder, *CHECKS, python=warm_python, env=shared_server)
    assert run.returncode in (0, 1), run.stderr
    return folder, run.stdout + run.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_stage_runs_on_a_cpu(accepted, stage):
    folder, output = accepted
    assert f"== {stage}: " in output
    results = rows(folder, stage)
    absent = {name for name, row in results.items() if row["outcome"] == "missing"}
    assert {name: row for name, row in results.items() if row["outcome"] in ("FAIL", "below")} == {}, output
    assert absent == EXPECTED_MISSING.get(stage, set())
    if stage == "parity":
        compared = {(family, dtype) for family in COMPARED for dtype in ("float32", "bfloat16")}
        assert {(name.split()[0], name.split()[1]) for name in results if "gradients" in name} == compared


def test_table_has_a_row_per_check(accepted):
    folder, _ = accepted
    count = sum(len(rows(folder, stage)) for stage in STAGES)
    assert (folder / "results.md").read_text(encoding="utf-8").count("\n| ") == count + len(STAGES)


EXPECTED_MISSING = {"engines": {"SGLang: contract tests"}}
"""Checks that need a package that is not in this environment."""


def test_settled_stages_are_not_repeated_and_the_budget_ends_the_others(accepted, warm_python):
    """Without SGLang a check of `engines` remains, as do those left out; the budget is too small to start them."""
    folder, _ = accepted
    run = check(folder, *CHECKS, "--budget", "1", python=warm_python)
    assert run.returncode == 0, run.stderr
    unsettled = ["parity, jobs", "engines"] if LEFT_OUT else ["engines"]
    lines = [line for line in run.stderr.splitlines() if line.startswith("== ")]
    assert lines == [f"== {stages}: no time left in the budget" for stages in unsettled]


def test_time_limit_is_a_row_and_the_same_command_continues(tmp_path, warm_python):
    arguments = ("--stages", "offload", "--checks", "pinned")
    run = check(tmp_path, *arguments, "--limit", "0.2")  # less than the imports of a new process
    assert run.returncode == 1
    assert "ended after the limit of 0 s; the same command continues" in run.stdout
    run = check(tmp_path, *arguments, python=warm_python)
    assert run.returncode == 0, run.stdout
    assert "process of the stage" not in rows(tmp_path, "offload")


def test_checks_by_name_leave_the_others_to_a_later_run(tmp_path, warm_python):
    arguments = ("--stages", "offload", "--checks")
    run = check(tmp_path, *arguments, "pinned copy to the host", python=warm_python)
    assert run.returncode == 0, run.stdout
    assert list(rows(tmp_path, "offload")) == ["pinned copy to the host"]
    check(tmp_path, *arguments, "pinned", python=warm_python)
    assert list(rows(tmp_path, "offload")) == ["pinned copy to the host", "pinned copy to the device"]
    run = check(tmp_path, *arguments, "(", python=warm_python)
    assert run.returncode == 2 and run.stderr.endswith("[acceptance.checks-pattern]\n")


def test_unknown_stage_and_absent_gpu_are_refused(tmp_path, warm_python):
    run = check(tmp_path, "--stages", "paritty", python=warm_python)
    assert (run.returncode, run.stdout) == (2, "")
    assert "'paritty'" in run.stderr and run.stderr.endswith("[acceptance.unknown-stage]\n")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    run = check(tmp_path, "--device", "cuda", "--stages", "offload", python=warm_python, env=hidden)
    assert run.returncode == 2 and run.stderr.endswith("[acceptance.no-cuda]\n")


def test_package_that_a_stage_imports_is_a_row_if_absent(tmp_path):
    hide = f"import sys; sys.modules['omegaconf'] = None; sys.argv[1:] = {_arguments(tmp_path)!r}"
    run = subprocess.run(
        [sys.executable, "-c", f"{hide}; from megarl.ops.acceptance.stages import main; sys.exit(main())"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert rows(tmp_path, "speed")["packages"]["outcome"] == "missing"
    assert "omegaconf" in rows(tmp_path, "speed")["packages"]["note"]


def _arguments(folder):
    return ["speed", "--folder", str(folder), "--scale", "tiny", "--device", "cpu"]
