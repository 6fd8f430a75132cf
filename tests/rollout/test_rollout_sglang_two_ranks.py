"""A replica of two ranks: each receives its shard from the training rank.

SGLang pads the vocabulary of 50 to 64: its ranks have 32 and 18 rows with weights.
"""

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file
from sglang_engines import API_KEY, TWO_RANKS
from support.expected_errors import raises
from support.listeners import assert_on_loopback, listening_processes
from weight_syncs import WeightSync, rank_params, update

from megarl.base.ports import free_port
from megarl.base.processes import command_line, descendants
from megarl.base.rendezvous import host_store
from megarl.models import WeightMap
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.verification import rectangle_checksum, tensor_checksum
from megarl.rollout import Request, RolloutError, SamplingParams, create_engine
from megarl.rollout.interface import EngineLost
from megarl.rollout.sglang.backend import SchedulerLiveness
from megarl.rollout.sglang.options import SGLangOptions, environment
from megarl.sharding.placement import current_location
from megarl.sharding.verification import PartialChecksum, checksums_by_name, compare_checksums, weight_rectangles
from megarl.workers.rollout import WeightFingerprint

REQUESTS = [Request(f"r{i}", [3, 1, 4, 1, 5][: i + 1], SamplingParams(6, ignore_eos=True), i) for i in range(4)]


def shards_of(folder):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    params = [weight_map.rollout_params(2, rank, vocab_multiple=64) for rank in (0, 1)]
    return [dict(load_local(reader, shard, torch.float32)) for shard in params]


def assert_generates(engine, reference, version):
    for request, completion in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        expected = reference.log_probs(request.prompt_ids, completion.token_ids)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)
        assert completion.weight_version == version


def assert_holds(engine, folder):
    for rank, shard in enumerate(shards_of(folder)):
        assert engine.checksum(rank) == {name: tensor_checksum(tensor) for name, tensor in shard.items()}
    params = rank_params(engine)
    rectangles = [weight_rectangles(shard, torch.float32, ()) for shard in params]
    sums = [checksums_by_name(p, s) for p, s in zip(params, engine.rectangle_checksums(rectangles), strict=True)]
    compare_checksums([checksums_of_files(folder)], sums, 2)


def checksums_of_files(folder):
    """Checksum of each whole tensor of the folder."""
    tensors = load_file(folder / "model.safetensors").items()
    return {name: PartialChecksum(rectangle_checksum(t, [0] * t.dim()), t.numel()) for name, t in tensors}


