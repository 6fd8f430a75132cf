"""The command line of ``megarl plan``: reports, exit codes, error messages."""

import json
import subprocess
import sys

import pytest
from planned_jobs import MODELS

from megarl.cli import main

LLAMA = [
    "--config-name=grpo",
    f"actor_rollout_ref.model.path={MODELS / 'Llama-3-70B'}",
    "data.train_files=none",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
    "trainer.nnodes=4",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4",
]
FULL = "actor_rollout_ref.actor.megatron.recompute_granularity=full"


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_report_of_a_plan_that_fits(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware", "h200", "--lengths", "mean=300,sigma=0.5")
    assert code == 0
    parts = ["4 x 8 h200", "TP8 PP4 DP1", "answers of 300 tokens on average", "update_actor", "host memory of a node"]
    parts += ["One training step: 1024 prompts x 8 samples", "tokens per second and device", "between nodes", "It fits"]
    for part in parts:
        assert part in text


def test_a_plan_that_does_not_fit_suggests_a_change(capsys):
    code, text, _ = run(capsys, *LLAMA, "--hardware=a100")
    assert code == 1 and "It does not fit" in text
    line = next(line for line in text.splitlines() if "it would fit with" in line)
    code, text, _ = run(capsys, *LLAMA, *line.rpartition(": ")[2].split(), "--hardware=a100")
    assert code == 0 and "It fits" in text


def test_json_report(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware", "h200", "--json")
    plan = json.loads(text)
    assert code == 0 and plan["fits"] is True and plan["remedy"] is None
    assert (
        set(plan["step"]["phases"])
        == {"gen", "old_log_prob", "ref", "update_actor", "update_weights"}
        == set(plan["memory"])
    )
    for phase in plan["step"]["phases"].values():
        assert sum(phase["by_cause"].values()) == pytest.approx(phase["seconds"])
    for phase in plan["memory"].values():
        assert sum(part["nbytes"] for part in phase["components"]) == phase["bytes"] <= plan["usable_bytes"]
    assert plan["sync"]["total"] == 4 * 2 * (70_553_706_496 + 7 * 161 * 8192), "norms are on each rank"


ASYNC = (
    "--config-name=run_32b_async",
    f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-32B'}",
    "data.train_files=none",
    "--hardware=h100",
    "--lengths=mean=6000,sigma=1.0,prompt_mean=300",
)


def test_asynchronous_training_is_planned_with_its_two_pools(capsys):
    code, text, _ = run(capsys, *ASYNC)
    assert code == 0 and "4 x 8 h100, 4 x 8 for the engines" in text
    assert text.count("as configured") == text.count("fastest split of the devices") == 1
    plan = json.loads(run(capsys, *ASYNC, "--json")[1])
    step, modes = plan["step"], plan["asynchronous"]
    seconds = {name: phase["seconds"] for name, phase in step["phases"].items()}
    training = sum(value for name, value in seconds.items() if name not in ("gen", "update_weights"))
    # Responses of several batches run together, so the tail of a batch costs nothing.
    assert training < step["seconds"] == modes["configured"]["step_s"] < seconds["gen"]
    assert modes["configured"]["max_staleness"] == 1 and modes["synchronous"]["max_staleness"] == 0
    assert modes["fastest_split"]["step_s"] <= modes["configured"]["step_s"]
    # A sync that waits for all responses takes the longer side and what is left of the tail.
    waiting = json.loads(run(capsys, *ASYNC, "async_training.partial_rollout=false", "--json")[1])["asynchronous"]
    longer = max(seconds["gen"], training) + seconds["update_weights"]
    assert 0.8 * longer < waiting["configured"]["step_s"] < training + seconds["gen"]


def test_layout_search_of_asynchronous_training_is_refused(capsys):
    code, _, error = run(capsys, *ASYNC, "--search")
    assert code == 2 and "async_training.mode=disaggregated: --search covers shared devices only" in error


def test_layout_search_of_a_command_whose_layout_does_not_divide(capsys):
    invalid = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"
    arguments = [*LLAMA, FULL, invalid, "--hardware=h200"]
    code, _, error = run(capsys, *arguments)
    assert code == 2 and invalid in error
    code, text, _ = run(capsys, *arguments, "--search", "--top=1", "--json")
    assert code == 0
    code, text, _ = run(capsys, *arguments, *json.loads(text)["best"][0]["overrides"])
    assert code == 0 and "It fits" in text


def test_layout_search(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware=h200", "--search", "--top=2", "--json")
    best = json.loads(text)["best"]
    assert code == 0 and len(best) == 2
    assert best[0]["tokens_per_second_per_device"] >= best[1]["tokens_per_second_per_device"]
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware=h200", "--search", "--top=2")
    assert code == 0 and f"1: {' '.join(best[0]['overrides'])}" in text


@pytest.mark.parametrize("job", ["sft", "reward-model"])
def test_supervised_jobs(capsys, job):
    code, text, _ = run(
        capsys, "--job", job, f"model.path={MODELS / 'Qwen2.5-7B'}", "data.train_files=none", "--json",
        "megatron.tensor_model_parallel_size=2", "megatron.recompute_granularity=full",
    )  # fmt: skip
    plan = json.loads(text)
    assert code == 0 and list(plan["memory"]) == ["update"] == list(plan["step"]["phases"])
    assert plan["sync"] is None and plan["kv_cache"] is None
    assert plan["lengths"].startswith("sequences of 1,024 tokens each"), "rows have no separate prompt"


def test_a_cpu_job_is_planned_for_the_cpu(capsys):
    code, text, _ = run(
        capsys, "--config-name=quickstart", f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-7B'}", "--json"
    )
    plan = json.loads(text)
    assert plan["hardware"] == "cpu" and code == 1, "7B in float32 with Adam do not fit a laptop"


@pytest.mark.parametrize(
    ("argument", "named", "end"),
    [
        ("--hardware=h10", "--hardware=h10", "[plan.no-hardware-file]"),
        ("trainer.hardware=H200", "did you mean h200?", "[plan.no-hardware-file]"),
        ("--hardware=my/node.yaml", "my/node.yaml", "[plan.no-hardware-file]"),
        ("--lengths=mean=9999", "mean=9999", "[plan.lengths-range]"),
        ("trainer.n_gpus_per_node=16", "trainer.hardware=h100", "[plan.devices-per-node]"),
        ("trainer.nodes=2", "trainer.nnodes", "[config.unknown-key]"),
        ("actor_rollout_ref.model.path=/nowhere", "/nowhere", "[model.folder-missing]"),
        (
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3",
            "pipeline_model_parallel_size=3",
            "[layout.replicas-do-not-divide]",
        ),
    ],
)
def test_errors_have_exit_code_two(capsys, argument, named, end):
    code, _, error = run(capsys, *LLAMA, argument)
    assert code == 2 and named in error and end in error


def test_top_needs_search(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *LLAMA, "--top=3"])
    assert stopped.value.code == 2 and "--top needs --search" in capsys.readouterr().err


def test_tables_wrap_without_losing_components(capsys):
    """A 70B model on one node, which has many components in every phase."""
    large = ["--config-name=ppo", *LLAMA[1:3], "--hardware=h100"]
    _, text, _ = run(capsys, *large)
    _, values, _ = run(capsys, *large, "--json")
    table = text[text.index("Memory of the fullest") : text.index("Batches")].splitlines()
    assert max(map(len, table)) <= 120
    words = " ".join(" ".join(table).split())
    for part in json.loads(values)["memory"]["update_critic"]["components"]:
        if part["nbytes"] > 2**30:
            assert f"{part['owner']} {part['name']} {part['nbytes'] / 2**30:.1f}" in words


def test_the_planner_imports_no_torch():
    """The planner starts in seconds, since it imports nothing heavy."""
    script = (
        "import sys; from megarl.cli import main\n"
        f"code = main(['plan', '--hardware=h200', {FULL!r}, *{LLAMA!r}])\n"
        "assert code == 0\n"
        "print(*({'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
