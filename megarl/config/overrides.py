"""Overrides of the command line, and texts of YAML files: a text stays as the user wrote it.

Hydra and YAML read ``2026_11_27`` as a number whatever its key is, and Hydra's syntax has no ``~``, ``#``, ``=`` or
letters beyond ASCII. The schema says which keys hold texts, so their values are quoted before Hydra reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from megarl.base.errors import ConfigError
from megarl.config.keys import key_at
from megarl.config.problems import InvalidConfigError
from megarl.config.verl.adopt import adopt_file
from megarl.config.verl.table import table_of

_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""")
_SWEEP = re.compile(r"(?:choice|shuffle|sort|tag|extend_list)\s*\(")
_CAST = re.compile(r"(?:range|interval|glob|int|float|bool|str|json_str)\s*\(.*\)", re.DOTALL)
_UNIT = r"\\.|\$?\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)"
"""Parts of an unquoted text in which a comma or a bracket does not end it, such as a pattern of file names."""
_ARGUMENT = re.compile(r"\s*[A-Za-z_]\w*=")
_REMEDY = """write it as key=value, and a value with special characters in quotes: 'key="value"'"""


def override_of(key: str, value: Any) -> str:
    """Write an override in Hydra's syntax, with all texts in quotes.

    Args:
        key: full path.
        value: None, a truth value, a number, a text, or a list or mapping of them.
    """
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_written(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    text: str = QuotedString(str(value), Quote.single).with_quotes()
    return text


def parse_overrides(overrides: Sequence[str], schema: type) -> list[Override]:
    """Parse overrides; the values of text keys keep their characters.

    Args:
        overrides: in Hydra's syntax.
        schema: configuration class of the job.

    Raises:
        ConfigError: an override is malformed.
    """
    parsed = []
    for text in overrides:
        try:
            (override,) = _parse(with_quoted_texts(text, schema))
        except HydraException as error:
            reason = str(error).split("\nSee ")[0]
            message = f"The override {text} cannot be read; {_REMEDY}. {reason}"
            raise ConfigError(message, code="config.malformed-override") from error
        if not override.key_or_group:
            message = f"The override {text} names no key; write it as key=value."
            raise ConfigError(message, code="config.override-without-key")
        parsed.append(override)
    return parsed


def _parse(text: str) -> list[Override]:
    parsed: list[Override] = OverridesParser.create().parse_overrides([text])
    return parsed


def with_quoted_texts(override: str, schema: type) -> str:
    """Quote the texts of an override that Hydra cannot read, or would read as numbers or truth values."""
    name, equals, value = override.partition("=")
    if not equals or not value.strip():
        return override
    scanner = _Scanner(value, schema)
    try:
        quoted = scanner.sequence(lambda: scanner.element(name.lstrip("+~"), ","), end="")
    except _MalformedError:
        return override  # Hydra describes the problem
    return f"{name}={quoted}"


def restore_texts(values: DictConfig, overrides: Sequence[str], schema: type) -> None:
    """Put texts into the values of one run of a sweep, whose sweeper writes overrides without their quotes, in place.

    Args:
        values: composed by Hydra.
        overrides: of the run.
        schema: configuration class of the job.
    """
    for override in parse_overrides(overrides, schema):
        value = None if override.is_sweep_override() or override.is_delete() else override.value()
        if isinstance(value, str | list) and is_text(schema, override.key_or_group):
            OmegaConf.update(values, override.key_or_group, _plain(value), force_add=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.text if isinstance(value, QuotedString) else value


def is_text(schema: type, path: str) -> bool:
    """Whether a key, in megarl's or verl's name, holds a text or a list of texts."""
    try:
        return key_at(schema, table_of(schema).current_name(path)).annotation in (str, list[str])
    except KeyError:
        return False


class _MalformedError(Exception):
    """A bracket or a quote has no end."""


class _Scanner:
    """Reads a value from left to right and returns it with quotes; ``at`` is the position."""

    def __init__(self, text: str, schema: type) -> None:
        self.text, self.schema, self.at = text, schema, 0

    def sequence(self, item: Callable[[], str], end: str) -> str:
        """Read items between commas up to the closing bracket, or the end of the text."""
        items: list[str] = []
        while True:
            if not items and end and self._skip_space().startswith(end):
                break
            items.append(item())
            if not self._skip_space().startswith(","):
                break
            self.at += 1
        if not self._rest().startswith(end) or (not end and self._rest()):
            raise _MalformedError
        self.at += len(end)
        return ",".join(items) + end

    def element(self, path: str, stops: str) -> str:
        """Read one value of the key ``path``, which ends before one of ``stops``."""
        rest = self._skip_space()
        if rest.startswith("["):
            self.at += 1
            return "[" + self.sequence(lambda: self.element(path, ",]"), "]")
        if rest.startswith("{"):
            self.at += 1
            return "{" + self.sequence(lambda: self._pair(path), "}")
        if function := _SWEEP.match(rest):
            self.at += function.end()
            arguments = self.sequence(lambda: self._argument(path), ")")
            # as the arguments of a function, texts lose their quotes before Hydra reads them a second time
            is_choice = function[0].startswith("choice") and "'" in arguments
            return arguments[:-1] if is_choice else function[0] + arguments
        if quoted := _QUOTED.match(rest):
            self.at += quoted.end()
            return quoted[0]
        if rest[:1] in ("'", '"'):
            raise _MalformedError
        match = _CAST.match(rest) or re.match(rf"(?:{_UNIT}|[^{re.escape(stops)}])+", rest, re.DOTALL)
        if match is None:
            raise _MalformedError
        self.at += match.end()
        return match[0] if _CAST.match(rest) else self._quoted(match[0].strip(), path)

    def _argument(self, path: str) -> str:
        name = _ARGUMENT.match(self._rest())
        self.at += name.end() if name else 0
        return (name[0] if name else "") + self.element("" if name else path, ",)")

    def _pair(self, path: str) -> str:
        name = re.match(r"\s*([^:,{}\[\]'\"]+?)\s*:", self._rest())
        if name is None:
            raise _MalformedError
        self.at += name.end()
        return f"{name[1]}: " + self.element(f"{path}.{name[1]}", ",}")

    def _quoted(self, text: str, path: str) -> str:
        try:
            (override,) = _parse(f"key={text}")
            readable = not is_text(self.schema, path) or override.value() is None or isinstance(override.value(), str)
        except HydraException:
            readable = False
        return text if readable else QuotedString(text, Quote.single).with_quotes()

    def _skip_space(self) -> str:
        self.at += len(self._rest()) - len(self._rest().lstrip(" \t"))
        return self._rest()

    def _rest(self) -> str:
        return self.text[self.at :]


class TextConfigSource(FileConfigSource):
    """Hydra's reader of YAML files, with texts as they are written: ``experiment_name: 2026_11_27`` is no number.

    Attributes:
        schema: configuration class of the job.
        notes: one line for each name in the last configuration's files that is not megarl's.
    """

    schema: ClassVar[type]
    notes: ClassVar[list[str]] = []

    @classmethod
    def register(cls, schema: type) -> None:
        """Make this the reader of all YAML files.

        Args:
            schema: configuration class of the job.
        """
        TextConfigSource.notes = []
        Plugins.instance()  # registers Hydra's own reader, which is replaced
        # A class of its own and of that name: launchers of sweeps pickle it by value, and Hydra compares names there.
        SourcesRegistry.instance().types[cls.scheme()] = type(FileConfigSource.__name__, (cls,), {"schema": schema})

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file as Hydra does."""
        result: ConfigResult = super().load_config(config_path)
        file = Path(self.path, self._normalize_file_name(config_path))
        package = result.header.get("package") or ".".join(Path(config_path).parts[:-1])
        node = yaml.compose(StringIO(file.read_text(encoding="utf-8")), get_yaml_loader())
        if isinstance(result.config, DictConfig) and isinstance(node, yaml.MappingNode):
            _restore(result.config, node, self.schema, ["", "" if package == "_global_" else f"{package}."])
            if package in ("", "_global_"):
                self._rename(result.config)
        return result

    def _rename(self, config: DictConfig) -> None:
        """Replace verl's and earlier names by megarl's, in place."""
        before = cast(dict[str, Any], OmegaConf.to_container(config))
        adoption = adopt_file(self.schema, before)
        if adoption.problems:
            raise InvalidConfigError(adoption.problems)
        if adoption.values != before:
            for name in list(config):
                del config[name]
            config.merge_with(adoption.values)
            TextConfigSource.notes += adoption.notes


def _restore(config: Any, node: yaml.Node, schema: type, prefixes: Sequence[str]) -> None:
    """Replace numbers and truth values of text keys by their characters, in place.

    Args:
        config: what OmegaConf made from ``node``, a mapping or a list.
        node: of the YAML file.
        schema: configuration class of the job.
        prefixes: possible paths of ``config``, each with a dot at its end.
    """
    is_mapping = isinstance(node, yaml.MappingNode)
    for position, entry in enumerate(node.value):
        name, value = (entry[0].value, entry[1]) if is_mapping else (position, entry)
        paths = [f"{prefix}{name}." for prefix in prefixes] if is_mapping else list(prefixes)
        if isinstance(value, yaml.ScalarNode):
            is_number = value.tag.rpartition(":")[2] in ("int", "float", "bool")
            if is_number and any(is_text(schema, path[:-1]) for path in paths):
                config[name] = value.value
        elif name in config or not is_mapping:
            _restore(OmegaConf.select(config, str(name)) if is_mapping else config[name], value, schema, paths)
