"""The end of a tested program: performs the calls of its assertions and prints their results as plain data.

``assertions.py`` appends this file, after ``plain_data.py``, to the program. The program can replace anything here: it
can only send wrong values, since the judge compares them in another sandbox.
"""

import json
import operator
import sys
from typing import Any

from megarl.rewards.sandbox.plain_data import decode, encode

OPERATIONS: dict[str, Any] = {
    "get": lambda target: target,
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "iterate": list,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "item": operator.getitem,
    "contains": operator.contains,
}


def perform(names: dict[str, Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Perform requests one after another and return a reply to each."""
    objects: list[Any] = []

    def handle(value: Any) -> dict[str, Any]:
        objects.append(value)
        return {"type": "object", "value": len(objects) - 1}

    def target(form: dict[str, Any]) -> Any:
        root = form["value"]
        if isinstance(root, str) and root not in names:
            raise NameError(f"name {root!r} is not defined")
        value = names[root] if isinstance(root, str) else objects[root]
        for name in form.get("attributes", ()):
            value = getattr(value, name)
        return value

    replies = []
    for request in requests:
        try:
            arguments = decode(request["arguments"], target)
            options = {name: decode(value, target) for name, value in request["options"].items()}
            result = OPERATIONS[request["operation"]](target(request["target"]), *arguments, **options)
            # arguments go back as well, for functions that change them in place
            reply = {"result": encode(result, handle), "arguments": encode(arguments, lambda value: None)}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": kinds, "message": str(error)}
        replies.append(reply)
    return replies


def answer(names: dict[str, Any], requests: str, marker: str) -> None:
    """Print the replies to requests."""
    sys.set_int_max_str_digits(0)
    print("\n" + marker + json.dumps(perform(names, json.loads(requests))), flush=True)
