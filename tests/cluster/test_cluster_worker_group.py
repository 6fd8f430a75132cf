import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import ray
import torch
from plain_workers import megarl_frames
from support.expected_errors import raises
from support.node_callers import calls_by_node

from megarl.base.errors import ResourceError, WorkerError
from megarl.base.logs import ProcessLogs
from megarl.cluster import calls
from megarl.cluster.calls import PerRank, WorkerFailed, completed_call, wait_all
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.data import DataProto
from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import build_plan, sender_plans
from megarl.tracing import TracingOptions

PP2_DP2 = ParallelLayout(pp=2, dp=2)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return ProcessLogs(tmp_path_factory.mktemp("run") / "logs")


@pytest.fixture(scope="module")
def pool(logs, forked_workers):
    with RaySession(num_cpus=2, logs=logs) as session:
        yield session.place([ResourcePool("main", "cpu", [2])])["main"]


@pytest.fixture(scope="module", params=["called by rank", "called by node"])
def groups(pool, request):
    """Two roles on the same two devices, started concurrently."""
    with calls_by_node(4) if request.param == "called by node" else nullcontext():
        echo = WorkerGroup("echo", "tests.cluster.plain_workers.Echo", {"greeting": "hi"}, PP2_DP2, pool)
        summer = WorkerGroup("summer", "tests.cluster.plain_workers:Summer", {}, ParallelLayout(tp=2), pool)
    wait_ready([echo, summer])
    yield echo, summer
    echo.shutdown()
    summer.shutdown()


@pytest.fixture(scope="module")
def echo(groups):
    return groups[0]


@pytest.fixture(scope="module")
def summer(groups):
    return groups[1]


@pytest.fixture
def sleeper(pool):
    group = WorkerGroup("sleeper", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(dp=2), pool)
    yield group
    group.shutdown()


def batch_of(rows, **meta):
    return DataProto.from_dict({"tokens": torch.arange(rows)}, {"uid": [f"u{row}" for row in range(rows)]}, meta)


def test_busy_seconds_exclude_collectives(pool, monkeypatch):
    monkeypatch.setattr(pool.processes, "options", TracingOptions(watched=True))
    group = WorkerGroup("busy", "tests.cluster.plain_workers:Summer", {}, ParallelLayout(dp=2), pool)
    wait_ready([group])
    most, least = [0.0, 0.0], [0.0, 0.0]
    for _ in range(2):
        started = time.monotonic()
        inside = group.share(batch_of(2)).batch["seconds"].tolist()
        wall = time.monotonic() - started
        for rank, (seconds, waited) in enumerate(inside):
            assert 0 < waited < seconds
            least[rank] += seconds - waited
            most[rank] += wall - waited
    busy = group.take_busy()
    assert busy.keys() == {"share"}, "the sum of both calls"
    assert all(low <= reports <= high for low, reports, high in zip(least, busy["share"], most, strict=True))
    assert busy["share"][1] >= 0.4 and group.take_busy() == {}
    group.shutdown()


def test_busy_seconds_are_empty_without_tracing(echo):
    echo.double(batch_of(4))
    assert echo.take_busy() == {}


def test_every_rank_receives_its_place(echo):
    about = echo.about()
    assert [card["rank"] for card in about] == [0, 1, 2, 3]
    assert len({card["pid"] for card in about}) == 4
    assert len({card["address"] for card in about}) == 1
    host, port = about[0]["address"]
    for rank, card in enumerate(about):
        assert card["greeting"] == "hi"
        assert card["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }


def test_roles_share_the_devices_of_a_pool(echo, summer):
    assert ray.cluster_resources()["CPU"] == 2, "six processes live on two slots"
    assert summer.total(1) == [3.0, 3.0]
    assert [card["rank"] for card in echo.about()] == [0, 1, 2, 3]


def test_one_returns_the_owners_result(echo):
    assert echo.who_answers() == PP2_DP2.rank(pp=1) == 2


def test_all_resolves_references_and_per_rank_values(echo):
    values = PerRank([ray.put("a"), "b", ray.put("c"), "d"])
    answers = echo.received(values, ray.put(7), note="same")
    assert answers == [(rank, ("abcd"[rank], 7), {"note": "same"}) for rank in range(4)]


def test_each_rank_gets_its_part_of_a_reshard_plan(echo):
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8}
    config = parse_model_config({"architectures": ["LlamaForCausalLM"], **sizes, **heads})
    plan = build_plan(WeightMap(config), ParallelLayout(tp=2, dp=2), RolloutLayout(replicas=2), 100, 4)
    for rank, (there,), _ in echo.received(PerRank(sender_plans(plan, 4))):
        assert there.sent_by(rank) == plan.sent_by(rank)


