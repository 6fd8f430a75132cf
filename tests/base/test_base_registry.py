import sys
import types

import pytest
from support.expected_errors import raises

from megarl.base.errors import ConfigError, RewardError
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_function


@pytest.fixture
def registry():
    registry: Registry = Registry("some.key")
    registry.register("one", "eins")(len)
    registry.register("two")(max)
    return registry


def test_entry_is_registered_under_each_name(registry):
    assert registry["one"] is len and registry["eins"] is len and registry["two"] is max
    assert set(registry) == {"one", "eins", "two"} and len(registry) == 3
    assert "one" in registry and "three" not in registry
    assert registry.get("one") is len and registry.get("three") is None and registry.find("one") is len


def test_unknown_name_lists_known_and_nearest_names(registry):
    with raises("config.unknown-name", "some.key='three'", "eins, one, two", error=ConfigError) as caught:
        registry["three"]
    assert "did you mean" not in caught.value.text
    with raises("config.unknown-name") as caught:
        registry.find("eine")
    assert str(caught.value) == (
        "some.key='eine' is unknown; did you mean 'eins'? known ones: eins, one, two [config.unknown-name]"
    )


def test_duplicate_name_is_an_error(registry):
    registry.register("one")(len)
    with raises("config.name-taken", "some.key='one'", "builtins"):
        registry.register("one")(max)
    assert registry["one"] is len
    reimported = types.FunctionType(max_of_two.__code__, globals(), "max_of_two")
    registry.register("three")(max_of_two)
    registry.register("three")(reimported)
    assert registry["three"] is reimported


def max_of_two(a, b):
    return max(a, b)


def test_entries_are_imported_lazily(monkeypatch, tmp_path):
    (tmp_path / "lazy_entries.py").write_text(f"from {__name__} import LAZY\nLAZY['late'] = abs\n", encoding="utf-8")
    (tmp_path / "default_entries.py").write_text(
        f"from {__name__} import LAZY\nLAZY['default'] = all\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("key", lazy={"late": "lazy_entries"}, defaults="default_entries")
    monkeypatch.setattr(sys.modules[__name__], "LAZY", registry, raising=False)
    assert "default_entries" not in sys.modules
    assert sorted(registry) == ["default", "late"] and "lazy_entries" not in sys.modules
    assert registry["late"] is abs and registry["default"] is all


def test_specs_of_user_code_are_loaded(tmp_path):
    file = tmp_path / "custom.py"
    file.write_text("def double(x):\n    return 2 * x\nnumber = 3\n", encoding="utf-8")
    registry = Registry("some.key", loader=load_user_function)
    assert registry.find(f"{file}:double")(4) == 8
    with raises("config.user-code-function") as caught:
        registry.find(f"{file}:triple")
    text = f"some.key '{file}:triple': it has no 'triple'; its functions are ['double']"
    assert str(caught.value) == f"{text} [config.user-code-function]"
    with raises("config.user-code-not-callable", "some.key", f"{file}:number", "int"):
        registry.find(f"{file}:number")
    with raises("config.unknown-name", "some.key='double'", "known ones: none", "path.py:name"):
        registry.find("double")


def test_error_class_and_hint():
    registry = Registry("reward", error=RewardError, hint="see the docs")
    with raises("config.unknown-name", "reward='a'", "see the docs", error=RewardError):
        registry["a"]
