"""Length distributions: from text, from files of an earlier run, and invalid ones."""

import json

import numpy as np
import pytest
from expected_errors import raises
from hypothesis import given
from hypothesis import strategies as st

from megarl.ops.plan.lengths import Quantiles, longest_lengths, read_lengths


@given(
    longest=st.integers(200, 20_000),
    share=st.floats(0.05, 0.95),
    sigma=st.floats(0.1, 1.5),
)
def test_log_normal_has_the_requested_mean(longest, share, sigma):
    mean = share * longest
    lengths = Quantiles.log_normal(mean, sigma, longest)
    assert lengths.mean == pytest.approx(mean, rel=0.01, abs=1.0)
    assert lengths.values[0] >= 1 and lengths.longest <= longest
    assert list(lengths.values) == sorted(lengths.values)


def test_log_normal_has_the_expected_median():
    """Mean and median of a log-normal differ by exp(sigma^2 / 2); the cut at 100,000 does not matter."""
    lengths = Quantiles.log_normal(1000, 0.5, 100_000, count=4096)
    assert np.median(lengths.values) == pytest.approx(1000 / np.exp(0.125), rel=0.01)


@given(count=st.integers(1, 2000), seed=st.integers(0, 3))
def test_samples_follow_the_distribution(count, seed):
    lengths = Quantiles(tuple(range(1, 257)))
    sample = lengths.sample(count, seed)
    assert len(sample) == count and abs(sample.mean() - lengths.mean) <= 128 / count + 1


def test_lengths_from_text():
    lengths = read_lengths("mean=600,max=4096,sigma=0.8,prompt_mean=100", 512, 8192)
    assert lengths.responses.mean == pytest.approx(600, rel=0.01) and lengths.responses.longest <= 4096
    assert lengths.prompts.mean == pytest.approx(100, rel=0.01) and lengths.prompts.longest <= 512
    assert read_lengths("mean=600", 512, 8192).prompts == Quantiles.constant(512)


def test_default_lengths_are_the_maximum():
    lengths = longest_lengths(512, 1024)
    assert lengths.rows(3)[0].tolist() == [512] * 3 and lengths.rows(3)[1].tolist() == [1024] * 3
    assert "--lengths" in lengths.describe()


def test_lengths_from_files_of_an_earlier_run(tmp_path):
    dump = tmp_path / "7.npz"
    np.savez(dump, prompt_lengths=np.array([10, 20]), response_lengths=np.array([100, 300]))
    lengths = read_lengths(str(dump), 512, 200)
    assert lengths.prompts.mean == pytest.approx(15, abs=0.5)
    assert lengths.responses.longest == 200, "cut at the maximum of the configuration"
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "response_length/mean": 50.0}, {"step": 2, "response_length/mean": 80.0}, {"step": 3}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lengths = read_lengths(str(metrics), 512, 1000)
    assert lengths.responses.mean == pytest.approx(80, rel=0.02) and lengths.prompts.mean == 512


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("mean=600,max=99999", "plan.lengths-range", "1024"),
        ("mean=0", "plan.lengths-range", ": mean=0 "),
        ("mean=x", "plan.lengths-number", ": mean=x "),
        ("maen=3", "plan.lengths-field", "'maen'; did you mean mean?"),
        ("mean=3,zzz=1", "plan.lengths-field", "'zzz'. Known: mean, max"),
        ("max=10", "plan.lengths-mean", "mean"),
        ("mean=3,sigma=-1", "plan.lengths-range", ": sigma=-1 "),
        ("nothing.npz", "plan.lengths-file", "no such file"),
    ],
)
def test_invalid_text_is_rejected(text, code, named):
    with raises(code, f"--lengths={text}", named):
        read_lengths(text, 512, 1024)


def test_files_of_other_formats_are_rejected(tmp_path):
    broken = tmp_path / "1.npz"
    broken.write_bytes(b"no archive")
    with raises("plan.lengths-dump", f"--lengths={broken}"):
        read_lengths(str(broken), 1, 1)
    other = tmp_path / "other.jsonl"
    other.write_text('{"step": 1}\n', encoding="utf-8")
    with raises("plan.lengths-metrics", f"--lengths={other}", "response_length/mean"):
        read_lengths(str(other), 1, 1)
    text = tmp_path / "lengths.txt"
    text.write_text("600", encoding="utf-8")
    with raises("plan.lengths-file", f"--lengths={text}", "neither .npz nor .jsonl"):
        read_lengths(str(text), 1, 1)
