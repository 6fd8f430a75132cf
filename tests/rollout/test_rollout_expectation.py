"""Expected lengths against numbers worked out by hand."""

from megarl.rollout.expectation import Expectation


def test_what_is_known_goes_from_told_to_survived_to_measured():
    now = 0.0
    lengths = Expectation(lambda: now)
    assert lengths.tokens("a") is None and lengths.mean is None and not lengths.begun("a")
    assert lengths.tokens("a", told=7.0) == 7.0
    begun = lengths.begin("a")
    lengths.begin("b")
    now = 4.0
    assert lengths.tokens("b") is None  # nothing has ended, so that nobody knows how fast tokens come
    lengths.end("a", begun, 8)
    # a: 8 tokens in 4 s. b has had 4 s, about 8 tokens, and so is expected to have 16.
    assert (lengths.tokens("a"), lengths.tokens("b"), lengths.tokens("c")) == (8.0, 16.0, None)
    assert lengths.tokens("b", told=5.0) == 5.0 and lengths.tokens("a", told=5.0) == 8.0
    now = 6.0
    assert lengths.tokens("b") == 24.0
    again = lengths.begin("a")
    now = 8.0
    lengths.end("a", again, 2)
    # Ten tokens in 4 + 2 s of answering.
    assert lengths.tokens("a") == 5.0 and lengths.mean == 5.0
    assert lengths.tokens("b") == 2 * 8.0 * 10 / 6
