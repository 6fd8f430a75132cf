"""Parts of the SGLang engine that need no SGLang: shards, checks of updates, requests and responses."""

import importlib.util
import json
import socket
import struct
from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.models import WeightMap, parse_model_config, read_model_config
from megarl.models.checksum import ParamRectangle, rectangle_checksum, tensor_checksum
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout import EngineOptions, Request, RolloutError, SamplingParams, check_engine_model
from megarl.rollout.sglang import loader, options
from megarl.rollout.sglang.backend import NAN_STOP, ResponseContext, parse_completion, request_payload
from megarl.rollout.sglang.engine import _check_options, _memory_tags
from megarl.rollout.sglang.loader import ReplyListener, reply_addresses
from megarl.rollout.sglang.options import SHIM, SGLangOptions, check_server_args, environment, server_args
from megarl.rollout.sglang.senders import TensorSender
from megarl.rollout.sglang.shards import SGLangShards
from megarl.rollout.sglang.whole_tensors import TensorAssembler


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_rows_are_placed_as_in_sglang(make_folder, tp):
    shards = SGLangShards(read_model_config(make_folder()), tp)
    whole = torch.arange(50.0)[:, None].repeat(1, 32)
    height = -(-50 // tp)
    held = [torch.full((64 // tp, 32), -1.0) for _ in range(tp)]
    for rank in range(tp):
        shard = whole[rank * height : (rank + 1) * height]
        for part in shards.rank_slices(rank, "lm_head.weight", (0, 0), shard):
            box = held[part.rank][part.start[0] : part.start[0] + len(part.values)]
            assert (box == -1).all()
            box.copy_(part.values)
        back = [held[r][first : first + rows] for r, _, first, rows in shards.rank_rows(rank, "lm_head.weight")]
        assert rank < tp - 1 or torch.equal(torch.cat(back), shard)
    # SGLang: 64 rows in equal parts, of which the first 50 are the model's.
    together = torch.cat(held)
    assert torch.equal(together[:50], whole) and (together[50:] == -1).all()
    live = [shards.target_params(rank)["lm_head.weight"].live[0] for rank in range(tp)]
    assert live == [max(0, min(50 - rank * 64 // tp, 64 // tp)) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_of_a_shard_are_added_up_over_sglangs_ranks(make_folder, tp):
    shards = SGLangShards(read_model_config(make_folder()), tp)
    whole = torch.randn(50, 32)
    padded = torch.cat([whole, torch.zeros(14, 32)])
    (height, rows), total = (-(-50 // tp), 64 // tp), 0
    for rank in range(tp):
        count = min(height, 50 - rank * height)
        part = ParamRectangle("lm_head.weight", (0, 0), (count, 32), (rank * height, 0), (count, 32), "float32")
        for holder, tile in shards.rank_rectangles(rank, part):
            total += tile.checksum(padded[holder * rows : (holder + 1) * rows])
    assert total % 2**64 == rectangle_checksum(whole, (0, 0))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_whole_tensors_are_assembled_from_shards(make_folder, tp):
    """Four ranks share two key-value heads: elements on two ranks are taken once."""
    folder = make_folder()
    reader = HFReader(folder)
    shards = [{p.name: p for p in WeightMap(reader.config).rollout_params(tp, rank)} for rank in range(tp)]
    assembler, created = TensorAssembler(shards), {}
    for rank, shard in enumerate(shards):
        for name, tensor in load_local(reader, shard.values(), torch.float32):
            for start in range(0, len(tensor), 5):
                at = (start, *[0] * (tensor.dim() - 1))
                for hf_name, whole in assembler.put(rank, name, at, tensor[start : start + 5]):
                    assert hf_name not in created
                    created[hf_name] = whole
    expected = load_file(folder / "model.safetensors")
    assert set(created) == set(expected) and all(torch.equal(created[name], expected[name]) for name in created)


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 9,
    "max_position_embeddings": 16,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def test_latent_projections_are_fused_as_in_sglang():
    """As in SGLang: ``fused_qkv_a_proj_with_mqa`` is ``q_a_proj`` over ``kv_a_proj_with_mqa``, on every rank."""
    shards = SGLangShards(parse_model_config(LATENT), 2)
    query, key_value = torch.arange(48.0).view(6, 8), -torch.arange(48.0).view(6, 8)
    for layer in (0, 1):
        block = f"model.layers.{layer}.self_attn."
        fused = block + "fused_qkv_a_proj_with_mqa.weight"
        for rank in (0, 1):
            target_params = shards.target_params(rank)
            assert target_params[fused] == ((12, 8), (12, 8))
            assert not {block + "q_a_proj.weight", block + "kv_a_proj_with_mqa.weight"} & set(target_params)
            held = torch.zeros(12, 8)
            for name, whole in (("q_a_proj.weight", query), ("kv_a_proj_with_mqa.weight", key_value)):
                for start in (0, 4):
                    (part,) = shards.rank_slices(rank, block + name, (start, 2), whole[start : start + 4, 2:])
                    assert (part.rank, part.name) == (rank, fused)
                    held[part.start[0] : part.start[0] + len(part.values), part.start[1] :] = part.values
                (rows,) = shards.rank_rows(rank, block + name)
                assert (rows.rank, rows.name) == (rank, fused)
                assert torch.equal(held[rows.first : rows.first + rows.rows, 2:], whole[:, 2:])
            assert torch.equal(held[:, 2:], torch.cat([query, key_value])[:, 2:])


def test_without_a_latent_of_queries_nothing_is_fused():
    target_params = SGLangShards(parse_model_config(LATENT | {"q_lora_rank": None}), 1).target_params(0)
    attention = {
        name.removeprefix("model.layers.1.self_attn."): t.shape for name, t in target_params.items() if "1.self" in name
    }
    assert attention["q_proj.weight"] == (8, 8) and attention["kv_a_proj_with_mqa.weight"] == (6, 8)
    assert not any("fused" in name for name in target_params)


def test_an_indivisible_size_is_named(make_folder):
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=3"):
        SGLangShards(read_model_config(make_folder()), 3)
    options = EngineOptions(device="cuda", tensor_parallel_size=4)
    with pytest.raises(ModelError, match=r"num_attention_heads to be a multiple of 4.*DeepseekV3ForCausalLM has 2"):
        check_engine_model("sglang", parse_model_config(LATENT), options)
    check_engine_model("sglang", parse_model_config(LATENT | {"num_attention_heads": 4}), options)


@pytest.mark.parametrize(
    "args", [{"ep_size": 2}, {"quantization": "fp8"}, {"moe_a2a_backend": "deepep"}, {"enable_dp_attention": True}]
)
def test_arguments_that_change_the_ranks_parameters_are_refused(args):
    (name,) = args
    with pytest.raises(ConfigError, match=f"server_args.{name}=.*hold other parameters"):
        check_server_args(args)


def test_sizes_padded_by_sglang_on_a_cpu_are_refused(make_folder):
    config = read_model_config(make_folder(intermediate_size=96))
    check_engine_model("sglang", config, EngineOptions())
    check_engine_model("sglang", config, EngineOptions(device="cuda", tensor_parallel_size=2))
    with pytest.raises(ModelError, match="over 2 ranks needs intermediate_size to be a multiple of 64"):
        check_engine_model("sglang", config, EngineOptions(tensor_parallel_size=2))


def test_ranks_of_a_replica_have_consecutive_devices():
    assert [EngineOptions(device="cuda", tensor_parallel_size=2).device_of(rank) for rank in (0, 1)] == [
        "cuda:0",
        "cuda:1",
    ]
    assert EngineOptions(device="cuda:2").device_of(1) == "cuda:3"
    assert EngineOptions().device_of(1) == "cpu"


PARAMS = {"a": ((4, 2), (3, 2)), "b": ((3,), (3,))}
"""Shapes, and the parts with weights."""


class TestLoader:
    """The loader on a plain torch module; replies use a real connection."""

    @pytest.fixture
    def ask(self):
        replies, command_ids = ReplyListener(), iter(range(100))
        model = torch.nn.ParameterDict({"a": torch.full((4, 2), 9.0), "b": torch.full((3,), 9.0)})

        def ask(action, data=None, **fields):
            command_id = next(command_ids)
            command = {"action": action, "command_id": command_id, "rank": 0, "to": replies.to, **fields}
            loader.load(model, [(json.dumps(command), torch.empty(0) if data is None else data)])
            return replies.collect(command_id, {0}, 10.0)[0]

        ask.model = model
        yield ask
        replies.close()

    def write(self, ask, *slices):
        data = torch.cat([torch.full(shape, value).flatten() for _, _, shape, value in slices]).view(torch.uint8)
        offset, described = 0, []
        for name, start, shape, _ in slices:
            described.append((name, start, shape, "float32", offset))
            offset += 4 * torch.Size(shape).numel()
        return ask("write", data, slices=described)

    def test_writes_slices_and_zeroes_the_padding(self, ask):
        ask("begin", params=PARAMS, version=3)
        self.write(ask, ("a", (0, 0), (3, 1), 1.0), ("b", (0,), (3,), 2.0))
        self.write(ask, ("a", (0, 1), (3, 1), 5.0))
        ask("end", version=3)
        assert ask.model["a"].tolist() == [[1, 5], [1, 5], [1, 5], [0, 0]]
        assert ask.model["b"].tolist() == [2, 2, 2]
        digests = ask("checksum", rows={"of a": ["a", 1, 2], "b": ["b", 0, 3]}).values
        assert digests["of a"] == tensor_checksum(ask.model["a"].data[1:3])
        assert digests["b"] == tensor_checksum(ask.model["b"].data)
        rectangles = [ParamRectangle("a", (1, 0), (2, 2), (7, 4), (2, 2), "float32")]
        assert ask("sums", rectangles=rectangles).values == {
            "checksums": [rectangle_checksum(torch.tensor([[1.0, 5.0]] * 2), (7, 4))]
        }
        with pytest.raises(WeightSyncError, match=r"rank 0: parameter 'a' of the engine is torch\.float32"):
            ask("sums", rectangles=[rectangles[0]._replace(dtype="bfloat16")])
        reply = ask("read", name="a", first=1, rows=1)
        assert (reply.values, struct.unpack("2f", reply.data)) == ({"dtype": "float32", "shape": [1, 2]}, (1.0, 5.0))

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (("c", (0,), (1,), 1.0), "'c' is not a parameter that this update writes"),
            (("b", (2,), (2,), 1.0), "does not fit"),
            (("a", (0, 0), (1, 1), 1.0), "overlaps"),
            (("a", (3, 0), (1, 1), 1.0), "does not fit"),
        ],
    )
    def test_a_bucket_with_a_bad_slice_is_not_written(self, ask, bad, message):
        ask("begin", params=PARAMS, version=3)
        self.write(ask, ("a", (0, 0), (1, 2), 1.0))
        with pytest.raises(WeightSyncError, match=rf"SGLang's rank 0: .*{message}"):
            self.write(ask, ("b", (0,), (1,), 7.0), bad)
        assert ask.model["b"].tolist() == [9, 9, 9]
        with pytest.raises(WeightSyncError, match="no weight update is open"):
            ask("end", version=3)

    def test_a_gap_or_another_version_is_refused(self, ask):
        ask("begin", params=PARAMS, version=3)
        self.write(ask, ("a", (0, 0), (3, 2), 1.0), ("b", (0,), (2,), 1.0))
        with pytest.raises(WeightSyncError, match="incomplete: 1 of 2 parameters, first 'b' with 2 of 3"):
            ask("end", version=3)
        ask("begin", params=PARAMS, version=3)
        with pytest.raises(WeightSyncError, match="version 3 was ended as version 4"):
            ask("end", version=4)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({**PARAMS, "c": ((1,), (1,))}, "no parameter 'c'"),
            ({"a": PARAMS["a"]}, "'b' without weights in the update"),
            ({**PARAMS, "b": ((4,), (4,))}, r"'b' with shape \[3\], expected \[4\]"),
        ],
    )
    def test_another_model_is_refused_before_writing(self, ask, params, message):
        with pytest.raises(WeightSyncError, match=message):
            ask("begin", params=params, version=1)
        assert ask.model["a"].tolist() == [[9, 9]] * 4

    def test_missing_replies_are_reported(self):
        replies = ReplyListener()
        with pytest.raises(WeightSyncError, match=r"ranks \[0, 1\] did not reply"):
            replies.collect(0, {0, 1}, 0.0)
        replies.close()


def test_staging_memory_returns_to_the_gpu_after_an_update(make_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "megarl.rollout.sglang.senders.return_cached_memory", lambda: calls.append(sender.staging_bytes)
    )
    shards = SGLangShards(read_model_config(make_folder()), 1)
    sender = TensorSender(shards, None, None, [torch.device("cpu")], False, 5000)
    sender.put(0, "model.norm.weight", (0,), torch.ones(32))
    assert sender.staging_bytes == 5000
    sender.abandon()
    assert calls == [0]


def test_address_for_ranks_on_another_host(monkeypatch):
    assert reply_addresses("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "192.0.2.1")  # of a translating gateway, not of this machine
    assert reply_addresses("127.0.0.1") == ("192.0.2.1", "127.0.0.1")
    listener = ReplyListener("127.0.0.1")
    assert listener.to["address"][0] == "192.0.2.1" and listener._listener.address[0] == "127.0.0.1"
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "gateway.invalid")
    assert reply_addresses("127.0.0.1") == ("gateway.invalid", "127.0.0.1")
    own = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family == socket.AF_INET]
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", own[-1])
    assert reply_addresses("127.0.0.1") == (own[-1], own[-1])
    listener.close()


def response_of(pairs, kind="length", **meta):
    meta = {"output_token_logprobs": [(p, t, None) for t, p in pairs], "finish_reason": {"type": kind}, **meta}
    return {"output_ids": [t for t, _ in pairs], "meta_info": meta}


REQUEST = Request("r", [1, 2], SamplingParams(3), 5)
READING = ResponseContext(frozenset({7}), 4)


def test_a_response_of_several_weight_versions():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    done = parse_completion(REQUEST, response_of([(5, -1.0), (6, -2.0), (8, -0.5)], weight_versions=spans), READING)
    assert (done.token_ids, done.log_probs) == ([5, 6, 8], [-1.0, -2.0, -0.5])
    assert (done.weight_version, done.weight_versions, done.finish_reason) == (3, (3, 3, 4), "length")
    plain = parse_completion(REQUEST, response_of([(5, -1.0)] * 3, weight_version="2"), READING)
    assert (plain.weight_version, plain.weight_versions) == (2, ())


def test_a_stop_token_as_the_last_allowed_one_counts_as_stop():
    assert parse_completion(REQUEST, response_of([(5, -1.0), (6, -1.0), (7, -1.0)]), READING).finish_reason == "stop"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (response_of([(5, float("nan"))] * 3), "not finite"),
        (response_of([(5, -1.0)], "stop", finish_reason={"type": "stop", "matched": NAN_STOP}), "not finite"),
        (response_of([(5, -1.0)] * 2), "ended it after 2 of max_new_tokens=3"),
        ({**response_of([(5, -1.0)] * 3), "output_ids": [5, 5]}, "2 tokens and log-probs of 3"),
        (response_of([(5, -1.0)], "error"), "finish_reason 'error'"),
    ],
)
def test_an_inconsistent_response_is_an_error(response, message):
    with pytest.raises(RolloutError, match=message):
        parse_completion(REQUEST, response, READING)


def test_seeds_are_sent_in_deterministic_mode_only():
    seeded = request_payload(REQUEST, "x-1", frozenset({7}), 50)["sampling_params"]
    assert (seeded["sampling_seed"], seeded["top_k"], seeded["stop_token_ids"]) == (5, 50, [7])
    assert "sampling_seed" not in request_payload(REQUEST, "x-1", frozenset({7}), 0)["sampling_params"]


def test_token_filters_are_sent():
    request = replace(REQUEST, params=replace(REQUEST.params, min_p=0.1, repetition_penalty=1.2, top_k=3, top_p=0.5))
    sent = request_payload(request, "x-1", frozenset({7}), 0)["sampling_params"]
    assert [sent[name] for name in ("min_p", "repetition_penalty", "top_k", "top_p")] == [0.1, 1.2, 3, 0.5]
    with pytest.raises(RolloutError, match=r"min_p=0\.1: SGLang's deterministic mode has no min_p"):
        request_payload(request, "x-1", frozenset({7}), 50)


def test_environment_of_sglangs_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "0,2,4|1,3"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "6|6"
    assert environment(SGLangOptions(device="cuda:1")) == {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    two_nodes = SGLangOptions(device="cuda:1", server_args={"nnodes": 2})
    assert "GLOO_SOCKET_IFNAME" not in environment(two_nodes), "its ranks are on several machines"


def test_expandable_segments_are_removed_for_sglang_on_a_gpu_only(monkeypatch):
    """SGLang's memory saver rejects them; other settings of the allocator stay."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    on_gpu = environment(SGLangOptions(device="cuda"))
    assert on_gpu["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512" and on_gpu["PYTORCH_ALLOC_CONF"] == ""
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(environment(SGLangOptions()))


def test_cuda_graphs_sleep_with_the_kv_cache():
    assert _memory_tags({"kv_cache"}) == ["cuda_graph", "kv_cache"]
    assert _memory_tags({"weights"}) == ["weights"]


def test_broadcast_between_processes_of_one_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"weight_transport=distributed: NCCL connects no two .* use tensor"):
        _check_options(SGLangOptions(device="cuda", weight_transport="distributed"))
    _check_options(SGLangOptions(weight_transport="distributed"))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="reads SGLang's argument names")
@pytest.mark.sglang
def test_sampling_needs_no_compiler_on_a_node_without_nvcc(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(options.shutil, "which", lambda name: None)
    assert server_args(str(tmp_path), 64, SGLangOptions(device="cuda"))["sampling_backend"] == "pytorch"
    monkeypatch.setattr(options.shutil, "which", lambda name: name if name == "/opt/cuda/bin/nvcc" else None)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert "sampling_backend" not in server_args(str(tmp_path), 64, SGLangOptions(device="cuda"))


def murmur3(data):
    """MurmurHash3, 32 bits, seed 0, of whole words, from its definition."""
    low, state = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & low
        word = (word << 15 | word >> 17) & low
        state ^= word * 0x1B873593 & low
        state = (state << 13 | state >> 19) & low
        state = (state * 5 + 0xE6546B64) & low
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_substitute_of_sglangs_seeding_kernel():
    spec = importlib.util.spec_from_file_location("stand_in", SHIM / "sgl_kernel" / "__init__.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    seeds, positions, columns = [0, 1, 2**62 + 12345], [3, 0, 900], [0, 5, 151_000]
    hashes = stand_in.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashes.dtype == torch.uint32
    assert hashes.tolist() == [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    with pytest.raises(NotImplementedError, match="compiled kernel 'convert_weight_packed'"):
        stand_in.convert_weight_packed()
