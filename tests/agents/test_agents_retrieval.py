"""Retrieval: the index against BM25 by hand, the server over HTTP, the client with failing servers."""

import asyncio
import http.client
import json
import math
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import retrieval_server
from retrieval_server import BM25Index, Document, RetrievalServer, read_corpus
from support.expected_errors import raises

from megarl.agents.retrieval_client import RetrievalClient, RetrievalOptions

TOOL = retrieval_server.__file__
TEXTS = [
    "Zebra\nThe zebra lives in Africa and eats grass",
    "Penguin\nThe penguin lives in ice and eats fish, fish and more fish",
    "Cow\nCows eat grass",
]
DOCUMENTS = [Document(str(number), text) for number, text in enumerate(TEXTS)]


def bm25(query, k1=1.5, b=0.75):
    """Lucene's BM25 (Kamphuis et al. 2020), document by document."""
    stop = {"the", "in", "and"}
    docs = [[w.strip(",").lower() for w in text.split() if w.strip(",").lower() not in stop] for text in TEXTS]
    mean = sum(map(len, docs)) / len(docs)
    scores = []
    for doc in docs:
        score = 0.0
        for word in query.lower().split():
            holding = sum(word in text for text in docs)
            idf = math.log(1 + (len(docs) - holding + 0.5) / (holding + 0.5))
            count = doc.count(word)
            score += idf * count / (count + k1 * (1 - b + b * len(doc) / mean))
        scores.append(score)
    return scores


@pytest.fixture
def server():
    with RetrievalServer(BM25Index(DOCUMENTS), port=0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def post(url, body, raw=False):
    data = body if raw else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data)) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("query", ["zebra grass", "fish", "lives africa fish", "eats"])
def test_bm25_ranking(query):
    scores = bm25(query)
    expected = sorted((at for at in range(3) if scores[at]), key=lambda at: -scores[at])
    (hits,) = BM25Index(DOCUMENTS).search([query], topk=3)
    assert [document.id for document, _ in hits] == [str(at) for at in expected]
    assert [score for _, score in hits] == pytest.approx([scores[at] for at in expected], rel=1e-5)


def test_single_letters_and_digits_are_words():
    index = BM25Index([Document("a", "Sum\n3 + 4 is 7"), Document("b", "Sum\n5 + 6 is 11")])
    assert [[document.id for document, _ in hits] for hits in index.search(["4", "6 ?"], topk=2)] == [["a"], ["b"]]


def test_document_without_common_word_is_not_returned():
    assert BM25Index(DOCUMENTS).search(["quantum", "", "the in"], topk=2) == [[], [], []]


def test_search_r1_api(server):
    status, answer = post(server.url, {"queries": ["fish", "zebra"], "topk": 1, "return_scores": True})
    assert status == 200
    assert [[hit["document"] for hit in row] for row in answer["result"]] == [
        [{"id": "1", "contents": TEXTS[1]}],
        [{"id": "0", "contents": TEXTS[0]}],
    ]
    assert answer["result"][0][0]["score"] == pytest.approx(bm25("fish")[1], rel=1e-5)
    _, plain = post(server.url, {"queries": ["grass"], "topk": 5})
    assert {document["id"] for document in plain["result"][0]} == {"0", "2"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": "fish"}, "queries must be a list"),
        ({"queries": ["fish"], "topk": 0}, "topk must be a whole number"),
        (["fish"], "must be a JSON object"),
    ],
)
def test_malformed_requests_get_status_400(server, body, message):
    status, answer = post(server.url, body)
    assert status == 400 and message in answer["error"]
    assert post(server.url, b"{not json", raw=True)[0] == 400
    assert post(server.url.replace("retrieve", "other"), {})[0] == 404


