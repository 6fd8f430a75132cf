"""Retention of checkpoints, by hand and for any history of saves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.base.files import FileEntry
from megarl.trainer.state.checkpoint_manifest import BestBy, Manifest, Removal, Retention, Score

ENTRY = FileEntry(1, "")


def manifest(step, roles="actor critic", value=None, sequence=None):
    score = None if value is None else Score("acc", value)
    files = {f"{role}/x": ENTRY for role in roles.split()} | {"trainer_state.json": ENTRY}
    return Manifest(step, sequence or step, files, score)


def test_retention_counts_each_role_separately():
    retention = Retention({"actor": 3, "critic": 1})
    history = [manifest(1), manifest(2, "actor"), manifest(3), manifest(4)]
    assert retention.removals(history) == [Removal(1), Removal(3, ("critic",))]
    assert Retention({"actor": None, "critic": 1}).removals(history[2:]) == [Removal(3, ("critic",))]
    assert Retention().removals(history) == []


def test_age_is_the_order_of_saves_not_the_step():
    history = [manifest(10, sequence=1), manifest(20, sequence=2), manifest(1, sequence=3)]
    assert Retention({"actor": 2}).removals(history) == [Removal(10)]


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_best_checkpoint(mode, best):
    values = [0.5, 0.9, 0.1, math.nan, None]
    history = [manifest(step, value=value) for step, value in enumerate(values, start=1)]
    retention = Retention({"actor": 1, "critic": 1}, BestBy("acc", mode))
    assert retention.best_of(history).step == best
    assert [removal.step for removal in retention.removals(history)] == [s for s in (1, 2, 3, 4) if s != best]
    assert Retention({}, BestBy("loss", mode)).best_of(history) is None
    assert retention.best_of([manifest(1, value=0.5), manifest(2, value=0.5)]).step == 2


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_limit_must_be_positive(role):
    with raises("config.value-out-of-limits", f"trainer.max_{role}_ckpt_to_keep=0"):
        Retention({role: 0})


@given(
    st.lists(st.tuples(st.sampled_from(["actor", "critic", "actor critic"]), st.none() | st.floats(0, 1)), max_size=12),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
def test_the_newest_of_each_role_and_the_best_remain(history, actors, critics, keep_best):
    manifests = [manifest(step, roles, value) for step, (roles, value) in enumerate(history, start=1)]
    retention = Retention({"actor": actors, "critic": critics}, BestBy("acc") if keep_best else None)
    removed = {removal.step: removal.roles for removal in retention.removals(manifests)}
    scored = [(value, step) for step, (_, value) in enumerate(history, start=1) if value is not None]
    best = max(scored)[1] if keep_best and scored else None
    for role, limit in (("actor", actors), ("critic", critics)):
        holders = [step for step, (roles, _) in enumerate(history, start=1) if role in roles]
        expected = {*(holders if limit is None else holders[-limit:]), *({best} & {*holders})}
        left = {s for s in holders if s not in removed or (removed[s] is not None and role not in removed[s])}
        assert left == expected
