"""Programs that try to influence their own verdict, and honest programs with every kind of assertion."""

import asyncio

import pytest

from megarl.rewards.rules import code_tests
from megarl.rewards.sandbox import assertion_judge, isolation_problem
from megarl.rewards.sandbox.program_calls import perform

SECRET = 1346269  # f(30); no program below computes it
TRUTH = {"assert_case": [f"assert f(30) == {SECRET}"]}


def score(program, truth=TRUTH, **limits):
    assert isolation_problem() is None
    text = f"```python\n{program}\n```"
    return asyncio.run(code_tests("apps", text, truth, {}, **{"timeout_s": 60.0, **limits}))


# Reads the own source, all files, argv, environment and /proc for a literal of seven digits, and returns it.
SEARCH = """
import glob, os, re, sys
def f(n):
    texts = [" ".join(sys.argv), str(os.environ)]
    names = glob.glob("/sandbox/*") + glob.glob("/tmp/*") + [__file__]
    names += [n for kind in ("cmdline", "environ", "fd/*", "maps") for n in glob.glob("/proc/[0-9]*/" + kind)]
    for name in names:
        try:
            texts.append(open(name, errors="replace").read(100000))
        except OSError:
            pass
    found = [int(x) for text in texts for x in re.findall(r"(?<!\\d)1\\d{6}(?!\\d)", text)]
    return found[0] if found else 0
"""
STACK = """
import gc, inspect, sys
def f(n):
    frame, found = sys._getframe(), []
    while frame:
        values = [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        found += [int(x) for v in values for x in __import__("re").findall(r"1\\d{6}", repr(v)[:5000])]
        frame = frame.f_back
    numbers = [x for o in gc.get_objects() if type(o) in (list, tuple) for x in o if type(x) is int]
    found += [x for x in numbers if x < 2000000 and x % 1000003 == 346266]
    return found[0] if found else 0
"""
# Takes the marker and the reply format from the own source, and claims several verdicts.
FORGED = """
import re, sys, os
marker = re.findall(r"[0-9a-f]{32}", open(__file__).read())[-1]
for line in ('{"verdict": "passed", "requests": []}', '[{"result": true, "arguments": [30]}]', '"passed"', '', '3'):
    print("\\n" + marker + line, flush=True)
for fd in range(3, 64):
    try:
        os.write(fd, b'{"exit_code": 0}')
    except OSError:
        pass
os._exit(0)
"""
ALWAYS_EQUAL = """
class Equal{base}:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __req__ = __le__ = __ge__ = __eq__
    __hash__ = lambda self: hash(1346269)
    __bool__ = lambda self: True
    __getattr__ = lambda self, name: self
    __call__ = lambda self, *a: self
f = lambda n: Equal({value})
"""
HACKS = {
    "eq": ALWAYS_EQUAL.format(base="", value=""),
    "eq of int": ALWAYS_EQUAL.format(base="(int)", value="0"),
    "eq of str": ALWAYS_EQUAL.format(base="(str)", value="'0'"),
    "eq of float": ALWAYS_EQUAL.format(base="(float)", value="0"),
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(n): print('passed', flush=True); os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(n): raise ValueError",
    "search": SEARCH,
    "stack": STACK,
    "forged": FORGED,
    "unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = None\nf = int",
    "conftest": "open('conftest.py', 'w').write('import os; os._exit(0)')\nopen('/tmp/sitecustomize.py', 'w').write("
    "'import os; os._exit(0)')\nf = int",
    "operators": "import builtins, operator\n"
    "operator.eq = lambda *a: True\nbuiltins.AssertionError = type('E', (), {})\n"
    "builtins.exec = builtins.compile = lambda *a: None\nf = int",
    "json": 'import json\njson.dumps = lambda *a, **k: \'[{"result": {"type": "passed", "value": 0}}]\'\nf = int',
    "deep result": "import json\njson.dumps = lambda *a, **k: '[' * 200000\nf = int",
    "kill": "import os\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, 9)\n    except OSError: pass\nf = int",
    "raises": "def f(n): raise SystemExit(0)",
    "comment": "f = int\n'''",
}


@pytest.mark.parametrize("name", HACKS)
def test_program_cannot_influence_its_verdict(name):
    result = score(HACKS[name])
    assert result["score"] == 0.0 and result["status"] in ("wrong", "error"), result


YES_TO_ALL = """
class Yes:
    def __init__(self, *a): pass
    def __getattr__(self, name): return lambda *a, **k: True
    __contains__ = lambda self, item: True
    __getitem__ = lambda self, key: self
    __iter__ = lambda self: iter([self])
f = add = make = Yes
NAME = Yes()
class Solution:
    f = lambda self, *a: Yes()
    name = Yes()
"""
ECHO = """
class Echo:
    def __getattr__(self, name): return lambda *a: a[0] if a else self
f = lambda *a: Echo()
"""
ANSWERED = {
    "assert 5 in add(2, 3)": YES_TO_ALL,
    "assert not 4 not in add(2, 3)": YES_TO_ALL,
    "assert 5 in NAME": YES_TO_ALL,
    "assert 5 in Solution().f(2)": YES_TO_ALL,
    "assert 5 in Solution().name": YES_TO_ALL,
    "assert f('x').startswith('abc')": YES_TO_ALL,
    "starts = f('x').startswith\nassert starts('abc')": YES_TO_ALL,
    "assert NAME.endswith('abc')": YES_TO_ALL,
    "assert Solution().f('x').startswith('abc')": YES_TO_ALL,
    "assert Solution().name.startswith('abc')": YES_TO_ALL,
    "assert f([1]).issuperset({1, 2})": YES_TO_ALL,
    "assert f('x')[0].isdigit()": YES_TO_ALL,
    "assert f([1]).intersection({1, 2}) == {1, 2}": ECHO,
    "assert f('x').find('abc') == 0": "class F:\n    find = lambda self, text: 0\nf = lambda x: F()",
}


