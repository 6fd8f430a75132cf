import pytest

from megarl.algorithms.registry import Registry
from megarl.errors import ConfigError


@pytest.fixture
def registry() -> Registry:
    registry: Registry = Registry("some.key")
    registry.register("one", "eins")(len)
    registry.register("two")(max)
    return registry


def test_an_entry_is_found_under_each_of_its_names(registry):
    assert registry["one"] is len and registry["eins"] is len and registry["two"] is max
    assert set(registry) == {"one", "eins", "two"} and len(registry) == 3
    assert "one" in registry and "three" not in registry


def test_an_unknown_name_lists_the_known_ones(registry):
    with pytest.raises(ConfigError, match=r"some\.key='three' is not known; known are eins, one, two"):
        registry["three"]


def test_a_name_is_not_taken_twice(registry):
    registry.register("one")(len)
    with pytest.raises(ConfigError, match=r"some\.key='one' is registered already"):
        registry.register("one")(max)
    assert registry["one"] is len
