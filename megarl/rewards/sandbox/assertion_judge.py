"""The judge of assertions: runs the test in a sandbox of its own, without the program.

``assertions.py`` runs this file after ``plain_data.py``. Names that the test does not define belong to the program. A
call of the program needs its result: if it is not among the given replies, the judge requests it and goes on with the
next assertion. Then the program performs the requested calls in its sandbox, and the judge runs again with the replies.
"""

import ast
import builtins
import importlib
import json
import operator
import random
import sys
from typing import Any

from megarl.rewards.sandbox.plain_data import decode, encode

MAX_REQUESTS = 2000
"""Requests of one round; a test that loops until a result arrives requests no more."""
_FOREIGN_NAMES = {
    "np": "numpy",
    "numpy": "numpy",
    "isclose": "math.isclose",
    **{name: f"collections.{name}" for name in ("Counter", "defaultdict", "OrderedDict", "deque")},
}
_MISSING = "__missing_reply__"
_PLAIN_METHODS = frozenset(name for kind in (str, bytes, tuple, frozenset) for name in vars(kind) if name[0] != "_")
"""A test that calls such a method, as in ``f(x).startswith("abc")``, expects plain data of the program."""


class MissingReply(BaseException):
    """A result of the program is not known yet; no exception that a test would catch."""


class ProgramError(Exception):
    """The program raised an exception of its own class."""


class Calls:
    """Calls of the program with known replies, and requests for the others.

    Args:
        replies: pairs of a request and its reply.
    """

    def __init__(self, replies: list[Any]) -> None:
        self.requests: list[Any] = []
        self._known: dict[str, list[Any]] = {}
        self._used: dict[str, int] = {}
        for request, reply in replies:
            self._known.setdefault(json.dumps(request), []).append(reply)

    def perform(self, target: Any, operation: str, arguments: Any = (), options: Any = None) -> Any:
        """Return the value of a request, raise its exception, or raise :class:`MissingReply`."""
        arguments = list(arguments)
        forms = encode(arguments, _form)
        request = {
            "target": target,
            "operation": operation,
            "arguments": forms,
            "options": {name: encode(value, _form) for name, value in (options or {}).items()},
        }
        key = json.dumps(request)
        if len(self.requests) >= MAX_REQUESTS:
            raise SystemExit("too many requests")
        number = self._used[key] = self._used.get(key, -1) + 1
        if number >= len(self._known.get(key, ())):
            self.requests.append(request)
            raise MissingReply
        reply = self._known[key][number]
        if "raised" in reply:
            raise _builtin_error(reply["raised"], str(reply["message"]))
        for argument, changed in zip(arguments, reply["arguments"], strict=True):
            _change(argument, decode(changed, self._object))
        return decode(reply["result"], self._object)

    def _object(self, form: Any) -> Any:
        if form["type"] != "object" or type(form["value"]) is not int:
            raise ValueError("malformed reply")
        return ProgramObject(self, {"type": "object", "value": form["value"]})


