"""A real SGLang server as teacher: its log-probs equal transformers', and another tokenizer is refused before a run."""

import re

import pytest
import torch
from make_arithmetic import WORDS, build_model, build_tokenizer
from sglang_engines import API_KEY
from support.expected_errors import raises

from megarl.config.schema.distillation import TeacherServerConfig
from megarl.data import DataProto
from megarl.rollout import create_engine
from megarl.rollout.sglang import teacher
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.teacher import TeacherServers, TokenRow
from megarl.trainer.jobs.preflight import check_teacher_server
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.served_teacher import ServedTeacherWorker

KEY = "distillation.teacher_models.t.server"
LAST = 266
"""The last token of the vocabulary."""
ROWS = [TokenRow([11, 5, 30, 7], [9, 40, 2]), TokenRow([11, 5, 30, 7], [8]), TokenRow([3], [1, LAST, 4, 5, LAST])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer."""
    out, tokenizer = tmp_path_factory.mktemp("arithmetic"), build_tokenizer()
    build_model(tokenizer, 3, 32, 2, "qwen2").save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def server(folder):
    engine = create_engine("sglang", str(folder), SGLangOptions(mode="http", api_key=API_KEY, max_num_seqs=16))
    engine.wake()
    engine.load_hf(str(folder))
    yield engine.url
    engine.shutdown()


@pytest.fixture
def config(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", API_KEY)
    return TeacherServerConfig(urls=[server], api_key_env="TEACHER_KEY", rows_per_request=2, max_attempts=1)


def distributions(reference, row):
    logits = reference.model(torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1]
    return logits.detach().log_softmax(-1)


def test_log_probs_and_top_tokens_equal_transformers(config, folder, reference_for):
    servers, reference = TeacherServers(KEY, config), reference_for(folder)
    repeated = ROWS * 3  # later requests find prefixes in the server's cache
    for row, grade in zip(repeated, servers.grade(repeated, topk=5), strict=True):
        expected = distributions(reference, row)
        at_tokens = expected[torch.arange(len(row.response)), torch.tensor(row.response)]
        assert torch.from_numpy(grade.log_probs) == pytest.approx(at_tokens, abs=1e-5)
        best = expected.topk(5)
        assert grade.top_ids.tolist() == best.indices.tolist()
        assert torch.from_numpy(grade.top_log_probs) == pytest.approx(best.values, abs=1e-5)
    assert servers.retries == 0
    servers.close()


def test_top_tokens_as_lists_equal_those_as_arrays(config, monkeypatch):
    """Lists, as versions without the arrays return them, have the same numbers."""
    results, answers = [], []
    top_tokens = teacher._top_tokens
    monkeypatch.setattr(teacher, "_top_tokens", lambda *call: answers.append(call[0]) or top_tokens(*call))
    for fields in (teacher._AS_ARRAYS, ()):
        monkeypatch.setattr(teacher, "_AS_ARRAYS", fields)
        servers = TeacherServers(KEY, config)
        results.append(servers.grade(ROWS, topk=5))
        servers.close()
    assert ["input_top_logprobs" in answer for answer in answers] == [False] * 3 + [True] * 3
    for ours, theirs in zip(*results, strict=True):
        for arrays, lists in zip(ours, theirs, strict=True):
            assert arrays.dtype == lists.dtype and (arrays == lists).all()


def test_worker_returns_the_columns_of_the_rows(config, folder, reference_for):
    prompts, responses = ([torch.tensor(part) for part in parts] for parts in zip(*ROWS, strict=True))
    width, length = max(map(len, prompts)), max(map(len, responses))
    batch = DataProto.from_dict(
        {
            "prompts": torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts]),
            "responses": torch.stack([torch.nn.functional.pad(r, (0, length - len(r))) for r in responses]),
            "attention_mask": torch.tensor(
                [[i >= width - len(p) for i in range(width)] + [i < len(r) for i in range(length)]
                 for p, r in zip(prompts, responses, strict=True)]
            ).long(),
        }
    )  # fmt: skip
    for topk in (0, 4):
        place = WorkerPlace(0, 1, "127.0.0.1", 0)
        worker = ServedTeacherWorker(place, name="t", server=config, topk=topk, candidates=1000)
        worker.init_model()
        columns = batch.union(worker.compute_teacher_log_prob(batch))
        for index, row in enumerate(ROWS):
            expected = distributions(reference_for(folder), row)
            if topk:
                ours = columns.unpadded("teacher_topk_log_probs")[index]
                assert ours == pytest.approx(expected.topk(topk).values, abs=1e-5)
                assert columns.unpadded("teacher_topk_ids")[index].tolist() == expected.topk(topk).indices.tolist()
            else:
                expected = expected[torch.arange(len(row.response)), torch.tensor(row.response)]
                assert columns.unpadded("teacher_log_prob")[index] == pytest.approx(expected, abs=1e-5)
        assert worker.pass_metrics() == {"distillation/retries/t": 0.0}


def test_vocabulary_of_the_server_is_compared(config):
    """Each token is compared, also without an answer of the model; and the server lives on."""
    tokenizer = build_tokenizer()
    check_teacher_server(KEY, config, tokenizer, LAST + 1, 32)
    other = build_tokenizer(["zz", *WORDS])  # the same bytes; words have other ids
    with raises("teacher.other-vocabulary", f"{KEY}.urls: http", "tokens differ", "'zz'"):
        check_teacher_server(KEY, config, other, LAST + 1, 32)
    servers = TeacherServers(KEY, config)
    servers.check_token(LAST)
    servers.close()
    with raises("teacher.request-refused", f"{KEY}.urls: http", "status 400", "out-of-vocabulary token id 267"):
        check_teacher_server(KEY, config, tokenizer, LAST + 2, 32)
    check_teacher_server(KEY, config, tokenizer, LAST + 1, 32)


def test_longest_sequence_is_compared_with_the_servers_limit(config):
    servers = TeacherServers(KEY, config)
    with raises("teacher.context-length", f"{KEY}.urls: http", "up to 1000000", "data.max_response_length") as error:
        servers.check_length(1_000_000)
    limit = int(re.search(r"fewer than (\d+)", error.value.text)[1])
    servers.check_length(limit - 1)
    (grade,) = servers.grade([TokenRow([3], [4] * (limit - 2))])
    assert len(grade.log_probs) == limit - 2
    servers.close()


def test_a_wrong_key_is_refused_without_retries(config, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "wrong")
    servers = TeacherServers(KEY, config)
    with raises("teacher.request-refused", f"{KEY}.urls: http", "status 401"):
        servers.grade(ROWS)
    assert servers.retries == 0
    servers.close()
