"""``layout=auto``: the smallest layout that fits, and the cheapest settings with it, with reasons.

Each role gets the smallest product of tensor, pipeline and context parallel sizes with which the job fits the devices.
Of equal products tensor parallelism, which stays in a node, comes first, then pipeline stages. Experts are spread over
the devices of a node, over more nodes only if that is not enough. Offloading, recomputation, token budgets and the
engine's size are those with the lowest cost of a step (:mod:`megarl.ops.plan.step_costs`). Values set by hand stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.base.checkpoint_files import POINTER
from megarl.base.errors import ConfigError, MegarlError
from megarl.base.formatting import GIB, table_lines
from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.keys import leaves, value_at
from megarl.config.problems import format_value
from megarl.config.schema.jobs import ACTOR, CRITIC, REWARD_MODEL, ROLLOUT
from megarl.models import ModelConfig
from megarl.ops.plan.estimate import Estimate, Shortfall, changed, estimate, lacking, overrides_of, usable_bytes
from megarl.ops.plan.flops import lengths_of
from megarl.ops.plan.hardware import Hardware, hardware_for
from megarl.ops.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.ops.plan.layouts import (
    CP,
    EP,
    PP,
    STAGES,
    TP,
    devices_of,
    initial_changes,
    layouts,
    least_bytes,
    longest_sequence,
)
from megarl.trainer.jobs.hub_files import with_hub_configs
from megarl.workers.settings import check_role

Config = TrainConfig | SupervisedConfig
Changes = Mapping[str, Any]

_CHEAPEST = "lowest cost of those that fit"
RECOMPUTE = "recompute_granularity"
_SIZES = (TP, PP, CP, EP, "expert_tensor_parallel_size", "data_parallel_size", *STAGES)
_DERIVED = ("replicas", "log_prob_max_token_len_per_gpu")  # keys that follow the sizes unless they are set by hand
_OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("grad", "optimizer"), ("grad", "optimizer", "param"))
"""States that leave the devices between phases, from the fastest choice to the smallest."""
_RECOMPUTATIONS = (None, "selective", "full")
_BUDGETS, _TARGET = (8192, 16384, 32768, 65536), 16384
"""Token budgets to compare, besides the longest sequence; the one with which engines and offloading are compared."""
_BUDGET_MULTIPLE = 64
_RESERVE = 0.05  # share of the memory that settings leave free if they can: the plan's activations are an estimate
_SLOTS = (1, 4, 16, 64, 128, 256)  # concurrent sequences of an embedded engine, which reserves memory for each


class ChosenKey(NamedTuple):
    """A chosen value and its reason."""

    key: str
    value: Any
    reason: str


class AutomaticLayout(NamedTuple):
    """The chosen values of a configuration."""

    keys: tuple[ChosenKey, ...]  # values with their reasons
    plan: Estimate | None  # memory and cost with these values; None on a CPU, where no memory is planned

    @property
    def changes(self) -> dict[str, Any]:
        """The chosen values by key."""
        return {chosen.key: chosen.value for chosen in self.keys}


class NothingFitsError(ConfigError):
    """No layout fits the devices."""


class _Settings(NamedTuple):
    """Everything besides the parallel sizes."""

    engine: Changes
    offload: tuple[str, ...]
    recompute: str | None
    budget: int


class _Attempt(NamedTuple):
    """Sizes that do not fit with any settings, and the missing memory with the smallest ones."""

    label: str
    shortfalls: tuple[Shortfall, ...]

    @property
    def missing(self) -> float:
        return self.shortfalls[0].missing


def is_layout_key(key: str) -> bool:
    """Whether a key is one that :func:`choose_layout` chooses, or that follows from its choice."""
    section, _, name = key.rpartition(".")
    of_engine = section == ROLLOUT and name in (TP, "max_num_seqs", *_DERIVED)
    of_role = section.endswith("megatron") and (name in (*_SIZES, RECOMPUTE) or name.endswith("_offload"))
    return of_engine or of_role or name.endswith("max_token_len_per_gpu")


def choose_layout(config: Config, fixed: Collection[str], hardware: Hardware) -> AutomaticLayout:
    """Choose the layout of a job. The same input gives the same layout.

    Args:
        config: complete, as ``build_draft`` returns it: its layouts and batches may not divide.
        fixed: keys whose values stay.

    Raises:
        NothingFitsError: names the smallest excess of memory.
        ConfigError, ModelError: no layout is valid; the error is that of the configuration.
    """
    choice = _Choice(config, frozenset(fixed), hardware)
    if hardware.device == "cpu":
        budgets = choice.budgets(max(_TARGET, choice.shortest_budget({})))
        keys = [ChosenKey(k, n, "the longest sequence") for k, n in budgets.items() if value_at(config, k) < n]
        return AutomaticLayout(tuple(keys), None)
    choice.start()
    sizes = choice.smallest_sizes()
    return choice.with_reasons(sizes, choice.cheapest_settings(sizes))


def fits(config: Config, fixed: Collection[str], hardware: Hardware) -> bool:
    """Whether some layout of a job fits; arguments as for :func:`choose_layout`."""
    try:
        choice = _Choice(config, frozenset(fixed), hardware)
        choice.start()
        choice.smallest_sizes()
    except MegarlError:
        return False
    return True


class _Choice:
    """The choice for one job: candidates of each role, and the reasons for which smaller ones were rejected."""

    def __init__(self, config: Config, fixed: frozenset[str], hardware: Hardware) -> None:
        self.config, self.fixed, self.hardware = config, fixed, hardware
        names = {*_SIZES, *_DERIVED}
        paths = sorted(path for path in fixed if path.rpartition(".")[2] in names)
        self._fixed_sizes = {path: value_at(config, path) for path in paths}
        rows = config.sequences_per_row if isinstance(config, SupervisedConfig) else 1
        self._longest = longest_sequence(config) * rows
        self.roles: list[PlannedRole] = []
        self.candidates: dict[str, list[Changes]] = {}
        self.engines: list[Changes] = []
        self.rejected: dict[str, _Attempt] = {}
        self._reserve = 0.0

    def start(self) -> None:
        """List the candidates, from a layout that is valid for all roles."""
        budgets = self.budgets(max(_TARGET, self.shortest_budget({})))
        initial = initial_changes(self.config, self.hardware, budgets)
        job = planned_job(changed(self.config, initial), device=self.hardware.device)
        self.roles = list(job.roles)
        self.candidates = {role.name: self._layouts_of(role) for role in job.roles}
        self.engines = list(self._engines(job))

    def _job(self, changes: Changes) -> PlannedJob:
        return planned_job(changed(self.config, {**changes, **self._fixed_sizes}), device=self.hardware.device)

    def _layouts_of(self, role: PlannedRole) -> list[Changes]:
        """List the valid sizes of a role in the order of preference."""
        devices, per_node = devices_of(self.config, role)
        paths = {key: f"{role.path}.{key}" for key in _SIZES}
        fixed = {key: self._fixed_sizes[path] for key, path in paths.items() if path in self._fixed_sizes}
        spread = min(per_node, role.model.experts.count) if role.model.experts else 1
        ranked: dict[tuple[int, ...], Changes] = {}
        for changes in layouts(role, devices, per_node, self._longest, fixed):
            sizes = {path.rpartition(".")[2]: value for path, value in changes.items()}
            experts, replica = sizes.get(EP, 1), sizes[TP] * sizes[PP] * sizes[CP]
            nodes = max(1, experts // per_node)
            megatron = replace(role.megatron, **{"data_parallel_size": devices // replica, **sizes})
            if not _is_valid(role.model, megatron, role.path):
                continue
            if EP not in fixed and experts < min(spread, devices // sizes[PP]):
                continue  # a node's devices hold fewer experts each at the same cost
            ranked[replica * nodes, nodes, -sizes[TP], -sizes[PP], experts] = changes
        return [ranked[rank] for rank in sorted(ranked)]

    def _engines(self, job: PlannedJob) -> Iterator[Changes]:
        """Yield the sizes of the rollout engine, from the smallest memory per device to the largest."""
        rollout = job.rollout
        if rollout is None or rollout.is_external:
            yield {}
            return
        slots, size = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.{TP}"
        if rollout.config.name == "embedded":
            most = rollout.config.max_num_seqs
            values = sorted({*(n for n in _SLOTS if n < most), most})
            yield from [{}] if slots in self.fixed else [{slots: value} for value in values]
            return
        pool, per_node = len(job.pool_of(ROLLOUT).numbers), job.engine_devices_per_node
        sizes = [tp for tp in range(1, pool + 1) if pool % tp == 0 and (tp % per_node == 0 or per_node % tp == 0)]
        sized = {tp: MegatronConfig(tensor_model_parallel_size=tp, data_parallel_size=1) for tp in reversed(sizes)}
        valid = [{size: tp} for tp, layout in sized.items() if _is_valid(rollout.model, layout, ROLLOUT)]
        yield from (valid if size not in self._fixed_sizes else []) or [{}]

    def shortest_budget(self, sizes: Changes) -> int:
        """Return the smallest token budget: the longest sequence over the context-parallel ranks of every role."""
        ranks = min([sizes.get(f"{role.path}.{CP}", 1) for role in self.roles], default=1)
        return -(-self._longest // ranks // _BUDGET_MULTIPLE) * _BUDGET_MULTIPLE

    def budgets(self, tokens: int) -> dict[str, int]:
        """Return the keys of the token budgets that are read, with one value."""
        sections = ["data"]
        if isinstance(self.config, TrainConfig):
            used = {ACTOR: True, CRITIC: self.config.uses_critic, REWARD_MODEL: self.config.reward.model.enable}
            sections = [section for section, is_used in used.items() if is_used]
        keys = {f"{name}.max_token_len_per_gpu": f"{name}.micro_batch_size_per_gpu" for name in sections}
        return {
            key: tokens
            for key, samples in keys.items()
            if key not in self.fixed and value_at(self.config, samples) is None
        }

    def _changes(self, sizes: Changes, settings: _Settings) -> dict[str, Any]:
        """Return all chosen values, without those set by hand."""
        result = {**sizes, **settings.engine, **self.budgets(settings.budget)}
        for role in self.roles:
            if role.trains:
                result[f"{role.path}.{RECOMPUTE}"] = settings.recompute
            states = ("grad", "optimizer", "param") if role.trains else ("param",)
            alone = devices_of(self.config, role)[0] != self.config.trainer.num_devices
            for state in states:
                result[f"{role.path}.{state}_offload"] = state in settings.offload and not (state == "param" and alone)
        return {key: value for key, value in result.items() if key not in self.fixed}

    def _shortfalls(self, changes: Changes) -> list[Shortfall]:
        """Return what a job lacks with these values; raises if they are invalid."""
        job = self._job(changes)
        hardware = replace(self.hardware, memory_gib=(1 - self._reserve) * self.hardware.memory_gib)
        usable = usable_bytes(job, hardware)
        for role in job.roles:
            if role.trains and (least := least_bytes(job, role)) > usable:  # much faster than a plan
                update = next(planned.phase for planned in role.passes if planned.updates)
                text = f"{update} needs at least {least / GIB:.1f} GiB of a device's {usable / GIB:.1f} usable"
                return [Shortfall(update, least, usable, (), text)]
        return lacking(job, hardware)

    def smallest_sizes(self) -> Changes:
        """Return the first sizes of all roles with which some settings fit.

        The roles that compute in the phase that lacks most, else the actor, get their next candidates, until nothing is
        missing. An invalid combination blames the role whose section the error names, or the first.
        """
        at = dict.fromkeys(self.candidates, 0)
        closest: _Attempt | None = None
        invalid: MegarlError | None = None
        while all(at[name] < len(candidates) for name, candidates in self.candidates.items()):
            sizes = {key: value for name in at for key, value in self.candidates[name][at[name]].items()}
            try:
                short = self._lacking(sizes)
            except MegarlError as error:
                invalid = invalid or error
                named = [role.name for role in self.roles if role.path in str(error) or role.section in str(error)]
                at[(named or [self.roles[0].name])[0]] += 1
                continue
            if not short:
                return sizes
            computing = [role for role in self.roles if role.pass_of(short[0].phase) is not None]
            for role in computing or self.roles[:1]:
                name, attempt = role.name, _Attempt(_label(sizes, role.path), short)
                self.rejected[name] = min(attempt, self.rejected.get(name, attempt), key=attrgetter("missing"))
                closest = min(attempt, closest or attempt, key=attrgetter("missing"))
                at[name] += 1
        if closest is None:
            self._job(self.budgets(max(_TARGET, self.shortest_budget({}))))  # raises what is wrong with values by hand
            raise invalid or ConfigError("layout=auto: no layout divides these devices", code="layout.no-sizes")
        raise self._nothing_fits(closest)

    def _lacking(self, sizes: Changes) -> tuple[Shortfall, ...]:
        """Return what is missing with the settings that take the least memory; empty if some settings fit."""
        budget = self.shortest_budget(sizes)
        smallest = _Settings(self.engines[0], _OFFLOADS[-1], _RECOMPUTATIONS[-1], budget)
        short = self._shortfalls(self._changes(sizes, smallest))
        if {shortfall.phase for shortfall in short} == {"host"}:
            for offload in _OFFLOADS[:-1]:
                if not self._shortfalls(self._changes(sizes, smallest._replace(offload=offload))):
                    return ()
        return tuple(sorted(short, key=lambda shortfall: -shortfall.missing))

    def cheapest_settings(self, sizes: Changes) -> _Settings:
        """Return the settings with the lowest cost of a step: engine and offloading first, then the token budget."""
        shortest = self.shortest_budget(sizes)
        budgets = sorted({shortest, *(tokens for tokens in _BUDGETS if tokens > shortest)}, reverse=True)
        for self._reserve, budget in product((_RESERVE, 0.0), budgets):
            if budget > max(shortest, _TARGET):
                continue
            options = product(self.engines, _OFFLOADS)
            best = _cheapest(self._cost(sizes, engine, offload, budget) for engine, offload in options)
            if best is not None:
                break
        else:
            raise AssertionError("smallest_sizes found settings that fit")
        cheapest = _cheapest(self._cost(sizes, best.engine, best.offload, budget) for budget in budgets)
        self._reserve = 0.0
        assert cheapest is not None, "best has one of these budgets"
        return cheapest

    def _cost(
        self, sizes: Changes, engine: Changes, offload: tuple[str, ...], budget: int
    ) -> tuple[float, _Settings] | None:
        """Return the cost of a step with the least recomputation that fits; None if nothing fits."""
        for recompute in _RECOMPUTATIONS:
            settings = _Settings(engine, offload, recompute, budget)
            changes = self._changes(sizes, settings)
            try:
                if not self._shortfalls(changes):
                    return self._plan(changes).step.total, settings
            except MegarlError:
                continue
        return None

    def _plan(self, changes: Changes) -> Estimate:
        config = changed(self.config, {**changes, **self._fixed_sizes})
        return estimate(config, self.hardware, lengths_of(config))

    def with_reasons(self, sizes: Changes, settings: _Settings) -> AutomaticLayout:
        """Return the chosen values with their reasons, and the plan with them."""

        def section(key: str) -> str:
            return key.rpartition(".")[0].removesuffix(".megatron")

        changes = self._changes(sizes, settings)
        shown = [k for k in changes if k.endswith((f".{TP}", f".{PP}")) or value_at(self.config, k) != changes[k]]
        keys = [ChosenKey(key, changes[key], self._reason(changes, key)) for key in sorted(shown, key=section)]
        return AutomaticLayout(tuple(keys), self._plan(changes))

    def _reason(self, changes: Changes, key: str) -> str:
        section, _, name = key.rpartition(".")
        role = next((role for role in self.roles if role.path == section), None)
        if role is None:
            return _CHEAPEST
        if name in _SIZES:
            return self._size_reason(role, name, changes[key])
        without = self._shortfalls({**changes, key: None if key.endswith(RECOMPUTE) else False})
        return f"without: {without[0].text}" if without else _CHEAPEST

    def _size_reason(self, role: PlannedRole, name: str, value: Any) -> str:
        if name in (EP, "expert_tensor_parallel_size"):
            return "spreads the experts over a node" if name == EP else "experts are too narrow to divide"
        if name in STAGES:
            return "the layers do not divide evenly"
        attempt = self.rejected.get(role.name)
        if attempt and value == 1:
            return "not needed"
        return f"{attempt.label}: {attempt.shortfalls[0].text}" if attempt else "the smallest size fits"

    def _nothing_fits(self, closest: _Attempt) -> NothingFitsError:
        pools, shortfall = self.config.trainer, closest.shortfalls[0]
        components = ", ".join(f"{part.owner} {part.name} {part.nbytes / GIB:.1f} GiB" for part in shortfall.largest)
        text = (
            f"layout=auto: nothing fits {pools.nnodes} x {pools.n_gpus_per_node} {self.hardware.name} with "
            f"{self.hardware.memory_gib:g} GiB each. The closest, {closest.label} with offloading and full "
            f"recomputation, lacks {closest.missing / GIB:.1f} GiB: {shortfall.text}"
        )
        return NothingFitsError(f"{text} ({components})" if components else text, code="layout.nothing-fits")


def _cheapest(options: Iterable[tuple[float, _Settings] | None]) -> _Settings | None:
    """Return the settings with the lowest cost; of equal ones the first."""
    found = [option for option in options if option is not None]
    return min(found, key=lambda option: option[0])[1] if found else None


def _is_valid(model: ModelConfig, megatron: MegatronConfig, path: str) -> bool:
    try:
        check_role(model, megatron, path)
    except MegarlError:
        return False
    return True


def _label(sizes: Changes, path: str) -> str:
    values = {"TP": sizes[f"{path}.{TP}"], "PP": sizes[f"{path}.{PP}"]}
    values |= {"CP": sizes[f"{path}.{CP}"], "EP": sizes.get(f"{path}.{EP}", 1)}
    return " ".join(f"{name}{value}" for name, value in values.items() if value > 1 or name in ("TP", "PP"))


Build = Callable[[Mapping[str, Any]], Config]  # makes the unchecked configuration of the job with changed values

_DEVICES = "trainer.n_gpus_per_node"


def automatic_layout(build: Build, fixed: frozenset[str], hardware_name: str | None = None) -> AutomaticLayout:
    """Choose the layout of a run.

    Args:
        fixed: keys set by hand, whose values stay.
        hardware_name: hardware file to plan for; None = ``trainer.hardware``, or the devices found.

    Raises:
        ConfigError: nothing fits; the message names the smallest excess and what helps.
        ModelError: a model's ``config.json`` is invalid.
    """
    config = build({})
    hardware = hardware_for(config, hardware_name)
    found: list[ChosenKey] = []
    if _DEVICES not in fixed:
        count, reason = hardware.devices_per_node, f"devices of a node of {hardware.name}"
        found = [ChosenKey(_DEVICES, *((1, "one process on a CPU") if hardware.device == "cpu" else (count, reason)))]
    changes = {chosen.key: chosen.value for chosen in found}
    stored = _stored_layout(build(changes), fixed)
    fixed = fixed | changes.keys() | stored.keys()
    found += [
        ChosenKey(key, value, "as in the checkpoint") for key, value in stored.items() if value_at(config, key) != value
    ]
    changes |= stored

    def config_with(extra: Mapping[str, Any]) -> Config:
        config = build({**changes, **extra})
        return config if hardware.device == "cpu" else with_hub_configs(config)

    try:
        chosen = choose_layout(config_with({}), fixed, hardware)
    except NothingFitsError as error:
        helps = list(_remedies(config_with, fixed, hardware))
        advice = f"It fits with: {'; '.join(helps)}" if helps else "Use more devices, or a smaller model"
        raise ConfigError(f"{error.text}. {advice}", code=error.code) from error
    return chosen._replace(keys=(*found, *chosen.keys))


def _stored_layout(config: Config, fixed: frozenset[str]) -> dict[str, Any]:
    """Return the automatic layout of the checkpoint from which the run continues on the same number of devices."""
    trainer = config.trainer
    folder = Path(str(trainer.resume_from_path))
    if trainer.resume_mode != "resume_path":
        root = Path(str(trainer.default_local_dir))
        step = (root / POINTER).read_text(encoding="ascii").strip() if (root / POINTER).is_file() else ""
        folder = root / f"global_step_{step}"
    file = folder / "config.yaml"
    if trainer.resume_mode == "disable" or not file.is_file():
        return {}
    stored = dict(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))
    devices = {f"trainer.{key}": getattr(trainer, key) for key in ("nnodes", "n_gpus_per_node")}
    if stored.get("layout") != "auto" or any(stored.get(key) != value for key, value in devices.items()):
        return {}
    own = dict(leaves(asdict(config)))
    return {key: value for key, value in stored.items() if is_layout_key(key) and key in own and key not in fixed}


def _remedies(build: Build, fixed: frozenset[str], hardware: Hardware) -> Iterator[str]:
    """Yield changes of the job with which a layout fits, each confirmed."""
    config = build({})
    nodes, supervised = config.trainer.nnodes, isinstance(config, SupervisedConfig)
    model = "model" if supervised else "actor_rollout_ref.model"
    length = "data.max_length" if supervised else "data.max_response_length"
    tokens = config.data.max_length if isinstance(config, SupervisedConfig) else config.data.max_response_length
    groups = (
        [{"trainer.nnodes": factor * nodes} for factor in (2, 4, 8, 16)],
        [{f"{model}.lora_rank": 32}],
        [{length: tokens // factor} for factor in (2, 4, 8)],
    )
    for group in groups:
        for changes in group:
            if fits(build(changes), fixed, hardware):
                yield " ".join(overrides_of(changes))
                break
    saving = [key for key in fixed if key.endswith(("_offload", ".recompute_granularity"))]
    if saving and fits(config, fixed.difference(saving), hardware):
        yield f"{', '.join(sorted(saving))} left to the planner"


def layout_lines(layout: AutomaticLayout) -> list[str]:
    """Describe a layout: a table of keys, values and reasons, and the memory of a device in each phase."""
    rows = [(f"{chosen.key}={format_value(chosen.value)}", chosen.reason) for chosen in layout.keys]
    lines = ["layout=auto chose:", *table_lines(rows, indent="  ")] if rows else ["layout=auto: nothing to choose"]
    if (plan := layout.plan) is not None:
        usable = plan.usable_bytes / GIB
        phases = ", ".join(f"{phase.phase} {phase.nbytes / GIB:.1f}" for phase in plan.memory.phases)
        lines.append(f"  GiB per device, of {usable:.1f} usable: {phases}; host {plan.memory.host_bytes / GIB:.0f} GiB")
    return lines
