"""Keys, commands and flags that the pages name: they exist."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache

import pytest
import yaml
from support.doc_pages import ROOT, blocks, pages, shell_blocks

from megarl.cli import COMMANDS, JOBS, main
from megarl.config.keys import leaves, walk
from megarl.config.verl.rules import Refused
from megarl.config.verl.table import table_of
from tests.docs.test_docs_paths import expanded

SCHEMAS = tuple({job.schema for job in JOBS.values()})
OTHERS = ("torch.", "megatron.core", "hydra.", "model.layers.", "reward_model.ground_truth")
"""Beginnings of names that are no keys: modules, Hydra's own keys, weights, and a column of the data."""
MAIN_GENERATION = {"data.path", "data.batch_size", "data.n_samples", "rollout.prompt_length", "rollout.response_length"}
"""Keys of verl's `main_generation`, next to those of `megarl generate`."""
VERL_SECTIONS = ("", "actor_rollout_ref.model.")
"""Sections that pages leave out before a name of verl."""
FILES = re.compile(r"\.(py|md|jsonl?|yaml|html|bin|npz|parquet|safetensors|sh|log|txt|gz|svg|distcp)$")
GENERATED = ("errors.md", "verl_keys.md")
SUBCOMMANDS = {("doctor", "logprobs"), ("doctor", "--accept")} | {
    ("convert", name) for name in ("megatron-to-hf", "megatron-to-peft", "hf-to-megatron", "inspect", "verify")
}
"""Commands with a parser of their own for some first words."""
_SPAN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"^[+~]{0,2}((?:[a-z_]+|<role>)(?:\.(?:[A-Za-z0-9_*]+|<\w+>|\{[\w,]+\}))+)(?=$|=)")
_WORD = re.compile(r"(?:^|[\s\"'`(\[{,])[+~]{0,2}([a-z_]+(?:\.\w+)+)(?==)", re.M)
_STRING = re.compile(r"[\"']([a-z_]+(?:\.\w+)+)[\"']")


@cache
def known_keys():
    """Paths of all keys and sections, and paths of mappings with free keys, as parts; ``*`` is a free name."""
    paths: set[str] = set()
    free: set[str] = set()
    for schema in SCHEMAS:
        for path, key in walk(schema):
            paths.add(path)
            if key.entry is not None:
                paths.update(f"{path}.*.{name}" for name, _ in walk(key.entry))
                paths.add(f"{path}.*")
            elif isinstance(key.default, dict) or "dict" in str(key.annotation):
                free.add(path)
    return [path.split(".") for path in paths], [path.split(".") for path in free]


def matches(path, name):
    """Whether a path ends in the parts of a name."""
    pairs = zip(path[-len(name) :], name, strict=False)
    return len(path) >= len(name) and all("*" in (a, b) or b.startswith("<") or a == b for a, b in pairs)


def is_key(name):
    """Whether a name is a key of a job or of verl, or the end of one."""
    parts = name.split(".")
    paths, free = known_keys()
    if any(matches(path, parts) for path in paths):
        return True
    if any(matches(path, parts[:end]) for end in range(1, len(parts)) for path in free):
        return True
    rules = (table_of(schema).rule_for(f"{section}{name}") for schema in SCHEMAS for section in VERL_SECTIONS)
    return any(rule is not None and not isinstance(rule, Refused) for rule in rules)


def in_spans(text):
    """Keys in code spans: dotted names that begin with a section."""
    sections = {part for path in known_keys()[0] for part in path[:-1]} | {"<role>"}
    for span in _SPAN.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        for word in span.split():
            found = _DOTTED.match(word)
            if found and found[1].partition(".")[0] in sections:
                yield from (name for name in expanded(found[1]) if not is_other(name))


def in_block(block):
    """Keys in a code block: overrides, quoted keys of Python, and YAML below a top section."""
    tops = {path[0] for path in known_keys()[0]}
    if block.language == "yaml":
        values = yaml.safe_load(block.code)
        names = [name for name, _ in leaves(values)] if isinstance(values, dict) else []
    else:
        names = (_STRING if block.language == "python" else _WORD).findall(block.code)
    yield from (name for name in names if name.partition(".")[0] in tops and not is_other(name))


def is_other(name):
    """Whether a dotted name is a file, a module, an error code, or a key of another program."""
    return name.startswith(OTHERS) or bool(FILES.search(name)) or name in (codes() | MAIN_GENERATION)


@cache
def codes():
    """Error codes, some of which look like keys."""
    listed = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^\| `(.+?)` \|", listed, re.M))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_keys_exist(page):
    if page.name in GENERATED or page.name == "CHANGELOG.md":
        return
    found = [*in_spans(page.read_text(encoding="utf-8"))]
    found += [name for block in blocks(page) if block.language != "diff" for name in in_block(block)]
    assert sorted({name for name in found if not is_key(name)}) == []


def test_wrong_keys_are_found():
    assert is_key("actor_rollout_ref.rollout.n") and is_key("rollout.n") and not is_key("rollout.samples")
    assert is_key("distillation.teacher_models.math.key") and not is_key("distillation.teacher_models.math.keys")
    assert is_key("server_args.anything") and is_key("<role>.megatron.param_offload")
    assert list(in_spans("`data.{a,b}=1` `data.py` `torch.nn` word `trainer.x`")) == ["data.a", "data.b", "trainer.x"]


def commands():
    """Block and words of each ``megarl`` command in the pages' shell blocks."""
    for block in shell_blocks():
        for line in block.code.replace("\\\n", " ").splitlines():
            for command in re.split(r"[;|&]{1,2}", re.sub(r"(^|\s)#.*", "", line)):
                words = command.split()
                if "megarl" in words and words[0] != "sed":
                    own = words[words.index("megarl") + 1 :]
                    yield block.name, own[: own.index("--")] if "--" in own else own


@cache
def flags_of(words):
    """Flags in the help of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", output.getvalue()))


def test_commands_and_flags_exist():
    wrong = []
    for name, words in commands():
        command = words[0] if words else "--help"
        if command not in (*JOBS, *COMMANDS):
            wrong += [f"{name}: megarl {command}"] * (command not in ("--help", "--version"))
            continue
        kind = [word for word in words[1:2] if (command, word) in SUBCOMMANDS]
        job = [(word,) for word in words if command == "launch" and word in JOBS]
        known = frozenset.union(*map(flags_of, [(command,), (command, *kind), *job]))
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-zA-Z]", word)}
        wrong += [f"{name}: megarl {command} {flag}" for flag in sorted(given - known - {"--help", "-h"})]
    assert wrong == []
