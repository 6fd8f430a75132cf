"""Each benchmark runs to its end and prints its table, with the smallest sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.arithmetic_task import make_task
from support.warm_drivers import Drivers, write_interpreter

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8") and path.stem != "grpo_trl"  # TRL is in another environment
]
JOBS = ("asynchronous", "data", "grpo_job", "learning", "plan_times", "quickstart", "rollout", "soak", "startup")
"""Their jobs and scripts are forks. Others may start Ray, whose processes need an interpreter that is no script."""
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(
        tmp_path_factory.mktemp("task"), "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_prints_its_table(
    script: Path, task: Path, drivers: Drivers, shared_server: dict[str, str], tmp_path: Path
) -> None:
    sizes = ["--tiny"] if "parse_sizes" in script.read_text(encoding="utf-8") else []
    data = [f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet"]
    model = f"actor_rollout_ref.model.path={task}/model"
    batch = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    overrides = {
        "learning": ["--runs", str(tmp_path), *data, model],
        "quickstart": [*data, model, *batch],
    }
    output = tmp_path / "output.txt"
    interpreter = write_interpreter(tmp_path / "python", drivers.address, "megarl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **shared_server}
    if script.stem in JOBS:
        environment["WARM_PYTHON"] = str(interpreter)
    with output.open("wb") as file:
        command = [str(script), *sizes, *overrides.get(script.stem, [])]
        job = drivers.start(command, tmp_path, environment, file.fileno())
        try:
            code = job.wait(LIMIT_S)
        finally:
            job.kill()
    text = output.read_text(encoding="utf-8")
    assert code == 0 and sum(any(map(str.isdigit, line)) for line in text.splitlines()) >= 1, text
