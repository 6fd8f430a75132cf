"""Programs against test cases, in the local sandbox and in a service with SandboxFusion's API."""

import asyncio
import json

import pytest
from services import serving

from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.rules import code_tests
from megarl.rewards.rules.code import extract_code, read_cases
from megarl.rewards.sandbox import LocalSandbox, SandboxLimits

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "11 \n\n"]}
GOOD = "Here:\n```python\nprint(sum(map(int, input().split())))\n```\nDone."


def score(text, truth, **kwargs):
    return asyncio.run(code_tests("apps", text, truth, {}, **{"timeout_s": 60.0, **kwargs}))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```\na\n```\n", "a\n"),
        ("<think>```python\nx\n```</think>```py\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\nb", "a\nb"),
        ("print(1)", "print(1)"),
        ("Here:\r\n```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("``` python\na\n```", "a\n"),
        ('```python title="a.py"\na\n```\n', "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("```python\na```\nDone.", "a"),
        ("```python\n'''a ```b``` c'''\nd\n```", "'''a ```b``` c'''\nd\n"),
        ("1. It:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("```python\nx\n```</think>The answer is\n```\na\n```", "a\n"),
        ("```python\na\n```\n<think>```python\nx\n```</think>", "a\n"),
    ],
)
def test_extract_code(text, code):
    assert extract_code(text) == code


def test_whole_programs():
    assert score(GOOD, json.dumps(SUMS)) == {"score": 1.0, "acc": 1.0, "pass_rate": 1.0, "status": "passed"}
    half = "```python\na, b = map(int, input().split())\nprint(a + b if a < 4 else 1 / 0)\n```"
    assert score(half, SUMS) == {
        "score": pytest.approx(2 / 3),
        "acc": 0.0,
        "pass_rate": pytest.approx(2 / 3),
        "status": "error",
    }
    assert score(half, SUMS, continuous=False)["score"] == 0.0
    assert score(half, SUMS, max_cases=2)["score"] == 1.0
    assert score("print(0)", SUMS)["status"] == "wrong"


def test_timeout_ends_the_tests():
    result = score("while True: pass", SUMS, timeout_s=1.0)
    assert (result["score"], result["status"]) == (0.0, "timeout")


@pytest.mark.parametrize(
    ("code", "truth", "rate"),
    [
        ("def f(a, b):\n    return a + b", {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}, 1.0),
        (
            "class Solution:\n    def f(self, xs):\n        print('talk')\n        return tuple(sorted(xs))",
            {"fn_name": "f", "inputs": ["[3, 1]"], "outputs": ["[1, 3]"]},
            1.0,
        ),
        ("def f(a, b):\n    return a", {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, 0.0),
        ("print('[3]'); raise SystemExit", {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, 0.0),
        ("def f(a):\n    return a * 2", {"assert_case": ["assert f(2) == 4", "assert f(3) == 5"]}, 0.5),
        ("import os; os._exit(0)", {"assert_case": ["assert False"]}, 0.0),
    ],
)
def test_functions_and_assertions(code, truth, rate):
    assert score(f"```python\n{code}\n```", truth)["pass_rate"] == rate


@pytest.mark.parametrize(
    "truth", [{}, {"inputs": ["1"]}, {"inputs": [], "outputs": []}, '{"inputs": 1}', "no json", None]
)
def test_ground_truth_without_test_cases_is_an_error(truth):
    with pytest.raises((ValueError, TypeError)):
        read_cases(truth)


def fusion(number, body):
    """SandboxFusion's response for a program run by the local sandbox."""
    execution = LocalSandbox(SandboxLimits(timeout_s=body["run_timeout"])).run(body["code"], body["stdin"])
    state = "TimeLimitExceeded" if execution.status == "timeout" else "Finished"
    run = {"status": state, "return_code": execution.exit_code, "stdout": execution.stdout, "stderr": execution.stderr}
    return {"status": "Success" if execution.succeeded else "Failed", "compile_result": None, "run_result": run}


def test_remote_sandbox_equals_local_sandbox():
    with serving(lambda number, body: asyncio.to_thread(fusion, number, body)) as service:
        url = f"{service.url}/run_code"
        for text in (GOOD, "```python\n1 / 0\n```", "print(3)"):
            assert score(text, SUMS, url=url, memory_limit_mb=512) == score(text, SUMS)
        doubled = {"assert_case": ["assert f(2) == 4", "assert f(3) == 5"]}
        assert score("def f(a): return a * 2", doubled, url=url) == {
            "score": 0.5,
            "acc": 0.0,
            "pass_rate": 0.5,
            "status": "wrong",
        }
        assert score("while True: pass", SUMS, url=url, timeout_s=1.0)["status"] == "timeout"
    body = service.bodies[0]
    assert body["stdin"] == "1 2\n" and body["language"] == "python" and body["memory_limit_MB"] == 512
    assert body["run_timeout"] == body["compile_timeout"] == 60.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": "SandboxError", "message": "no room"}, "the sandbox failed: .*no room"),
        ({"status": "Success"}, "has no result of a run"),
        ([], "the sandbox failed"),
        ((504, "late"), "status 504"),
    ],
)
def test_failed_sandbox_is_an_infrastructure_failure(answer, message):
    with serving(lambda number, body: answer) as service, pytest.raises(InfrastructureFailure, match=message):
        score(GOOD, SUMS, url=service.url)


def test_compile_error_is_an_error():
    compiled = {"status": "Finished", "return_code": 1, "stderr": "syntax"}
    answer = {"status": "Failed", "compile_result": compiled, "run_result": None}
    with serving(lambda number, body: answer) as service:
        assert score(GOOD, SUMS, url=service.url)["status"] == "error"
