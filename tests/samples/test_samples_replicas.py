"""The decision whether the trainer's devices generate, against hand calculations."""

from megarl.samples.replicas import HybridReplicas


def test_hybrid_replicas_are_used_if_they_save_more_than_a_switch_takes():
    """One hybrid replica besides three others."""
    hybrid = HybridReplicas([3], others=3)
    assert not hybrid.decide(0.0) and hybrid.in_use, "the cost of a switch is not known yet"
    hybrid.note_switch(2.0)
    # A wait of 9 s with four replicas is one of 12 s with three: 3 s are saved.
    assert not hybrid.decide(9.0) and hybrid.in_use
    hybrid.note_switch(5.0)  # 3.5 s on average
    assert hybrid.decide(9.0) and not hybrid.in_use
    # A wait of 12 s with three replicas would be 9 s with four; one of 16 s would be 12 s.
    assert not hybrid.decide(12.0) and not hybrid.in_use
    assert hybrid.decide(16.0) and hybrid.in_use


def test_old_costs_are_forgotten():
    hybrid = HybridReplicas([1], others=1)
    hybrid.note_switch(100.0)
    assert hybrid.decide(10.0) and not hybrid.in_use
    for _ in range(3):
        hybrid.note_switch(1.0)
    assert hybrid.decide(10.0) and hybrid.in_use
