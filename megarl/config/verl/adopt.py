"""Adopt verl's keys among the values of a configuration: check, translate and remove them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from megarl.base.redaction import redact
from megarl.config.keys import Key, lookup, parents, walk
from megarl.config.problems import Problem, format_value, nearest_keys
from megarl.config.verl.rules import Feature, NoEffect, Only, OtherBackend, PoolSwitch, Refused, Renamed
from megarl.config.verl.table import VerlTable, table_of

_DYNAMIC = (
    ("actor_rollout_ref.actor", "use_dynamic_bsz", "micro_batch_size_per_gpu"),
    ("critic", "use_dynamic_bsz", "micro_batch_size_per_gpu"),
    ("actor_rollout_ref.rollout", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.ref", "use_dynamic_bsz", "micro_batch_size_per_gpu"),
    ("data", "use_dynamic_bsz", "micro_batch_size_per_gpu"),
)
"""Sections, with the key for micro-batches by tokens and the key for micro-batches by samples."""


class Adoption(NamedTuple):
    """Result of adopting verl's keys."""

    values: dict[str, Any]  # of the schema's keys, and of keys that neither project has
    problems: list[Problem]  # keys that megarl refuses
    notes: list[str]  # one line for each key that is translated or has no effect


def is_verl_key(schema: type, path: str) -> bool:
    """Return whether a key outside megarl's schema is a key or section of verl."""
    return table_of(schema).rule_for(path) is not None


def adopt(schema: type, values: Mapping[str, Any], overridden: Collection[str] = ()) -> Adoption:
    """Translate verl's keys among nested plain values, which include all defaults, to those of megarl's schema.

    Args:
        overridden: keys of the command line; of two names for one setting they take precedence over files.
    """
    return _Adopter(schema, values, overridden).adopt() if table_of(schema).rules else Adoption(dict(values), [], [])


def adopt_file(schema: type, values: Mapping[str, Any]) -> Adoption:
    """Translate only the names in one file, so that later files and the command line override either name.

    Interpolations stay as they are.
    """
    adopter = _Adopter(schema, values, ())
    adopter.rename_all()
    return Adoption(adopter.tree, adopter.problems, adopter.notes)


