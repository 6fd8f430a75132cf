"""The profiler of a process, with torch's real one; CUDA's need a GPU, and are checked as far as they go without."""

from __future__ import annotations

import gzip
import json
from typing import Any

import torch
from ray._private.runtime_env.nsight import parse_nsight_config
from ray.runtime_env import RuntimeEnv

from megarl.cluster.processes import nsight_options
from megarl.tracing import ProfileOptions, RoleProfile, TracingOptions
from megarl.tracing.profilers import TOOLS, ProfiledProcess
from megarl.trainer.records.tracing import NSIGHT


def trace(path):
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def multiply(size):
    torch.ones(size, size) @ torch.ones(size, size)


def test_torch_profiler_writes_a_file_per_step(tmp_path):
    options = ProfileOptions("torch", str(tmp_path / "new"), contents=("cpu", "shapes", "memory"))
    process = ProfiledProcess(options, "actor-0")
    process.record("step2")
    process.begin_verb()
    multiply(17)
    process.end_verb("update_actor")
    process.record("step3")
    multiply(19)
    process.record("")
    multiply(23)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "actor-0-step2.json.gz",
        "actor-0-step3.json.gz",
    ]
    for step, size in ((2, 17), (3, 19)):
        events = trace(tmp_path / "new" / f"actor-0-step{step}.json.gz")
        (product,) = [event for event in events if event.get("name") == "aten::mm"]
        assert product["args"]["Input Dims"][0] == [size, size]
        assert any(event.get("name") == "[memory]" for event in events)


def test_torch_profiler_writes_a_file_per_verb(tmp_path):
    process = ProfiledProcess(ProfileOptions("torch", str(tmp_path), discrete=True), "critic-1")
    process.record("step4")
    for verb in ("compute_values", "update_critic", "update_critic"):
        process.begin_verb()
        multiply(5)
        process.end_verb(verb)
    process.record("")
    process.begin_verb()
    process.end_verb("compute_values")
    names = {"compute_values", "update_critic", "update_critic-2"}
    assert {path.name for path in tmp_path.iterdir()} == {f"critic-1-step4-{name}.json.gz" for name in names}


def test_process_without_profiler_writes_nothing(tmp_path):
    process = ProfiledProcess(None, "actor-0")
    process.record("step1")
    process.begin_verb()
    process.end_verb("update_actor")
    assert list(tmp_path.iterdir()) == []


def test_profile_that_cannot_be_written_is_reported_and_the_next_one_is_recorded(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file in place of the folder", encoding="utf-8")
    profiled = ProfiledProcess(ProfileOptions("torch", str(tmp_path / "profiles"), contents=("cpu",)), "actor-0")
    profiled.record("step-1")
    torch.ones(4) + 1
    profiled.record("step-2")
    assert "actor-0-step-1 could not be written" in caplog.text
    (tmp_path / "profiles").unlink()
    torch.ones(4) + 1
    profiled.record("")
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["actor-0-step-2.json.gz"]


def test_profiled_ranks_of_a_role():
    options = ProfileOptions("torch", "x")
    tracing = TracingOptions(profiles={"actor": RoleProfile(options, (1,)), "critic": RoleProfile(options)})
    assert tracing.profile("actor", 1) is options and tracing.profile("actor", 0) is None
    assert tracing.profile("critic", 5) is options and tracing.profile("rollout", 0) is None


def test_nsys_options_have_rays_form():
    options = nsight_options(ProfileOptions("nsys", "x", nsight=NSIGHT | {"trace": "cuda"}))
    command = parse_nsight_config(RuntimeEnv(**options["runtime_env"]).nsight())
    assert command[:2] == ["nsys", "profile"]
    assert {"--trace=cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat"} <= set(command)
    assert nsight_options(ProfileOptions("torch", "x")) == {} == nsight_options(None)


def test_cuda_tools_call_existing_torch_functions(monkeypatch, tmp_path):
    """By the names and arguments of the installed torch: a call that it does not take fails here, too."""
    calls: list[str] = []
    for module, names in (
        (torch.cuda.memory, ("_record_memory_history", "_dump_snapshot")),
        (torch.cuda.profiler, ("start", "stop")),
    ):
        for name in names:
            original = getattr(module, name)

            def note(*args, original=original, name=name, **kwargs):
                import inspect

                inspect.signature(original).bind(*args, **kwargs)
                calls.append(name)

            monkeypatch.setattr(module, name, note)
    for tool in ("torch_memory", "nsys"):
        profiler = TOOLS[tool](ProfileOptions(tool, str(tmp_path)))
        profiler.start()
        profiler.stop(tmp_path / "one")
    assert calls == ["_record_memory_history", "_dump_snapshot", "_record_memory_history", "start", "stop"]