def test_split_results_are_in_the_callers_order(echo):
    answer = echo.double(batch_of(5), 3)
    assert answer.batch["doubled"].tolist() == [0, 3, 6, 9, 12]
    assert answer.non_tensor_batch["seen"].tolist() == ["u0", "u1", "u2", "u3", "u4"]
    assert answer.meta_info == {"by": 2}


def test_split_with_fewer_rows_than_ranks_and_several_results_per_row(echo):
    assert echo.twice(batch_of(1)).batch["copy"].tolist() == [0, 0]
    assert echo.twice(batch_of(3)).batch["copy"].tolist() == [0, 0, 1, 1, 2, 2]


def test_mini_batches_reach_all_stages_of_a_dp_rank(echo):
    assert echo.learn(batch_of(8, mini_batch_rows=4)) == {"rows": 4, "mini_batch_rows": 4}
    chunks = echo.last_chunk()
    for dp in range(2):
        first, last = chunks[PP2_DP2.rank(dp=dp, pp=0)], chunks[PP2_DP2.rank(dp=dp, pp=1)]
        assert first == last
    assert sorted(chunks[0][:2] + chunks[1][:2]) == ["u0", "u1", "u2", "u3"]
    assert sorted(chunks[0][2:] + chunks[1][2:]) == ["u4", "u5", "u6", "u7"]


def test_indivisible_batch_raises_on_the_driver_and_the_group_stays_usable(echo):
    with raises("batch.mini-batch-rows", "3 rows", "8 rows"):
        echo.learn(batch_of(8, mini_batch_rows=3))
    with pytest.raises(TypeError, match="needs a DataProto argument"):
        echo.double(1)
    assert echo.who_answers() == 2


def test_only_marked_methods_can_be_called(echo):
    with pytest.raises(AttributeError, match="echo has no verb 'unmarked'; it has: about, add_up, double"):
        echo.unmarked()


def test_one_frame_of_the_worker_process_calls_a_verb(echo):
    assert echo.frames_of_all() == [["call"]] * 4
    assert echo.frames_of_split(batch_of(4)) == {"frames": ["call_split"]}


def test_four_frames_of_the_group_submit_a_verb(echo, monkeypatch):
    stacks = []

    class Recorder:
        """Records the driver's stack in place of a remote call."""

        def __init__(self, results):
            self.results = results

        def __getattr__(self, name):
            return Recorder(2 if name == "call_split" else 1)

        def remote(self, *args):
            stacks.append(megarl_frames())
            refs = [ray.put(None) for _ in range(self.results)]
            return refs if len(refs) > 1 else refs[0]

    echo.verbs  # noqa: B018  (waits for the start)
    monkeypatch.setattr(echo._targets, "_nodes", [])
    monkeypatch.setattr(echo, "_actors", dict.fromkeys(range(4), Recorder(0)))
    echo.about()
    monkeypatch.setattr(echo, "_collect_rows", lambda verb, split, results: None)
    echo.double(batch_of(4))
    assert (stacks[0], stacks[-1]) == (
        ["call", "submit", "_submit_to_all", "call"],
        ["call", "submit", "start", "call_split"],
    )


def test_submit_does_not_wait(sleeper, tmp_path):
    sleeper.pid()
    file = tmp_path / "end"
    pending = sleeper.submit("wait_for", str(file))
    with pytest.raises(WorkerError) as caught:
        pending.result(timeout_s=0.1)
    assert str(caught.value) == (
        "no answer within 0.1 s in wait_for from: sleeper rank 0, sleeper rank 1 [worker.no-answer]"
    )
    file.touch()
    assert pending.result(timeout_s=120) == [None, None]


def test_a_process_loads_no_torch_before_it_has_its_environment():
    code = "import sys, megarl.cluster.worker_process; print({'torch', 'megatron'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_exception_ends_the_call_while_a_peer_hangs(summer, logs):
    pending = summer.submit("fail_while_peers_wait", 1)
    with raises("worker.raised", error=WorkerFailed) as caught:
        pending.result()
    if len(pending.calls) == 2:
        answered, _ = ray.wait([pending.calls[0].ref], timeout=0)
        assert not answered, "the peer still hangs"
    error = caught.value
    assert (error.role, error.rank, error.verb, error.died) == ("summer", 1, "fail_while_peers_wait", False)
    assert "summer rank 1 failed in fail_while_peers_wait (phase update_actor): ValueError: loss is NaN" in error.text
    assert 'raise ValueError(f"loss is NaN on rank {rank}")' in error.remote_traceback
    assert "worker_process.py" not in error.remote_traceback
    file = logs.file("summer", 1)
    assert f"--- end of the log {file} ---\n" in error.text and "summer-1 begins" in error.text
    assert 'raise ValueError(f"loss is NaN on rank {rank}")' in file.read_text(encoding="utf-8"), (
        "the log has the traceback, too"
    )
    with raises("worker.raised", "summer cannot run total", error.text, error=WorkerError):
        summer.total(1)