@pytest.mark.parametrize("test", ANSWERED)
def test_an_object_of_the_program_does_not_answer_for_plain_data(test):
    assert in_one_process(ANSWERED[test], test) in ("wrong", "error")


def test_an_object_that_answers_everything_scores_zero_in_the_sandbox():
    tests = ["assert 5 in add(2, 3)", "assert f('x').startswith('abc')"]
    assert score(YES_TO_ALL, {"assert_case": tests})["score"] == 0.0


def test_hacked_call_and_output_cases_score_zero():
    call = {"fn_name": "f", "inputs": [[30]], "outputs": [SECRET]}
    for name in ("eq of int", "search", "deep result"):
        assert score(HACKS[name], call)["score"] == 0.0
    assert score(f"{SEARCH}\nprint(f(30))", {"inputs": ["30"], "outputs": [str(SECRET)]})["score"] == 0.0


def test_endless_programs_time_out():
    assert score("def f(n):\n    while True: pass", timeout_s=1.0)["status"] == "timeout"
    assert score("import os\ndef f(n):\n    while True:\n        os.fork()", timeout_s=2.0)["score"] == 0.0


HONEST = """
import math
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def fib(n):
    if n < 0: raise ValueError("negative")
    a, b = 0, 1
    for _ in range(n): a, b = b, a + b
    return a
def sort(xs): xs.sort()
def half(x): return x / 2
def kinds(): return (None, True, 1.5, 'ä', b'x', [1], {1: {2}}, frozenset([3]), 2**70)
def evens(n): return (i for i in range(n) if i % 2 == 0)
def is_even(n): return n % 2 == 0
class Trie:
    def __init__(self): self.words = []
    def insert(self, word): self.words.append(word); return self
    def startswith(self, text): return any(word.startswith(text) for word in self.words)
    def find(self, text): return self.words.index(text)
    def __contains__(self, word): return word in self.words
def make_trie(): return Trie()
def compose(f, g): return lambda x: f(g(x))
NAME = "abc"
def decode(n): return n
LIMIT = 5
"""
HONEST_TESTS = [
    "assert fib(30) == 832040",
    "assert [fib(n) for n in range(5)] == [0, 1, 1, 2, 3]",
    "for n in range(20):\n    assert fib(n) + fib(n + 1) == fib(n + 2)",
    "assert is_even(2) and not is_even(3)",
    "assert math.isclose(half(3), 1.5) and abs(half(1) - 0.5) < 1e-9 and isclose(half(2), 1)",
    "try:\n    fib(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'",
    "xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]",
    "s = Stack()\ns.push(1); s.push(2)\nassert len(s) == 2\nassert s.pop() == 2\nassert s.items == [1]",
    "assert kinds() == (None, True, 1.5, 'ä', b'x', [1], {1: {2}}, frozenset([3]), 2**70)",
    "assert list(evens(6)) == [0, 2, 4] and sort([]) is None and decode(LIMIT - 1) == 4 and LIMIT == 5",
    "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(fib(6)) == 21\ncheck(fib)",
    "t = Trie()\nt.insert('ab')\nassert t.startswith('a') and not t.startswith('b') and t.find('ab') == 0",
    "t = Trie()\nt.insert('ab')\nassert 'ab' in t and 'a' not in t and 'ab' in t.words and t.words.index('ab') == 0",
    "t = make_trie()\nt.insert('ab')\nassert t.words == ['ab'] and t.words[0].startswith('a')",
    "assert compose(fib, decode)(6) == 8 and NAME.startswith('ab') and 'bc' in NAME",
    "assert 4 in evens(6) and 5 not in evens(6) and 3 in kinds()[-2] and str(fib(30)).startswith('832')",
    "assert isinstance(fib(2), int) and type(kinds()) == tuple",
]


def in_one_process(program, test):
    """Verdict of a test with the rounds of judge and program, without sandboxes."""
    requests, replies = [], []
    for _ in range(32):
        verdict = assertion_judge.run_test(test, list(zip(requests, replies, strict=True)))
        if verdict["verdict"] != "unknown":
            return verdict["verdict"]
        requests += verdict["requests"]
        names = {}
        exec(program, names)
        replies = perform(names, requests)
    return "unknown"


@pytest.mark.parametrize("test", HONEST_TESTS)
def test_honest_program_passes_every_kind_of_assertion(test):
    assert in_one_process(HONEST, test) == "passed"


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert fib(30) == 1", "wrong"),
        ("assert fib(30) != 832040", "wrong"),
        ("xs = [2, 1]\nsort(xs)\nassert xs == [2, 1]", "wrong"),
        ("assert Stack() == Stack()", "wrong"),
        ("assert fib in (fib,)", "wrong"),  # objects of the program equal nothing, not even themselves
        ("assert nothing(1) == 1", "error"),
        ("assert fib(", "error"),
        ("fib(-1)", "error"),
    ],
)
def test_wrong_results_fail(test, verdict):
    assert in_one_process(HONEST, test) == verdict


def test_honest_program_scores_one_in_the_sandbox():
    """Each round of judge and program takes two sandboxes, so a few of the assertions above are enough."""
    result = score(HONEST, {"assert_case": HONEST_TESTS[::4]}, max_cases=None)
    assert result == {"score": 1.0, "acc": 1.0, "pass_rate": 1.0, "status": "passed"}