@pytest.fixture(scope="module")
def folders(make_folder):
    return [make_folder(seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def owner(sglang_engines, folders):
    """The engine that started the server, after its use by the contract suite."""
    return sglang_engines.running(TWO_RANKS, folders[0])


@pytest.fixture(scope="module")
def server(owner, folders):
    options = SGLangOptions(url=owner.url, api_key=API_KEY, tensor_parallel_size=2)
    engine = create_engine("sglang", str(folders[0]), options)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def tied(make_folder):
    return [make_folder("qwen3", True, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def front_end(sglang_engines, tied):
    """Two ranks in process, of Qwen3 with a tied output layer."""
    sglang_engines.make_room()
    engine = create_engine("sglang", str(tied[0]), SGLangOptions(tensor_parallel_size=2, max_num_seqs=2))
    yield engine
    engine.shutdown()


@pytest.fixture
def two_nodes(folders):
    """URL of a running server with two nodes of one rank each, both on this host."""
    http, met = free_port(), free_port()
    servers = []
    for node in (0, 1):
        args = {"nnodes": 2, "node_rank": node, "dist_init_addr": f"127.0.0.1:{met}"}
        port = http if node == 0 else free_port()
        options = SGLangOptions(tensor_parallel_size=2, port=port, server_args=args, api_key=API_KEY)
        job = {"folder": str(folders[0]), "max_model_len": 128, "options": vars(options)}
        command = [sys.executable, "-m", "megarl.rollout.sglang.http"]
        server = subprocess.Popen(command, env=os.environ | environment(options), stdin=subprocess.PIPE)
        server.stdin.write(json.dumps(job).encode())
        server.stdin.close()
        servers.append(server)
    yield f"http://127.0.0.1:{http}"
    for server in servers:
        server.kill()
        server.wait()


def assert_sglang_on_loopback():
    """Schedulers, rendezvous of the ranks, gloo and the server; the channels between SGLang's processes are no TCP."""
    family = [psutil.Process(), *descendants()]
    assert_on_loopback(listening_processes(family), "sglang::scheduler")


def test_each_rank_reads_its_shard_in_buckets(server, folders, reference_for):
    server.load_hf(str(folders[0]), version=1)
    assert_generates(server, reference_for(folders[0]), 1)
    usage = update(server, folders[1], 2)
    assert_generates(server, reference_for(folders[1]), 2)
    assert_holds(server, folders[1])
    # Both ranks read shared memory; this process holds commands only.
    assert [process.peak_bytes for process in usage[:2]] == [0, 0] and usage[2].peak_bytes < 60_000


def test_ranks_receive_messages_over_gloo(server, folders):
    bucket, store = 6000, host_store("127.0.0.1")
    sync = WeightSync(server, folders[3], "gloo", bucket, store)
    usage = sync.run(3)
    assert_holds(server, folders[3])
    assert all(0 < process.peak_bytes <= bucket for process in usage[:2])
    sync.tensors["decoder.final_layernorm.weight"][5] += 0.25
    sync.run(4)
    expected = load_file(folders[3] / "model.safetensors")["model.norm.weight"]
    expected[5] += 0.25
    for rank in (0, 1):
        assert server.checksum(rank)["model.norm.weight"] == tensor_checksum(expected)


def test_two_ranks_in_process(front_end, tied, reference_for):
    with raises("sglang.one-per-process", "sglang.mode=http"):
        create_engine("sglang", str(tied[0]), SGLangOptions())
    assert_sglang_on_loopback()
    update(front_end, tied[1], 2)
    assert_generates(front_end, reference_for(tied[1]), 2)
    assert len(set(front_end.fingerprint())) == 2
    front_end.sleep()
    front_end.wake()
    update(front_end, tied[2], 3, bucket_bytes=900)
    assert_generates(front_end, reference_for(tied[2]), 3)
    assert_holds(front_end, tied[2])


def test_ranks_on_two_nodes_of_a_server_read_their_shards(two_nodes, folders, reference_for):
    options = SGLangOptions(url=two_nodes, api_key=API_KEY, tensor_parallel_size=2)
    for _ in range(1500):
        try:
            engine = create_engine("sglang", str(folders[0]), options)
            break
        except RolloutError:
            time.sleep(0.2)
    else:
        pytest.fail("the server did not get ready")
    update(engine, folders[1], 2)
    assert_generates(engine, reference_for(folders[1]), 2)
    assert_holds(engine, folders[1])
    # Its ranks know this host by their rendezvous address.
    assert engine._backend.ranks_host == "127.0.0.1"
    assert engine.receiver.locations == [current_location()] * 2
    engine.shutdown()


def test_a_weight_changed_by_sglang_is_detected(server, folders):
    """The change bypasses megarl's loader: SGLang loads a whole tensor."""
    update(server, folders[0], 1)
    fingerprint = WeightFingerprint(server)
    fingerprint.record()
    fingerprint.verify("for no reason")
    name = "model.layers.1.mlp.down_proj.weight"
    checksums = [server.checksum(rank)[name] for rank in (0, 1)]
    whole = torch.cat([shard[name] for shard in shards_of(folders[0])], dim=1)
    whole[3, -1] *= 1.0001
    server._session.call("begin_weight_update")
    payload = pickle.dumps([(name, whole)])
    assert server._session.call("update_weights_from_tensor", serialized_named_tensors=[payload] * 2).success
    server._session.call("end_weight_update")
    with raises("sync.weights-changed", "rank 1", "in this test"):
        fingerprint.verify("in this test")
    assert server.checksum(0)[name] == checksums[0] and server.checksum(1)[name] != checksums[1]


def test_messages_of_one_rank_are_not_enough(server, folders):
    sync = WeightSync(server, folders[0])
    sync.begin(3)
    messages = sync.sender.export_bucket(0)
    with raises("sync.senders-differ", "SGLang's rank 1: rollout rank 1", "training ranks []"):
        server.receiver.import_bucket(0, [messages[0]])
    with raises("sync.no-open-update"):
        server.receiver.end(3)
    assert server.stale
    sync.close(completed=False)
    update(server, folders[0], 5)
    assert server.weight_version == 5


def test_a_waiting_request_is_aborted(front_end, tied):
    front_end.load_hf(str(tied[0]))
    front_end.submit([Request(f"r{i}", [1, 2, i], SamplingParams(60, ignore_eos=True), i) for i in range(6)])
    front_end.abort(["r5"])
    done = {}
    while len(done) < 6:
        done.update((c.request_id, c) for c in front_end.poll(10.0))
    assert done["r5"].finish_reason == "abort" and len(done["r5"].token_ids) < 60
    assert all(len(done[f"r{i}"].token_ids) == 60 for i in range(5))


def test_a_server_with_other_arguments_is_refused(server, folders):
    with raises("sglang.server-mismatch", server.url, "tp_size=2", "have 1"):
        create_engine("sglang", str(folders[0]), SGLangOptions(url=server.url, api_key=API_KEY))
    with raises("sglang.no-answer", "http://127.0.0.1:9"):
        create_engine("sglang", str(folders[0]), SGLangOptions(url="http://127.0.0.1:9", api_key=API_KEY))


def test_the_server_answers_requests_with_its_key_only(server, folders):
    """Without a key SGLang would unpickle, and so execute, weights from anyone."""
    payload = base64.b64encode(pickle.dumps([("model.embed_tokens.weight", torch.zeros(1))])).decode()
    calls = [
        ("/update_weights_from_tensor", {"serialized_named_tensors": [payload] * 2}),
        ("/generate", {"input_ids": [1, 2]}),
        ("/flush_cache", {}),
        ("/abort_request", {"rid": "x"}),
    ]
    for headers in ({}, {"Authorization": "Bearer another"}):
        for path, body in calls:
            assert requests.post(server.url + path, json=body, headers=headers, timeout=30).status_code == 401, path
        for path in ("/server_info", "/openapi.json", "/model_info"):
            assert requests.get(server.url + path, headers=headers, timeout=30).status_code == 401, path
    assert requests.get(server.url + "/health", timeout=30).status_code == 200
    with raises("sglang.no-server-info", server.url, 401):
        create_engine("sglang", str(folders[0]), SGLangOptions(url=server.url, api_key="another"))
    with raises("sglang.no-api-key-env", server.url, "sglang.api_key_env"):
        create_engine("sglang", str(folders[0]), SGLangOptions(url=server.url))


def test_the_key_is_on_no_command_line(server):
    """Every user of a machine reads command lines."""
    commands = list(map(command_line, descendants()))
    assert any("megarl.rollout.sglang.http" in command for command in commands)
    assert not any(API_KEY in word for command in commands for word in command)


def test_an_open_server_is_refused(folders):
    """A stand-in that answers everyone, as SGLang does without --api-key."""

    class Open(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Open) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = SGLangOptions(url=f"http://127.0.0.1:{server.server_port}", api_key=API_KEY)
        with raises("sglang.unprotected-server", options.url, "--api-key", "sglang.api_key_env"):
            create_engine("sglang", str(folders[0]), options)
        server.shutdown()


def test_sglang_listens_on_loopback_only(server):
    assert_sglang_on_loopback()


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"server_args": {"api_key": "x"}}, "sglang.engine-argument", ["server_args.api_key"]),
        ({"server_args": {"tokenizer_worker_num": 2}}, "sglang.tokenizer-workers", ["tokenizer_worker_num=2"]),
        ({"server_args": {"tp_size": 2}}, "sglang.engine-argument", ["server_args.tp_size"]),
        ({"server_args": {"chunked_prefil_size": 2}}, "sglang.unknown-argument", ["nearest: chunked_prefill_size"]),
        ({"mode": "inprocess"}, "engine.option-choice", ["mode='inprocess'", "in_process, http"]),
        ({"tensor_parallel_size": 3}, "sglang.cpu-padding", ["num_attention_heads", "of 3"]),
    ],
)
def test_invalid_options_are_refused_before_the_start(folders, options, code, values):
    from megarl.rollout.sglang.options import check_server_args

    with raises(code, *values):
        if "server_args" in options:
            check_server_args(options["server_args"])
        create_engine("sglang", str(folders[0]), SGLangOptions(**options))


