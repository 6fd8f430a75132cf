"""Secrets are found by the name of their key and by their form; ordinary values stay."""

from __future__ import annotations

import pytest

from megarl.base.redaction import REDACTED, is_secret_name, redact, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "judge_api_key",
        "X-API-Key",
        "Authorization",
        "password",
        "db_password",
        "hf_token",
        "access_token",
        "secret",
        "client_secret",
        "aws_secret_key",
        "private_key",
        "credentials",
        "a.b.api_key",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name) and redact({name: "abc"}) == {name: REDACTED}


@pytest.mark.parametrize(
    "name",
    [
        "eos_token",
        "pad_token",
        "stop_token",
        "max_tokens",
        "tokenizer_path",
        "api_key_env",
        "secretary",
        "token_level",
        "author",
    ],
)
def test_ordinary_names(name: str) -> None:
    assert not is_secret_name(name) and redact({name: "abc"}) == {name: "abc"}


def test_nested_values_and_references() -> None:
    values = {
        "headers": {"Authorization": "Bearer abcdefgh12345", "Accept": "text/html"},
        "token": ["one", "two"],
        "api_key": "${oc.env:JUDGE_KEY}",
        "password": None,
        "credentials": {"user": "me", "file": "key.json"},
        "urls": ["http://me:hunter2@host:8000/v1", "http://host/v1"],
        "seed": 3,
    }
    assert redact(values) == {
        "headers": {"Authorization": REDACTED, "Accept": "text/html"},
        "token": [REDACTED, REDACTED],
        "api_key": "${oc.env:JUDGE_KEY}",
        "password": None,
        "credentials": {"user": REDACTED, "file": REDACTED},
        "urls": [f"http://{REDACTED}@host:8000/v1", "http://host/v1"],
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward_model.reward_kwargs.api_key=sk1", f"reward_model.reward_kwargs.api_key={REDACTED}"),
        ("++kwargs={api_key: abc, n: 2}", f"++kwargs={{api_key: {REDACTED}, n: 2}}"),
        ('{"password": "a b", "x": 1}', f'{{"password": {REDACTED}, "x": 1}}'),
        ("api_key=${oc.env:KEY}", "api_key=${oc.env:KEY}"),
        ("GET http://host/v1?api_key=abc&n=2", f"GET http://host/v1?api_key={REDACTED}&n=2"),
        ("Authorization: Bearer abcdefghij", f"Authorization: {REDACTED}"),
        ("postgres://me:p%40ss@db/x", f"postgres://{REDACTED}@db/x"),
        ("key sk-proj-ABCDEFGH12345678 failed", f"key {REDACTED} failed"),
        ("token: 151643", "token: 151643"),
        ("step 3: eos_token=</s>, http://host:8000/a@b", "step 3: eos_token=</s>, http://host:8000/a@b"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert redact_text(text) == expected