class _Adopter:
    def __init__(self, schema: type, values: Mapping[str, Any], overridden: Collection[str]) -> None:
        self.table: VerlTable = table_of(schema)
        self.keys = _schema_keys(schema)
        self.tree: dict[str, Any] = copy.deepcopy(dict(values))
        self.overridden = frozenset(overridden)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.switches: dict[str, Any] = {}

    def adopt(self) -> Adoption:
        foreign = dict(self._foreign(self.tree))
        for path in foreign:
            _remove(self.tree, path, self.keys)
        # Rules name switches in verl's words, or in megarl's for a section that moved as a whole.
        moved = {path: rule.to for path in foreign if isinstance(rule := self.table.rule_for(path), Renamed)}
        self.switches = {**{to: foreign[path] for path, to in moved.items()}, **foreign}
        for path, value in foreign.items():
            to = self._target(path)  # null is a value of a renamed key; other keys of verl it does not set
            turns_off = value is None and to is not None and to.optional and to.default is not None
            if value not in (None, {}) or turns_off:
                self._apply(path, value, path)
        for path, value in foreign.items():
            if isinstance(rule := self.table.rule_for(path), PoolSwitch) and value is not None:
                self._switch_pool(rule.section, bool(value), path)
        for path in self.table.values:
            self._reword(path)
        self._drop_unread_sizes()
        self._drop_reference_layout()
        return Adoption(self.tree, self.problems, self.notes)

    def rename_all(self) -> None:
        """Translate the keys that only have another name in megarl.

        An interpolation stays, to be resolved first, if it is relative or megarl's name is in the file too.
        """
        for path, value in list(self._foreign(self.tree)):
            name = self.table.current_name(path)
            to, current = self.keys.get(name), lookup(self.tree, name)
            if "${." in str(value) or (current is not None and "${" in f"{value}{current}"):
                continue
            if self._is_plain_name(path) and value != {} and (value is not None or (to is not None and to.optional)):
                _remove(self.tree, path, self.keys)
                self._apply(path, value, path)

    def _is_plain_name(self, path: str) -> bool:
        """Whether a key of verl becomes a key of megarl with the same values in every case."""
        while isinstance(rule := self.table.rule_for(path), Renamed):
            if rule.values or rule.left_out or rule.switch:
                return False
            path = rule.to
        is_entry = any(above in self.keys and self.keys[above].is_mapping for above in parents(path))
        return path in self.keys or (is_entry and rule is None)

    def _foreign(self, node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """verl's keys with their values; inside a free mapping of megarl, only keys with a rule."""
        for name, value in node.items():
            path = f"{prefix}{name}"
            to = self._target(path)
            moves = to is not None and to.is_mapping  # a free mapping of megarl, whose names may have dots
            if isinstance(value, Mapping) and value and not moves:
                yield from self._foreign(value, f"{path}.")
            elif path not in self.keys and self.table.rule_for(path) is not None:
                yield path, value

    def _target(self, path: str) -> Key | None:
        """Return megarl's key for a key of verl; None without one, or with rules of verl below it."""
        rule = None if path in self.keys else self.table.rule_for(path)
        if not isinstance(rule, Renamed) or any(other.startswith(f"{rule.to}.") for other in self.table.rules):
            return None
        return self.keys.get(rule.to)

    def _apply(self, path: str, value: Any, source: str) -> None:
        """Apply the rule for ``path``; ``source`` is the key as the user wrote it."""
        rule = self.table.rule_for(path)
        if isinstance(rule, Only) and value not in rule.values:
            accepted = " or ".join(map(format_value, rule.values))
            text = f"is accepted as {accepted} only: {rule.why}" if accepted else rule.why
            self._refuse(source, value, text, code="config.verl-value")
        elif isinstance(rule, NoEffect) and lookup(self.tree, f"{path.rpartition('.')[0]}.{rule.unless}") is not None:
            _set(self.tree, path, value)
        elif isinstance(rule, NoEffect):
            self.notes.append(f"{source}={_shown(value, source)} has no effect: {rule.why}")
        elif isinstance(rule, Renamed):
            self._rename(rule, value, source)
        elif isinstance(rule, Feature):
            self._switch(rule, path, value, source)
        elif isinstance(rule, Refused | OtherBackend):
            self._refuse(source, value, rule.why, code="config.verl-key")
        elif rule is None and path != source:
            nearest = " or ".join(nearest_keys(path, self.keys))
            text = "unknown key" + (f"; did you mean {nearest}?" if nearest else "")
            self._refuse(source, value, text, code="config.unknown-key")

    def _switch(self, rule: Feature, path: str, value: Any, source: str) -> None:
        state = self.switches.get(rule.switch)
        if state is None or state in rule.off:
            return
        cause = "" if path == rule.switch else f" ({rule.switch}={format_value(state)})"
        self._refuse(source, value, f"is not supported{cause}: {rule.why}", code="config.verl-feature")

    def _rename(self, rule: Renamed, value: Any, source: str) -> None:
        if value in rule.left_out or (rule.switch in self.switches and self.switches[rule.switch] in rule.off):
            return
        schema = self.keys
        free = next((p for p in parents(rule.to) if p in schema and schema[p].is_mapping), None)
        if rule.to not in schema and (free is None or rule.to in self.table.rules):
            self._apply(rule.to, value, source)
            return
        value = rule.values.get(value, value) if not isinstance(value, list | dict) else value
        item = schema.get(rule.to)
        defaults = (item.default, item.shown_default) if item else ()
        current, is_override = lookup(self.tree, rule.to), self._is_overridden(rule.to)
        if is_override and not self._is_overridden(source):
            self.notes.append(f"{source}={_shown(value, source)} has no effect: the command line sets {rule.to}")
            return
        is_set = is_override or (current not in (None, *defaults) and not self._is_overridden(source))
        if is_set and current != value:
            text = f"is {rule.to} in megarl, which is {_shown(current, rule.to)} already; set {rule.to} only"
            self._refuse(source, value, text, code="config.verl-two-names")
            return
        _set(self.tree, rule.to, value)
        if rule.to not in schema or value not in defaults:  # complete configurations of earlier runs name every key
            why = f": {rule.why}" if rule.why else ""
            self.notes.append(f"{source} is {rule.to}={_shown(value, rule.to)} in megarl{why}")

    def _is_overridden(self, path: str) -> bool:
        return path in self.overridden or any(above in self.overridden for above in parents(path))

    def _switch_pool(self, section: str, is_on: bool, source: str) -> None:
        """Clear the nodes of a role without a pool in verl; verl's scripts set both."""
        keys = lookup(self.tree, section)
        nodes = keys.get("nnodes") if isinstance(keys, dict) else None
        if is_on and not nodes:
            text = f"needs devices: set {section}.nnodes and {section}.n_gpus_per_node"
            self._refuse(source, is_on, text, code="config.verl-pool-devices")
        elif not is_on and nodes:
            keys["nnodes"] = 0
            self.notes.append(f"{section}.nnodes={format_value(nodes)} has no effect: {source}=false")

    def _reword(self, path: str) -> None:
        """Translate the value of a key that both projects have."""
        section, _, name = path.rpartition(".")
        holder, words = lookup(self.tree, section), self.table.values[path]
        if not isinstance(holder, dict) or name not in holder or isinstance(holder[name], dict):
            return
        value = holder[name]
        if isinstance(value, list):
            holder[name] = [words.meanings.get(item, item) if isinstance(item, str) else item for item in value]
            return
        if value in words.refused:
            self._refuse(path, value, f"is {words.refused[value]}", code="config.verl-value")
            holder[name] = self.keys[path].default
        elif value in words.meanings:
            holder[name] = words.meanings[value]

    def _drop_unread_sizes(self) -> None:
        """Drop micro-batch sizes in samples while tokens count; verl's scripts set both."""
        actor_by_tokens = lookup(self.tree, "actor_rollout_ref.actor.use_dynamic_bsz")
        for section, by_tokens, samples in _DYNAMIC:
            state = lookup(self.tree, f"{section}.{by_tokens}")
            if (actor_by_tokens if state is None else state) is True and lookup(self.tree, f"{section}.{samples}"):
                lookup(self.tree, section)[samples] = None
                self.notes.append(f"{section}.{samples} has no effect: micro-batches are cut by tokens ({by_tokens})")

    def _drop_reference_layout(self) -> None:
        """Drop a separate reference layout without keys, or with adapters."""
        layout = lookup(self.tree, "actor_rollout_ref.ref.megatron")
        with_adapters = bool(lookup(self.tree, "actor_rollout_ref.model.lora_rank"))
        if not isinstance(layout, dict) or (layout and not with_adapters):
            return
        if layout:
            self.notes.append(
                "actor_rollout_ref.ref.megatron has no effect: with adapters the reference is the actor's model"
            )
        self.tree["actor_rollout_ref"]["ref"]["megatron"] = None

    def _refuse(self, path: str, value: Any, text: str, *, code: str) -> None:
        self.problems.append(Problem(path, value, text, code=code))


@cache
def _schema_keys(schema: type) -> dict[str, Key]:
    return dict(walk(schema))


def _shown(value: Any, path: str) -> str:
    return format_value(redact(value, path.rpartition(".")[2]))


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def _remove(tree: dict[str, Any], path: str, keys: Mapping[str, Key]) -> None:
    """Remove a key, and sections outside megarl's schema that become empty."""
    *parents, last = path.split(".")
    section = lookup(tree, ".".join(parents)) if parents else tree
    del section[last]
    above = ".".join(parents)
    if above and not section and above not in keys:
        _remove(tree, above, keys)
