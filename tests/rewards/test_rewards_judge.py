"""The judge reward with an endpoint that answers, fails, hangs or returns garbage."""

import asyncio

import pytest
from services import serving

from megarl.base.ports import held_port
from megarl.rewards.calling import FunctionSpec, InfrastructureFailure, RewardTask
from megarl.rewards.outcome import BAD_SAMPLE, INFRASTRUCTURE
from megarl.rewards.pool import InDriverRunner, RewardJob, RewardPool
from megarl.rewards.rules import judge
from megarl.rewards.rules.judge import fill_template, read_score


def completion(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def ask(url, **kwargs):
    options = {"base_url": f"{url}/v1/", "model": "grader", "timeout_s": 60.0, **kwargs}
    return asyncio.run(judge("d", "It is {prompt}.", "Paris", {}, "Capital of France?", **options))


def test_score_is_the_judges_number(monkeypatch):
    monkeypatch.setenv("MEGARL_TEST_KEY", "sesame")
    with serving(lambda number, body: completion("Good, but Score: 3\nOn reflection: Score: 7.5")) as service:
        result = ask(service.url, api_key_env="MEGARL_TEST_KEY", template="{prompt}|{response}|{ground_truth}")
    assert result == {"score": 0.75, "judgement": "Good, but Score: 3\nOn reflection: Score: 7.5"}
    (body,) = service.bodies
    # braces in the response stay unchanged
    assert body["messages"] == [{"role": "user", "content": "Capital of France?|It is {prompt}.|Paris"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("grader", 1024, 0.0)
    assert service.headers[0]["Authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (lambda number, body: completion("Very good."), ValueError, "gave no score"),
        (lambda number, body: completion("Score: 11"), ValueError, "11 is not from 0 to 10"),
        (lambda number, body: (400, "too long"), ValueError, "status 400: too long"),
        (lambda number, body: (429, "busy"), InfrastructureFailure, "status 429: busy"),
        (lambda number, body: (500, "oops"), InfrastructureFailure, "status 500: oops"),
        (lambda number, body: (401, "who?"), InfrastructureFailure, "status 401"),
        (lambda number, body: (200, "<html>"), InfrastructureFailure, "answered no JSON"),
        (lambda number, body: {"error": "no"}, InfrastructureFailure, "no chat completion"),
        (lambda number, body: None, InfrastructureFailure, r"did not answer within 0\.5 s"),
    ],
    ids=["no score", "out of range", "refused", "busy", "error", "key", "no json", "no completion", "hangs"],
)
def test_failed_service_is_distinguished_from_bad_sample(answer, kind, message):
    with serving(answer) as service, pytest.raises(kind, match=message):
        ask(service.url, timeout_s=0.5 if "within" in message else 60.0)


def test_unreachable_endpoint_is_an_infrastructure_failure():
    with held_port("127.0.0.1") as port, pytest.raises(InfrastructureFailure, match="did not answer"):
        ask(f"http://127.0.0.1:{port}")


def test_transient_failures_are_retried():
    """In processes of the pool, with ten concurrent calls each."""

    def answer(number, body):
        text = body["messages"][0]["content"]
        if "never" in text:
            return 503, "unavailable"
        if "nonsense" in text:
            return completion("I cannot say.")
        attempts[text] = attempts.get(text, 0) + 1
        return completion("Score: 10") if attempts[text] == 3 else (500, "oops")

    attempts: dict[str, int] = {}
    texts = [*(f"answer {number}" for number in range(20)), "never", "nonsense"]
    with serving(answer) as service:
        kwargs = {"base_url": service.url, "model": "m", "template": "{response}", "timeout_s": 60.0}
        spec = FunctionSpec("judge", kwargs, 120.0, 10)
        with RewardPool([spec], [spec.load().traits], processes=2, max_retries=2) as pool:
            outcomes, counts = pool.run([RewardJob(0, RewardTask("d", text, "t", {}, "p")) for text in texts])
    assert [outcome.score for outcome in outcomes[:20]] == [1.0] * 20
    assert [outcome.kind for outcome in outcomes[20:]] == [INFRASTRUCTURE, BAD_SAMPLE]
    assert counts.retries == 21 * 2 and counts.replaced == 0
    assert len(service.bodies) == 21 * 3 + 1


def test_coroutine_function_runs_in_the_driver():
    with serving(lambda number, body: completion("Score: 5")) as service:
        runner = InDriverRunner([FunctionSpec("judge", {"base_url": service.url, "model": "m"}).load()])
        outcomes, _ = runner.run([RewardJob(0, RewardTask("d", "x", "t", {}, "p"))] * 5)
    assert [outcome.score for outcome in outcomes] == [0.5] * 5


def test_scores_and_templates():
    assert read_score("Score: -2 Score: 4", r"Score: (-?\d+)", -5, 5) == 4
    with pytest.raises(ValueError, match="'high' is no number"):
        read_score("Score: high", r"Score: (\w+)", 0, 1)
    assert fill_template("{a}{response}{b}", "p", "{prompt}", 7) == "{a}{prompt}{b}"