def poll_for(engine, seconds):
    """Poll in slices."""
    deadline, completions = time.monotonic() + seconds, []
    while time.monotonic() < deadline and not completions:
        completions += engine.poll(0.1)
    return completions


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_is_detected(front_end, tied, monkeypatch, rank):
    front_end.load_hf(str(tied[0]))
    victim = front_end._backend._processes[rank]
    request = Request("r", [1, 2], SamplingParams(100, ignore_eos=True), 0)
    monkeypatch.setattr(front_end, "_liveness", SchedulerLiveness(front_end._backend, front_end._loop, 5.0))
    try:
        victim.suspend()
        front_end.submit([request])
        assert poll_for(front_end, 1) == []
        victim.resume()
        assert [completion.request_id for completion in poll_for(front_end, 120)] == ["r"]
        victim.suspend()
        front_end.submit([request])
        facts = ["scheduler", "5 s (rollout.health.timeout_s)", f"stopped: pid {victim.pid}"]
        with raises("sglang.engine-lost", *facts, error=EngineLost):
            poll_for(front_end, 120)
        with raises("sglang.engine-lost", *facts, error=EngineLost):
            front_end.submit([request])
    finally:
        victim.resume()
        front_end._wait_until_idle()


def test_a_frozen_server_is_detected(server, owner, folders):
    """Stops the front end of the server, then all of its processes; another client continues after that."""
    server.load_hf(str(folders[0]))
    front = psutil.Process(owner._backend._process.pid)
    for frozen in ([front], descendants(front)):
        options = SGLangOptions(url=server.url, api_key=API_KEY, tensor_parallel_size=2, health_timeout_s=6.0)
        engine = create_engine("sglang", str(folders[0]), options)
        try:
            server._wait_until_idle()
            engine.load_hf(str(folders[0]))
            for process in frozen:
                process.suspend()
            engine.submit([Request("r", [1, 2], SamplingParams(100, ignore_eos=True), 0)])
            with raises("sglang.engine-lost", "scheduler", "6 s", error=EngineLost):
                poll_for(engine, 120)
        finally:
            for process in frozen:
                process.resume()
            engine.shutdown()
    server.submit([Request("r", [1, 2], SamplingParams(5, ignore_eos=True), 0)])
    assert [completion.request_id for completion in poll_for(server, 120)] == ["r"]
    server._wait_until_idle()