def test_killed_process_is_named(sleeper):
    victim = sleeper.pid()[1]
    pending = sleeper.submit("sleep", 600)
    os.kill(victim, signal.SIGKILL)
    with raises("worker.died", f"sleeper rank 1 (pid {victim} on 127.0.0.1)", "sleep", "killed", error=WorkerFailed):
        pending.result(timeout_s=120)


def test_death_takes_precedence_over_the_errors_that_it_causes(sleeper, monkeypatch):
    monkeypatch.setattr(calls, "_ECHO_S", 60.0)  # Ray reports a death late on a busy machine
    victim = sleeper.pid()[1]
    pending = sleeper.submit("lose_peer", victim)
    time.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    with raises("worker.died", error=WorkerFailed) as caught:
        pending.result(timeout_s=120)
    assert (caught.value.rank, caught.value.died) == (1, True)


def test_wait_all_ends_at_the_first_failure(pool, sleeper, tmp_path):
    other = WorkerGroup("other", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
    first, *_ = wait_all([sleeper.submit("pid"), other.submit("sleep", 0.0)])
    assert first == sleeper.pid()
    ends, file = [], tmp_path / "other has ended"

    def on_end(number):
        ends.append(number)
        if number == 1:
            file.touch()

    calls = [sleeper.submit("wait_for", str(file)), other.submit("sleep", 0.0).then(lambda results: len(results))]
    assert wait_all([*calls, completed_call("here")], on_end) == [[None, None], 1, "here"]
    assert ends == [2, 1, 0], "as soon as each ends"
    calls = [sleeper.submit("sleep", 600), other.submit("leave")]
    with raises("worker.died", "other rank 0", "leave", error=WorkerFailed):
        wait_all(calls)
    with raises("worker.died", "other cannot run pid"):
        other.pid()
    other.shutdown()


def test_error_shows_the_last_log_lines_of_a_dead_process(sleeper):
    with raises("worker.died", "sleeper rank", "leave", "the last words of this process", error=WorkerFailed):
        sleeper.submit("leave").result(timeout_s=120)


def test_failed_constructor_ends_the_start_while_a_peer_waits(pool):
    group = WorkerGroup("late", "tests.cluster.light_workers.Sleeper", {"fail_on_rank": 1}, ParallelLayout(dp=2), pool)
    with raises("worker.raised", "late rank 1", "start: FileNotFoundError: shard 3 is missing", error=WorkerFailed):
        wait_ready([group])
    group.shutdown()


@pytest.mark.parametrize(
    ("worker", "cause"),
    [
        ("no_such_package.Worker", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("tests.cluster.light_workers.os", "TypeError: tests.cluster.light_workers.os is not a class"),
    ],
)
def test_failed_import_is_named(pool, worker, cause):
    group = WorkerGroup("ghost", worker, {}, ParallelLayout(), pool)
    with raises("worker.raised", "ghost rank 0", f"load: {cause}", error=WorkerFailed):
        group.pid()
    group.shutdown()


def test_dependent_call_names_the_failed_call(pool, sleeper):
    ghost = WorkerGroup("ghost", "no_such_package.Worker", {}, ParallelLayout(), pool)
    with raises("worker.raised", "ghost rank 0", "load", error=WorkerFailed):
        sleeper.submit("sleep", ghost._starting[0].loaded.ref).result(timeout_s=120)
    ghost.shutdown()


def test_calls_leave_nothing_behind(echo):
    """Neither objects in the driver, nor records of the calls in Ray's GCS, which would grow with each step."""

    def objects_after(calls):
        for _ in range(calls):
            echo.submit("received", batch_of(4)).result()
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(30)
    assert objects_after(60) - before < 60
    time.sleep(1.5)  # processes send such records once a second
    assert ray.timeline() == []


def test_verb_with_a_name_of_the_group_raises(pool):
    group = WorkerGroup("shadow", "tests.cluster.light_workers.Shadowing", {}, ParallelLayout(), pool)
    with pytest.raises(TypeError, match=r"shadow: verbs \['submit'\] have names of WorkerGroup's methods"):
        wait_ready([group])
    group.shutdown()


def test_more_ranks_than_gpus_raise():
    class TwoGpus:
        pool = ResourcePool("gpus", "cuda", [2])

    with pytest.raises(ResourceError) as caught:
        WorkerGroup("actor", "x.Y", {}, ParallelLayout(tp=4), TwoGpus())
    assert str(caught.value) == (
        "actor with TP4 PP1 DP1 needs 4 GPUs, pool 'gpus' has 2, and two ranks of one role cannot share one: use a "
        "smaller layout or a larger pool [layout.pool-too-small]"
    )
    with raises("layout.pool-too-small", "rollout with TP1 PP1 DP2", "4 GPUs", "'gpus' has 2"):
        WorkerGroup("rollout", "x.Y", {}, ParallelLayout(dp=2), TwoGpus(), devices_per_process=2)
