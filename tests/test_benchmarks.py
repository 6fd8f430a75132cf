"""Benchmarks run to their end and print their tables, with the smallest sizes.

CI runs those of a few seconds, and ``RELEASE=1`` runs all of them. The others run jobs whose properties other tests
prove. In CI they print their options, for which they import all that they use.
"""

import os
from pathlib import Path

import pytest
from support.arithmetic_task import make_task
from support.warm_drivers import write_interpreter

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8") and path.stem != "grpo_trl"  # TRL is in another environment
]
JOBS = ("asynchronous", "data", "grpo_job", "learning", "plan_times", "quickstart", "rollout", "soak", "startup")
"""Their jobs and scripts are forks. Others may start Ray, whose processes need an interpreter that is no script."""
LONG = (
    *("agents", "asynchronous", "batch_store", "convert", "data", "engine", "grpo_job", "grpo_step", "learning"),
    *("plan_memory", "plan_times", "precision", "quickstart", "soak", "startup", "weight_sync"),
)
"""Their tables take 5 to 20 s of CPU time each."""
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(
        tmp_path_factory.mktemp("task"), "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60"
    )


def output_of(command, folder, drivers, shared_server, warm_jobs=False):
    """Run a script as a fork; return what it prints."""
    output = folder / "output.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **shared_server}
    if warm_jobs:
        environment["WARM_PYTHON"] = str(write_interpreter(folder / "python", drivers.address, "megarl"))
    with output.open("wb") as file:
        job = drivers.start(command, folder, environment, file.fileno())
        try:
            code = job.wait(LIMIT_S)
        finally:
            job.kill()
    text = output.read_text(encoding="utf-8")
    assert code == 0, text
    return text


IN_A_RELEASE = pytest.mark.release(twin="tests/test_benchmarks.py::test_a_long_benchmark_is_imported")


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[IN_A_RELEASE] if path.stem in LONG else []) for path in SCRIPTS],
)
def test_a_benchmark_prints_its_table(script, task, drivers, shared_server, tmp_path):
    sizes = ["--tiny"] if "parse_sizes" in script.read_text(encoding="utf-8") else []
    data = [f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet"]
    model = f"actor_rollout_ref.model.path={task}/model"
    batch = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    overrides = {
        "learning": ["--runs", str(tmp_path), *data, model],
        "quickstart": [*data, model, *batch],
    }
    command = [str(script), *sizes, *overrides.get(script.stem, [])]
    text = output_of(command, tmp_path, drivers, shared_server, script.stem in JOBS)
    assert any(any(map(str.isdigit, line)) for line in text.splitlines()), text


@pytest.mark.parametrize("name", LONG)
def test_a_long_benchmark_is_imported(name, drivers, shared_server, tmp_path):
    text = output_of([str(ROOT / "benchmarks" / f"{name}.py"), "--help"], tmp_path, drivers, shared_server)
    assert "--tiny" in text
