"""The reward pool: time limits, dying processes, retries, and equality with calls in the driver."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.expected_errors import raises

from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import RewardError
from megarl.base.processes import has_ended, wait_for_ends
from megarl.rewards.calling import FunctionSpec, LoadedFunction, RewardTask
from megarl.rewards.outcome import BAD_SAMPLE, INFRASTRUCTURE, TIMEOUT, Outcome
from megarl.rewards.pool import InDriverRunner, RewardJob, RewardPool
from megarl.rewards.pool.jobs import StreamEnded
from megarl.rewards.registry import FunctionTraits

FUNCTIONS = Path(__file__).with_name("pool_functions.py")
NAMES = (
    "misbehaving",
    "fails_once",
    "whole_batch",
    "sleeping",
    "barrier",
    "odd_results",
    "echo",
    "leaking",
    "consuming",
)
LIMIT_S = 2.0
HANGING = ("misbehaving", "whole_batch", "sleeping")
SPECS = [FunctionSpec(f"{FUNCTIONS}:{name}", {}, LIMIT_S if name in HANGING else 60.0, 8) for name in NAMES]


def task(text, truth="t"):
    return RewardTask("d", text, truth, {"index": 1}, "p")


def jobs(name, *tasks):
    return [RewardJob(NAMES.index(name), entry if isinstance(entry, RewardTask) else task(entry)) for entry in tasks]


@pytest.fixture(scope="module")
def pool():
    traits = [spec.load().traits for spec in SPECS]
    with RewardPool(SPECS, traits, processes=2, max_retries=1, preload=[0]) as running:
        yield running


def test_outcomes_equal_the_drivers_and_keep_the_order(pool):
    texts = ["a" * (index % 7) for index in range(300)]
    outcomes, counts = pool.run(jobs("misbehaving", *texts))
    assert [outcome.score for outcome in outcomes] == [len(text) for text in texts]
    assert (counts.retries, counts.replaced) == (0, 0)
    assert {outcome.extras["process"] for outcome in outcomes} <= set(pool.pids)
    for name in ("echo", "odd_results"):
        expected, _ = InDriverRunner([spec.load() for spec in SPECS]).run(jobs(name, "x"))
        assert pool.run(jobs(name, "x"))[0] == expected
    assert pool.run(jobs("echo", "x"))[0][0].extras == {"arguments": ["d", "x", "t", {"index": 1, "seen": True}, "p"]}
    (odd,), _ = pool.run(jobs("odd_results", "x"))
    assert odd.extras == {
        "lock": "<built-in function localtime>",
        "bytes": "b'x'",
        "set": [1],
        "nested": {"1": [2, 3.5]},
        "big": str(2**70),
    }


def test_a_function_that_changes_its_arguments_scores_equal_samples_equally(pool):
    """The samples of a prompt share the objects of its row."""
    shared = RewardTask("d", "x", {"answers": ["a"]}, {"hints": [1, 2]})
    drivers = InDriverRunner([spec.load() for spec in SPECS])
    with RewardPool(SPECS, pool.traits, processes=1) as one_process:
        for runner in (pool, one_process, drivers):
            outcomes, _ = runner.run(jobs("consuming", *[shared] * 24))
            assert [outcome.score for outcome in outcomes] == [12.0] * 24
    assert shared == RewardTask("d", "x", {"answers": ["a"]}, {"hints": [1, 2]})


def test_a_task_is_serialized_once(pool):
    class Counted:
        dumps = 0

        def __reduce__(self):
            Counted.dumps += 1
            return str, ("t",)

    outcomes, _ = pool.run(jobs("echo", task("x", Counted())))
    assert outcomes[0].extras["arguments"][2] == "t" and Counted.dumps == 1


def test_processes_live_for_many_batches(pool):
    before = set(pool.pids)
    calls: dict[int, int] = {}
    for _ in range(5):
        (outcome,), _ = pool.run(jobs("misbehaving", "x"))
        assert outcome.extras["calls"] > calls.get(outcome.extras["process"], 0)  # the module is kept
        calls[outcome.extras["process"]] = outcome.extras["calls"]
    assert set(pool.pids) == before
    assert pool.run([])[0] == []


def test_hanging_and_dying_calls_fail_alone(pool):
    texts = ["ok", "regex", "ok", "exit", "ok", "segfault", "wrong", "unreachable", "ok"] * 2
    outcomes, counts = pool.run(jobs("misbehaving", *texts))
    kinds = {"regex": TIMEOUT, "exit": INFRASTRUCTURE, "segfault": INFRASTRUCTURE, "wrong": BAD_SAMPLE}
    kinds |= {"unreachable": INFRASTRUCTURE, "ok": None}
    assert [outcome.kind for outcome in outcomes] == [kinds[text] for text in texts]
    by_text = dict(zip(texts, outcomes, strict=True))
    assert by_text["ok"].score == 2
    assert by_text["regex"].failure == f"{FUNCTIONS}:misbehaving took longer than its 2 s"
    assert by_text["exit"].failure.endswith("misbehaving ended with status 3")
    assert by_text["segfault"].failure.endswith("misbehaving died of SIGSEGV")
    assert "KeyError: 'no such thing'" in by_text["wrong"].failure and "pool_functions.py:" in by_text["wrong"].failure
    # each of the six infrastructure failures was tried twice; each death and timeout cost a process
    assert counts.retries == 6 and counts.replaced == 2 + 2 * 4
    assert pool.run(jobs("misbehaving", "fine"))[0][0].score == 4


def test_process_with_a_leak_is_replaced_at_its_memory_limit_and_no_sample_scores_zero():
    spec = SPECS[NAMES.index("leaking")]
    with RewardPool([spec], [spec.load().traits], processes=1, max_retries=0) as running:
        outcomes, counts = running.run([RewardJob(0, task("x")) for _ in range(10)])
        assert [(outcome.score, outcome.kind) for outcome in outcomes] == [(1.0, None)] * 10
        assert counts.replaced >= 2
        (huge, small), _ = running.run([RewardJob(0, task("huge")), RewardJob(0, task("x"))])
        assert huge.kind == INFRASTRUCTURE and huge.failure.endswith("leaking ran out of memory")
        assert small.score == 1.0


def test_function_without_memory_in_the_driver_is_an_infrastructure_failure():
    def huge(data_source, solution_str, ground_truth, extra_info):
        raise MemoryError

    (outcome,), _ = InDriverRunner([LoadedFunction(huge)]).run([RewardJob(0, task("x"))])
    assert outcome.kind == INFRASTRUCTURE and "MemoryError" in outcome.failure


def test_infrastructure_failure_is_retried(pool, tmp_path):
    outcomes, counts = pool.run(jobs("fails_once", task("x", str(tmp_path / "a")), task("x", str(tmp_path / "b"))))
    assert outcomes == [Outcome(1.0, {}), Outcome(1.0, {})] and counts.retries == 2
    waits = []
    runner = InDriverRunner([SPECS[1].load()], max_retries=1, sleep=waits.append)
    outcomes, counts = runner.run([RewardJob(0, task("x", str(tmp_path / "c")))])
    assert outcomes == [Outcome(1.0, {})] and counts.retries == 1 and waits == [0.2]
    assert (
        InDriverRunner([SPECS[1].load()]).run([RewardJob(0, task("x", str(tmp_path / "d")))])[0][0].kind
        == INFRASTRUCTURE
    )


def test_batch_function_gets_the_whole_batch(pool):
    texts = ["aaa", "b", "cc"] * 40
    outcomes, _ = pool.run(jobs("whole_batch", *texts))
    assert [outcome.score for outcome in outcomes] == [80, 0, 40] * 40 and outcomes[0].extras == {"of": 120}
    outcomes, counts = pool.run(jobs("whole_batch", "a", "regex"))
    assert [outcome.kind for outcome in outcomes] == [TIMEOUT, TIMEOUT] and counts.replaced == 1


def test_coroutines_run_concurrently_and_a_timeout_fails_alone(pool):
    outcomes, _ = pool.run(jobs("barrier", *["8"] * 64))  # sequential calls would all time out
    assert [outcome.score for outcome in outcomes] == [8] * 64
    outcomes, counts = pool.run(jobs("sleeping", "0", "100", "0.1"))
    assert [outcome.kind for outcome in outcomes] == [None, TIMEOUT, None] and counts.replaced == 0


def test_sample_that_cannot_be_pickled_fails(pool):
    lock = RewardTask("d", "x", threading.Lock(), {})
    outcomes, _ = pool.run(jobs("misbehaving", "a", lock, "b"))
    assert [outcome.kind for outcome in outcomes] == [None, BAD_SAMPLE, None]
    assert "TypeError: cannot pickle" in outcomes[1].failure
    assert InDriverRunner([SPECS[0].load()]).run([RewardJob(0, lock)])[0][0] == outcomes[1]


def test_child_of_a_function_ends_with_its_process():
    with RewardPool(SPECS[:1], [SPECS[0].load().traits], processes=1) as pool:
        (started,), _ = pool.run([RewardJob(0, task("sleeping child"))])
        child = psutil.Process(int(started.score))
        assert child.is_running()
        (pid,) = pool.pids
    wait_for_ends([child], 60)
    assert has_ended(child)
    assert not psutil.pid_exists(pid)


def test_missing_file_in_a_process_is_reported(tmp_path):
    file = tmp_path / "missing.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n", encoding="utf-8")
    spec = FunctionSpec(f"{file}:f")
    traits = spec.load().traits
    file.unlink()
    with RewardPool([spec], [traits], 1) as pool, raises("config.user-code-file", "missing.py", error=RewardError):
        pool.run([RewardJob(0, task("x"))])


DRIVER = """
import sys, time
from megarl.rewards.calling import FunctionSpec, RewardTask
from megarl.rewards.pool import RewardJob, RewardPool
spec = FunctionSpec(sys.argv[1])
pool = RewardPool([spec], [spec.load().traits], 2)
pool.start()
pool.run([RewardJob(0, RewardTask("d", "x", "t", {}))])
print(*pool.pids, flush=True)
pool.run([RewardJob(0, RewardTask("d", "regex", "t", {}))] * 2)
"""


def test_processes_end_with_a_killed_driver():
    command = [sys.executable, "-c", DRIVER, f"{FUNCTIONS}:misbehaving"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as driver:
        children = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(children) == 2
        time.sleep(0.3)  # both processes are in the regular expression
        driver.send_signal(signal.SIGKILL)
    wait_for_ends(children, 60)
    assert all(map(has_ended, children))


@pytest.fixture(scope="module")
def streaming():
    """A pool without batch functions."""
    specs = [spec for spec, name in zip(SPECS, NAMES, strict=True) if name in ("misbehaving", "fails_once")]
    with RewardPool(specs, [spec.load().traits for spec in specs], processes=2, max_retries=1) as running:
        yield running


def scores(outcomes):
    """Outcomes without the fields that name a process."""
    return [(outcome.score, outcome.kind, outcome.failure) for outcome in outcomes]


def results(futures):
    return scores(future.result(timeout=60) for future in futures)


@pytest.fixture
def stream_of(streaming):
    """Streams of pools with one function and a time limit."""
    with contextlib.ExitStack() as stack:

        def build(spec, processes):
            pool = stack.enter_context(RewardPool([spec], streaming.traits[:1], processes))
            return pool, pool.stream()

        yield build


def unlimited():
    return FunctionSpec(f"{FUNCTIONS}:misbehaving", {}, 600.0, 8)


def test_jobs_that_arrive_one_by_one_have_the_outcomes_of_a_batch(streaming):
    arriving = jobs("misbehaving", "a", "wrong", *("b" * number for number in range(30)), "exit", "regex", "c")
    expected, expected_counts = streaming.run(arriving)
    stream = streaming.stream()
    futures = []
    for at, job in enumerate(arriving):
        futures += stream.submit([job])
        time.sleep(0.05 * (at % 10 == 0))
    assert results(futures) == scores(expected)
    assert stream.take_counts().retries == expected_counts.retries and stream.take_counts().retries == 0
    stream.end()
    stream.end()  # nothing is left to end
    assert scores(streaming.run(arriving[:1])[0]) == [(1.0, None, None)]


def test_a_job_is_scored_before_the_last_one_arrives(streaming, tmp_path):
    stream = streaming.stream()
    first = stream.submit(jobs("fails_once", task("x", str(tmp_path / "called"))))
    assert results(first) == [(1.0, None, None)] and stream.take_counts().retries == 1
    second = stream.submit(jobs("misbehaving", "ab"))
    assert results(second) == [(2.0, None, None)] and stream.take_counts().retries == 0
    stream.end()


def test_results_do_not_wait_for_other_jobs(stream_of):
    pool, stream = stream_of(unlimited(), 2)
    hanging = stream.submit(jobs("misbehaving", "regex"))
    others = [future for text in ("a", "bb", "ccc") for future in stream.submit(jobs("misbehaving", text))]
    assert results(others) == [(1.0, None, None), (2.0, None, None), (3.0, None, None)]
    pool.close()
    for futures in (hanging, stream.submit(jobs("misbehaving", "a"))):  # before and after the end
        with pytest.raises(StreamEnded):
            results(futures)


def test_the_results_of_a_failed_run_are_its_error(stream_of):
    _, stream = stream_of(FunctionSpec(f"{FUNCTIONS.with_name('missing.py')}:score", {}, 5.0, 1), 1)
    for _ in range(2):
        with raises("config.user-code-file", "missing.py", error=RewardError):
            results(stream.submit(jobs("misbehaving", "a")))


def test_a_stream_that_ends_does_not_wait_for_its_jobs(stream_of):
    pool, stream = stream_of(unlimited(), 1)
    stream.submit(jobs("misbehaving", "regex", "a"))
    stream.end()
    assert scores(pool.run(jobs("misbehaving", "abc"))[0]) == [(3.0, None, None)]


def test_processes_have_the_environment_of_the_driver(tmp_path):
    """A pool in another process calls functions that find modules, files and variables as in the driver."""
    (tmp_path / "near.py").write_text(
        "import os\n"
        "def score(**arguments):\n"
        "    return {'score': float(open('weight').read()), 'key': os.environ['K']}\n",
        encoding="utf-8",
    )
    (tmp_path / "weight").write_text("2.5", encoding="utf-8")
    spec = FunctionSpec("near.score", {}, 60.0)
    environment = ChildEnvironment(str(tmp_path), {**os.environ, "K": "value"}, [str(tmp_path), *sys.path])
    with RewardPool([spec], [FunctionTraits()], 1, environment=environment) as pool:
        (outcome,), _ = pool.run([RewardJob(0, task("x"))])
    assert (outcome.score, outcome.extras) == (2.5, {"key": "value"})


def test_a_pool_with_a_batch_function_waits_for_the_batch(pool):
    assert pool.stream() is None