def test_a_frozen_rank_is_detected_during_a_sync(owner, server, folders, monkeypatch):
    """The scheduler is silent during a bucket anyway; the next sync succeeds once the process runs again."""
    monkeypatch.setattr(owner, "options", replace(owner.options, health_timeout_s=6.0))
    (victim,) = [
        process
        for process in descendants(psutil.Process(owner._backend._process.pid))
        if "scheduler_TP1" in command_line(process)
    ]
    sync = WeightSync(owner, folders[0])
    sync.begin(8)
    sync.send([0])
    try:
        victim.suspend()
        facts = ["'bucket'", "stopped for 6 s (rollout.health.timeout_s)", f"pid {victim.pid}"]
        with raises("sglang.engine-lost", *facts, error=EngineLost):
            sync.send([1])
    finally:
        victim.resume()
    assert owner.stale
    sync.close(completed=False)
    update(owner, folders[1], 9)
    assert_holds(owner, folders[1])


def test_a_rank_that_dies_within_a_bucket_is_named(front_end, tied):
    """Ends the engine of the tests above."""
    sync = WeightSync(front_end, tied[1])
    sync.begin(2)
    sync.send([0])
    victim = front_end._backend._processes[1]
    victim.suspend()
    threading.Timer(2.0, victim.kill).start()
    with raises("sglang.engine-lost", "(rank 1, running:", error=EngineLost):
        sync.send([1])
    assert front_end.stale
    with raises("sglang.engine-lost", "processes ended", error=EngineLost):
        sync.begin(3)


def test_a_dead_server_is_detected(server, owner, folders):
    """Runs last: ends the shared server."""
    server.load_hf(str(folders[0]))
    server.submit([Request("r", [1, 2], SamplingParams(100, ignore_eos=True), 0)])
    owner._backend._process.kill()
    with pytest.raises(EngineLost):
        while True:
            server.poll(30.0)
    owner._backend._process.wait()
    with raises("sglang.engine-lost", "code -9", error=EngineLost):
        owner.load_hf(str(folders[0]))
    owner.shutdown()
