"""Overrides of the command line, and texts of YAML files: a text stays as the user wrote it.

Hydra and YAML read ``2026_11_27`` as a number whatever its key is, and Hydra's syntax has no ``~``, ``#``, ``=`` or
letters beyond ASCII. The schema says which keys hold texts, so their values are quoted before Hydra reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
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
    """Write an override of plain values in Hydra's syntax, with all texts in quotes."""
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
            return function[0] + self.sequence(lambda: self._argument(path), ")")
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


class _Reading(NamedTuple):
    schema: type  # configuration class of the job
    notes: list[str]  # one line for each name in the files that is not megarl's


_READING: ContextVar[_Reading] = ContextVar("reading")


@contextmanager
def reading_files(schema: type) -> Iterator[list[str]]:
    """Let Hydra read the YAML files of a job; yields a line for each foreign name in them."""
    Plugins.instance().register(TextConfigSource)
    reading = _Reading(schema, [])
    token = _READING.set(reading)
    try:
        yield reading.notes
    finally:
        _READING.reset(token)


class TextConfigSource(ConfigSource):
    """Folder of YAML files for Hydra, with texts as they are written: ``experiment_name: 2026_11_27`` is no number."""

    @staticmethod
    def scheme() -> str:
        """Name of this kind of folder in Hydra's search path."""
        return "megarl"

    def available(self) -> bool:
        """Whether the folder exists."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Whether the path is a folder."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether the path is a file."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the files and folders in a folder."""
        names: list[str] = []
        for file in sorted(Path(self.path, config_path).iterdir()):
            self._list_add_result(names, str(Path(config_path, file.name)), file.name, results_filter)
        return names

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file."""
        text = self._file(config_path).read_text(encoding="utf-8")
        header, config = self._get_header_dict(text), OmegaConf.load(StringIO(text))
        package = header.get("package") or ".".join(Path(config_path).parts[:-1])
        node = yaml.compose(StringIO(text), get_yaml_loader())
        if isinstance(config, DictConfig) and isinstance(node, yaml.MappingNode):
            schema = _READING.get().schema
            _restore(config, node, schema, ["", "" if package == "_global_" else f"{package}."])
            if package in ("", "_global_"):
                self._rename(config)
        return ConfigResult(self.provider, self.full_path(), config, header)

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    def _rename(self, config: DictConfig) -> None:
        """Replace verl's and earlier names by megarl's, in place."""
        schema, notes = _READING.get()
        before = cast(dict[str, Any], OmegaConf.to_container(config))
        adoption = adopt_file(schema, before)
        if adoption.problems:
            raise InvalidConfigError(adoption.problems)
        if adoption.values != before:
            for name in tuple(config):
                del config[name]
            config.merge_with(adoption.values)
            notes += adoption.notes


def _restore(config: Any, node: yaml.Node, schema: type, prefixes: Sequence[str]) -> None:
    """Replace numbers and truth values of text keys by their characters, in place.

    ``config`` is what OmegaConf made from ``node``; ``prefixes`` are its possible paths, with a dot at their end.
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