class ProgramObject:
    """A name, object or attribute of the program; anything but plain data equals nothing, not even itself.

    An object could answer everything with True. So the judge itself looks for an item, and calls the methods of plain
    data. Only an instance of a class that the test names, as in ``Trie()``, has such methods of its own.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, calls: Calls, form: dict[str, Any]) -> None:
        self._calls, self._form = calls, form

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return ProgramObject(self._calls, {**self._form, "attributes": [*self._form.get("attributes", ()), name]})

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it in the program's process; a method of plain data is called on the plain data, in this process."""
        *path, name = self._form.get("attributes") or (None,)
        if name in _PLAIN_METHODS:
            owner = ProgramObject(self._calls, {**self._form, "attributes": path})
            if not owner._is_tested():
                return getattr(owner._plain_data(f"{name}()"), name)(*arguments, **options)
        result = self._calls.perform(self._form, "call", arguments, options)
        if isinstance(result, ProgramObject) and _names_class(self._form):
            result._form["instance"] = True
        return result

    def _is_tested(self) -> bool:
        """Whether it is an instance of a class that the test names."""
        return "instance" in self._form and not self._form.get("attributes")

    def _plain_data(self, operation: str) -> Any:
        value = self._value()
        if isinstance(value, ProgramObject):
            raise TypeError(f"{operation}: the program's object is no plain data")
        return value

    def _value(self) -> Any:
        if self._form["type"] == "object" and not self._form.get("attributes"):
            return self
        return self._calls.perform(self._form, "get")

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return not isinstance(value, ProgramObject) and bool(value == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        value = self._value()
        return isinstance(value, ProgramObject) or bool(value)

    def _plain(self, kind: type, operation: str, *arguments: Any) -> Any:
        value = self._calls.perform(self._form, operation, arguments)
        if not isinstance(value, kind):
            raise TypeError(f"{operation} of the program's object is no {kind.__name__}")
        return value

    def __iter__(self) -> Any:
        return iter(self._plain(list, "iterate"))

    def __len__(self) -> int:
        return int(self._plain(int, "len"))

    def __str__(self) -> str:
        return str(self._plain(str, "str"))

    def __repr__(self) -> str:
        return str(self._plain(str, "repr"))

    def __contains__(self, item: Any) -> bool:
        if self._is_tested():
            return bool(self._plain(bool, "contains", item))
        value = self._value()
        return item in (self._plain(list, "iterate") if isinstance(value, ProgramObject) else value)

    def __next__(self) -> Any:
        return self._calls.perform(self._form, "next")

    def __getitem__(self, key: Any) -> Any:
        return self._calls.perform(self._form, "item", (key,))


def _names_class(form: dict[str, Any]) -> bool:
    """Whether a name or attribute is that of a class, by Python's convention."""
    name = [form["value"], *form.get("attributes", ())][-1]
    return isinstance(name, str) and name[:1].isupper()


def _operation(function: Any, reflected: bool = False) -> Any:
    def apply(self: ProgramObject, *others: Any) -> Any:
        value = self._plain_data(function.__name__)
        return function(*others, value) if reflected else function(value, *others)

    return apply


for _name in ("lt", "le", "gt", "ge", "neg", "index"):
    setattr(ProgramObject, f"__{_name}__", _operation(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(ProgramObject, f"__{_name}__", _operation(getattr(operator, _name)))
    setattr(ProgramObject, f"__r{_name}__", _operation(getattr(operator, _name), reflected=True))
for _kind in (abs, int, float, round):
    setattr(ProgramObject, f"__{_kind.__name__}__", _operation(_kind))


class TestNames(dict[str, Any]):
    """Globals of a test: its own names, the standard library, then the program's."""

    __test__ = False

    def __init__(self, calls: Calls) -> None:
        super().__init__(__name__="test", __builtins__=builtins)
        self[_MISSING] = MissingReply
        self.calls = calls

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names or name in _FOREIGN_NAMES:
            module, _, member = _FOREIGN_NAMES.get(name, name).partition(".")
            imported = importlib.import_module(module)
            return getattr(imported, member) if member else imported
        return ProgramObject(self.calls, {"type": "name", "value": name})


class _SkipUnknown(ast.NodeTransformer):
    """Lets a test continue after an assertion or a call without a known result."""

    def _guarded(self, node: ast.stmt) -> ast.stmt:
        handler = ast.ExceptHandler(ast.Name(_MISSING, ast.Load()), None, [ast.Pass()])
        guarded = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
        return ast.copy_location(guarded, node)

    visit_Assert = visit_Expr = _guarded


def run_test(test: str, replies: list[Any]) -> dict[str, Any]:
    """Run a test; return its verdict, or the requests to the program that it still needs."""
    calls = Calls(replies)
    try:
        tree = ast.fix_missing_locations(_SkipUnknown().visit(ast.parse(test)))
        random.seed(0)  # the test must make the same calls in each round
        exec(compile(tree, "test", "exec"), TestNames(calls))  # noqa: S102 - inside the sandbox
        verdict = "passed"
    except AssertionError:
        verdict = "wrong"
    except (Exception, SystemExit, MissingReply):
        verdict = "error"
    return {"verdict": "unknown" if calls.requests else verdict, "requests": calls.requests}


def _form(value: Any) -> Any:
    if isinstance(value, ProgramObject):
        return value._form
    raise TypeError(f"a {type(value).__name__} cannot be sent to the program: only plain data")


def _builtin_error(kinds: list[str], message: str) -> Exception:
    """Return an exception of the most special builtin class among these names."""
    for name in kinds:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(message)
            except TypeError:  # a class with several required arguments
                continue
    return ProgramError(message)


def _change(argument: Any, changed: Any) -> None:
    """Repeat the change of an argument that the program made in place."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(changed)


def main(marker: str) -> None:
    """Judge the tests on standard input; print each verdict as soon as it is known."""
    sys.set_int_max_str_digits(0)
    for test, replies in json.load(sys.stdin):
        print("\n" + marker + json.dumps(run_test(test, replies)), flush=True)
