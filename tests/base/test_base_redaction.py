"""Secrets are found by the name of their key and by their form; ordinary values stay."""

import pytest

from megarl.base import redaction
from megarl.base.redaction import (
    REDACTED,
    is_secret_name,
    mask_known,
    redact,
    redact_text,
    redact_words,
    remember_secret,
    remember_secrets,
)


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
def test_secret_names(name):
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
def test_ordinary_names(name):
    assert not is_secret_name(name) and redact({name: "abc"}) == {name: "abc"}


def test_nested_values_and_references():
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
        ("reward.reward_kwargs.api_key=sk1", f"reward.reward_kwargs.api_key={REDACTED}"),
        ("++kwargs={api_key: abc, n: 2}", f"++kwargs={{api_key: {REDACTED}, n: 2}}"),
        ('{"password": "a b", "x": 1}', f'{{"password": {REDACTED}, "x": 1}}'),
        ("api_key=${oc.env:KEY}", "api_key=${oc.env:KEY}"),
        ("GET http://host/v1?api_key=abc&n=2", f"GET http://host/v1?api_key={REDACTED}&n=2"),
        ("Authorization: Bearer abcdefghij", f"Authorization: {REDACTED}"),
        ("postgres://me:p%40ss@db/x", f"postgres://{REDACTED}@db/x"),
        ("key sk-proj-ABCDEFGH12345678 failed", f"key {REDACTED} failed"),
        ("token: 151643", "token: 151643"),
        ("db_password=12345678 port=5432", f"db_password={REDACTED} port=5432"),
        ("password: 4711", f"password: {REDACTED}"),
        ("Authorization: Token abc123", f"Authorization: {REDACTED}"),
        ("{'authorization': 'Token abc123', 'n': 1}", f"{{'authorization': {REDACTED}, 'n': 1}}"),
        ("serve --api-key abc123 --port 80", f"serve --api-key {REDACTED} --port 80"),
        ("serve --api-key=abc123", f"serve --api-key={REDACTED}"),
        ("serve --password --port 80", "serve --password --port 80"),
        ("--max-new-token 5 --token-count 7", "--max-new-token 5 --token-count 7"),
        ("clientSecret=abc, accessToken: xyz", f"clientSecret={REDACTED}, accessToken: {REDACTED}"),
        ("the accessible token ring, mytoken=5", "the accessible token ring, mytoken=5"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----\nb",
            f"a\n{REDACTED}\nb",
        ),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\\nb3BlbnNzaC1rZXk", REDACTED),
        ("-----BEGIN CERTIFICATE-----\nMIIE", "-----BEGIN CERTIFICATE-----\nMIIE"),
        ("step 3: eos_token=</s>, http://host:8000/a@b", "step 3: eos_token=</s>, http://host:8000/a@b"),
    ],
)
def test_texts(text, expected):
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "form",
    [
        "sk-" + "a1B2" * 8,
        "sk_live_" + "a1B2" * 6,
        "hf_" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2" * 9,
        "glpat-" + "a1B2" * 5,
        "xoxb-1234-5678-abcdef",
        "AKIA" + "A1B2" * 4,
        "ASIA" + "A1B2" * 4,
        "AIza" + "a1B2" * 8 + "abc",
        "nvapi-" + "a1B2" * 8,
        "gsk_" + "a1B2" * 8,
        "npm_" + "a1B2" * 9,
        "SG." + "a1B2" * 5 + "." + "a1B2" * 8,
    ],
)
def test_keys_of_services_are_found_by_their_prefix(form):
    assert redact_text(f"call({form!r})") == f"call('{REDACTED}')"
    assert redact_text(f"export KEY_{form}") == f"export KEY_{REDACTED}"
    assert redact_text(f"x{form}") == f"x{form}", "a longer word"


def test_words_of_a_command():
    words = [
        "python",
        "-m",
        "megarl",
        "++kw.api_key=a b",
        "x.password=1234",
        "--token",
        "abc",
        "n_token=5",
        "a=sk",
    ]
    expected = [*words[:3], f"++kw.api_key={REDACTED}", f"x.password={REDACTED}", "--token", REDACTED, *words[7:]]
    assert redact_words(words) == expected


def test_secrets_of_the_configuration_and_of_the_process_are_found_everywhere():
    remember_secret("a token made here")
    try:
        remember_secrets({"judge": {"api_key": "correct horse"}, "n": 5})
        text = "the tool answered: correct horse, a token made here"
        assert redact_text(text) == f"the tool answered: {REDACTED}, {REDACTED}"
        assert mask_known(text) == f"the tool answered: {'*' * 13}, {'*' * 17}"
    finally:
        redaction._KNOWN.own.clear()
        remember_secrets({})
    assert mask_known(text) == text
