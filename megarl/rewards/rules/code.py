"""The code reward: runs the response's program against test cases, in a sandbox.

Test cases come in the forms of verl's datasets: whole programs, functions, and assertions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megarl.base.json_text import parse_json
from megarl.rewards.registry import register_reward
from megarl.rewards.sandbox.assertions import judge_assertions
from megarl.rewards.sandbox.local import TIMEOUT, Execution, LocalSandbox, SandboxLimits
from megarl.rewards.sandbox.remote import RemoteSandbox

_THOUGHTS = re.compile(r"\A(?:(?!<think>).)*</think>|<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(
    r"(^[ \t]+)?(?P<fence>```|~~~)[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*(?P=fence)|(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py", "py3")
_CALL = """
import json as _json, sys as _sys
_arguments = _json.loads(_sys.stdin.read())
_function = globals().get({name!r}) or getattr(Solution(), {name!r})
print("\\n" + {token!r} + _json.dumps(_function(*_arguments)))
"""


@register_reward("code", isolated=True)
async def code_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    url: str | None = None,
    timeout_s: float = 10.0,
    memory_limit_mb: int = 1024,
    max_processes: int = 16,
    disk_mb: int = 16,
    max_cases: int | None = 10,
    continuous: bool = True,
    allow_unfiltered: bool = False,
) -> dict[str, float | str]:
    """Score the share of passed test cases, or whether all pass.

    The first timeout ends the tests: a program that loops is wrong, and further cases would only cost time.

    Args:
        ground_truth: test cases, see :func:`read_cases`.
        url: URL of a remote sandbox; None = the local sandbox.
        timeout_s: wall seconds per case.
        memory_limit_mb: memory of a program with all its processes, in MiB.
        max_processes: process limit of the local sandbox.
        disk_mb: disk limit of the local sandbox, in MiB.
        max_cases: number of cases to run, from the first; None = all.
        continuous: score the share; False: 1.0 if all pass, else 0.0.
        allow_unfiltered: use the local sandbox also where it has no filter of system calls.

    Returns:
        ``score``; ``acc``: 1.0 if all cases pass; ``pass_rate``; ``status``: ``passed``, or the result of the first
        failing case: ``wrong``, ``error`` or ``timeout``.

    Raises:
        ValueError: the ground truth has no test cases.
        InfrastructureFailure: no sandbox is available.
    """
    cases, program = read_cases(ground_truth), extract_code(solution_str)
    limits = SandboxLimits(timeout_s, memory_limit_mb, max_processes, disk_mb)
    remote = RemoteSandbox(url, timeout_s, memory_limit_mb) if url else None
    local = LocalSandbox(limits, allow_unfiltered)

    async def run(source: str, stdin: str) -> Execution:
        return await (remote.run(source, stdin) if remote else asyncio.to_thread(local.run, source, stdin))

    count = min(len(cases), max_cases or len(cases))
    statuses: list[str] = []
    for number in range(min(count, len(cases.inputs))):
        execution = await run(*cases.trial(number, program))
        failed = "timeout" if execution.status == TIMEOUT else "wrong" if execution.succeeded else "error"
        statuses.append("passed" if cases.passes(number, execution) else failed)
        if execution.status == TIMEOUT:
            break
    tests = cases.asserts[: max(0, count - len(cases.inputs))]
    if tests and TIMEOUT not in statuses:
        statuses += await judge_assertions(run, program, tests, len(tests) * timeout_s)
    passed = statuses.count("passed")
    status = next((status for status in statuses if status != "passed"), "passed")
    share = passed / count
    return {
        "score": share if continuous else float(share == 1),
        "acc": float(share == 1),
        "pass_rate": share,
        "status": status,
    }


def extract_code(response: str) -> str:
    """Extract the program of a response: the last fenced Python block, else the last fenced block, else everything.

    Reasoning is ignored: ``<think>`` blocks, and text before ``</think>``. An unclosed block ends with the response. A
    block in a list loses the indentation of its fence.
    """
    text = _THOUGHTS.sub("", response.replace("\r\n", "\n"))
    blocks = [(language.lower(), _outdented(code, len(indent))) for indent, _, language, code in _FENCE.findall(text)]
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [code for _, code in blocks] or [text])[-1]


def _outdented(code: str, width: int) -> str:
    return re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE) if width else code


class _Trial(NamedTuple):
    """A program to run for one test case, and its standard input."""

    source: str
    stdin: str


class TestCases:
    """The test cases of a programming task.

    Args:
        inputs: per case the text for standard input; with a function, its arguments.
        outputs: per case the expected standard output; with a function, its value.
        function: name of the function, or of ``Solution``'s method; None = whole programs.
        asserts: further cases: Python code that raises if the program is wrong.
    """

    __test__ = False

    def __init__(
        self, inputs: Sequence[Any], outputs: Sequence[Any], function: str | None = None, asserts: Sequence[str] = ()
    ) -> None:
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.function = function
        self.asserts = list(asserts)
        # Separates the result from other output. A program may imitate it: it does not know the expected value.
        self._token = secrets.token_hex(16)

    def __len__(self) -> int:
        return len(self.inputs) + len(self.asserts)

    def trial(self, number: int, code: str) -> _Trial:
        """Return the program to run for a case that is no assertion."""
        if self.function is None:
            return _Trial(code, _text(self.inputs[number]))
        arguments = _arguments(self.inputs[number])
        return _Trial(code + _CALL.format(name=self.function, token=self._token), json.dumps(arguments))

    def passes(self, number: int, execution: Execution) -> bool:
        """Return whether the program passes a case that is no assertion."""
        if not execution.succeeded:
            return False
        if self.function is None:
            return _lines(execution.stdout) == _lines(_text(self.outputs[number]))
        _, token, result = execution.stdout.rpartition(self._token)
        try:
            value = parse_json(result) if token else None
        except ValueError:
            return False
        return bool(token) and value in _expected_values(self.outputs[number])


def read_cases(ground_truth: Any) -> TestCases:
    """Read the test cases of a ground truth: a mapping, or its JSON.

    The mapping has ``inputs`` and ``outputs``, with ``fn_name`` for functions; or ``assert_case``.

    Raises:
        ValueError: the ground truth has no test cases.
    """
    cases = parse_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(cases, Mapping):
        inputs, outputs, asserts = (
            [] if cases.get(name) is None else list(cases[name]) for name in ("inputs", "outputs", "assert_case")
        )
        if len(inputs) == len(outputs) and (inputs or asserts):
            return TestCases(inputs, outputs, cases.get("fn_name") or None, list(map(str, asserts)))
    raise ValueError(
        f"ground_truth={ground_truth!r:.200} has no test cases: it must be a mapping, or its JSON, with as many "
        "'inputs' as 'outputs', or with 'assert_case'"
    )


def _list(value: Any) -> list[Any]:
    return [] if value is None else list(value)


def _arguments(value: Any) -> list[Any]:
    """Arguments of a call: a list, or text with one JSON value per line."""
    if isinstance(value, str):
        return [parse_json(line) for line in value.splitlines() if line.strip()]
    return list(value)


def _expected_values(output: Any) -> list[Any]:
    """Accepted values: the output itself, its JSON, or the only entry of a list."""
    values = [output]
    if isinstance(output, str):
        with contextlib.suppress(ValueError):
            values.append(parse_json(output))
    return values + [value[0] for value in values if isinstance(value, list) and len(value) == 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