@pytest.mark.parametrize(
    ("length", "status", "message"),
    [
        ("-1", 400, "Content-Length"),
        ("many", 400, "Content-Length"),
        (str(2**40), 413, "it must be a number up to"),
    ],
)
def test_invalid_content_length_is_refused(server, length, status, message):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("POST", "/retrieve", headers={"Content-Length": length})
    response = connection.getresponse()
    assert response.status == status and message in response.read().decode()
    connection.close()


def test_malformed_corpus_line_is_named(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": 7, "contents": "A\\nb"}\n\n{"title": "T", "text": "x y"}\n', encoding="utf-8")
    assert read_corpus(file) == [Document("7", "A\nb"), Document("2", "T\nx y")]
    file.write_text('{"id": 1, "contents": "A"}\n{"id": 2}\n', encoding="utf-8")
    with raises("data.corpus-document", "corpus.jsonl:2", "'contents'"):
        read_corpus(file)
    file.write_text("\n", encoding="utf-8")
    with raises("data.no-rows", "corpus.jsonl"):
        read_corpus(file)


def test_concurrent_queries_share_a_request(server):
    client = RetrievalClient(RetrievalOptions(server.url, topk=1))

    async def many():
        return await asyncio.gather(*(client.search(("fish", "zebra")[n % 2]) for n in range(100)))

    for _ in range(2):  # each in a new event loop
        results = asyncio.run(many())
        assert [hits[0].title for hits in results] == ["Penguin", "Zebra"] * 50
        assert results[1][0].text == "The zebra lives in Africa and eats grass"
    assert client.requests == 2


class Answers(BaseHTTPRequestHandler):
    """Sends ``server.answers`` in order, and then repeats the last one."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.count += 1
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("answers", "code", "value", "requests"),
    [
        ([(503, "busy"), (200, '{"result": [[{"id": "a", "contents": "T\\nx"}]]}')], None, None, 2),
        ([(503, "busy")], "tool.retriever-unreachable", "status 503: busy", 2),
        ([(400, "bad query")], "tool.retriever-unreachable", "status 400: bad query", 1),
        ([(200, "<html>")], "tool.retriever-answer", "<html>", 1),
        ([(200, '{"result": []}')], "tool.retriever-answer", "1 queries", 1),
        ([(200, '{"result": [[{"id": 1}]]}')], "tool.retriever-answer", "'contents'", 1),
    ],
)
def test_failure_is_never_an_empty_result(answers, code, value, requests):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.answers, server.count = answers, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = RetrievalClient(RetrievalOptions(f"http://127.0.0.1:{server.server_port}/retrieve", retries=1))
        if code is None:
            assert [hit.contents for hit in asyncio.run(client.search("x"))] == ["T\nx"]
        else:
            with raises(code, "actor_rollout_ref.rollout.multi_turn.search.url=http://127.0.0.1:", value):
                asyncio.run(client.search("x"))
        assert server.count == requests
        server.shutdown()


def test_unreachable_server_is_named():
    client = RetrievalClient(RetrievalOptions("http://127.0.0.1:1/retrieve", retries=0))
    with raises(
        "tool.retriever-unreachable",
        "actor_rollout_ref.rollout.multi_turn.search.url=http://127.0.0.1:1/retrieve",
        "1 queries",
    ):
        asyncio.run(client.search("x"))


def test_command_line(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(document.as_json()) for document in DOCUMENTS), encoding="utf-8")
    command = [sys.executable, str(TOOL)]
    process = subprocess.Popen(
        [*command, "--corpus", str(corpus), "--port", "0"], stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT
    )
    line = process.stdout.readline()
    assert line.startswith("serving 3 documents at http://127.0.0.1:")
    assert post(line.split()[-1], {"queries": ["cows"]})[1]["result"][0][0]["id"] == "2"
    process.terminate()
    assert process.wait(timeout=120) == 0
    missing = subprocess.run([*command, "--corpus", "none.jsonl"], capture_output=True, text=True)
    assert missing.returncode == 1 and missing.stderr.endswith("none.jsonl [data.file-missing]\n")
