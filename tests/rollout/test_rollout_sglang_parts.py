"""The parts of the SGLang engine that need no SGLang: where weights go, how they are checked, what answers mean."""

import importlib.util
import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import ConfigError, ModelError, WeightSyncError
from megarl.models import WeightMap, parse_model_config, read_model_config
from megarl.models.checksum import tensor_checksum
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout import EngineOptions, Request, RolloutError, SamplingParams, check_engine_model
from megarl.rollout.sglang import loader
from megarl.rollout.sglang.environment import SHIM, environment
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.placement import Placement
from megarl.rollout.sglang.replies import Replies, own_address
from megarl.rollout.sglang.server_args import check_server_args
from megarl.rollout.sglang.translation import BROKEN, Reading, completion_of, payload_of
from megarl.rollout.sglang.whole_tensors import Assembler


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_vocabulary_is_placed_as_sglang_divides_it(make_folder, tp):
    placement = Placement(read_model_config(make_folder()), tp)
    whole = torch.arange(50.0)[:, None].repeat(1, 32)
    height = -(-50 // tp)
    held = [torch.full((64 // tp, 32), -1.0) for _ in range(tp)]
    for rank in range(tp):
        shard = whole[rank * height : (rank + 1) * height]
        for part in placement.place(rank, "lm_head.weight", (0, 0), shard):
            box = held[part.rank][part.start[0] : part.start[0] + len(part.values)]
            assert (box == -1).all()
            box.copy_(part.values)
        back = [held[r][first : first + rows] for r, _, first, rows in placement.held(rank, "lm_head.weight")]
        assert rank < tp - 1 or torch.equal(torch.cat(back), shard)
    # SGLang: 64 rows in equal parts, of which the first 50 are the model's.
    together = torch.cat(held)
    assert torch.equal(together[:50], whole) and (together[50:] == -1).all()
    live = [placement.targets(rank)["lm_head.weight"].live[0] for rank in range(tp)]
    assert live == [max(0, min(50 - rank * 64 // tp, 64 // tp)) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_make_whole_tensors(make_folder, tp):
    """Four ranks share two key-value heads: what two ranks hold is taken once."""
    folder = make_folder()
    reader = HFReader(folder)
    shards = [{p.name: p for p in WeightMap(reader.config).rollout_params(tp, rank)} for rank in range(tp)]
    assembler, made = Assembler(shards), {}
    for rank, shard in enumerate(shards):
        for name, tensor in load_local(reader, shard.values(), torch.float32):
            for start in range(0, len(tensor), 5):
                at = (start, *[0] * (tensor.dim() - 1))
                for hf_name, whole in assembler.put(rank, name, at, tensor[start : start + 5]):
                    assert hf_name not in made
                    made[hf_name] = whole
    expected = load_file(folder / "model.safetensors")
    assert set(made) == set(expected) and all(torch.equal(made[name], expected[name]) for name in made)


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


def test_projections_into_latents_lie_one_under_the_other():
    """As in SGLang: ``fused_qkv_a_proj_with_mqa`` is ``q_a_proj`` over ``kv_a_proj_with_mqa``, on every rank."""
    placement = Placement(parse_model_config(LATENT), 2)
    query, key_value = torch.arange(48.0).view(6, 8), -torch.arange(48.0).view(6, 8)
    for layer in (0, 1):
        block = f"model.layers.{layer}.self_attn."
        fused = block + "fused_qkv_a_proj_with_mqa.weight"
        for rank in (0, 1):
            targets = placement.targets(rank)
            assert targets[fused] == ((12, 8), (12, 8))
            assert not {block + "q_a_proj.weight", block + "kv_a_proj_with_mqa.weight"} & set(targets)
            held = torch.zeros(12, 8)
            for name, whole in (("q_a_proj.weight", query), ("kv_a_proj_with_mqa.weight", key_value)):
                for start in (0, 4):
                    (part,) = placement.place(rank, block + name, (start, 2), whole[start : start + 4, 2:])
                    assert (part.rank, part.name) == (rank, fused)
                    held[part.start[0] : part.start[0] + len(part.values), part.start[1] :] = part.values
                (place,) = placement.held(rank, block + name)
                assert (place.rank, place.name) == (rank, fused)
                assert torch.equal(held[place.first : place.first + place.rows, 2:], whole[:, 2:])
            assert torch.equal(held[:, 2:], torch.cat([query, key_value])[:, 2:])


def test_without_a_latent_of_queries_nothing_is_fused():
    targets = Placement(parse_model_config(LATENT | {"q_lora_rank": None}), 1).targets(0)
    attention = {
        name.removeprefix("model.layers.1.self_attn."): t.shape for name, t in targets.items() if "1.self" in name
    }
    assert attention["q_proj.weight"] == (8, 8) and attention["kv_a_proj_with_mqa.weight"] == (6, 8)
    assert not any("fused" in name for name in targets)


def test_a_size_that_does_not_divide_is_named(make_folder):
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=3"):
        Placement(read_model_config(make_folder()), 3)
    options = EngineOptions(device="cuda", tensor_parallel_size=4)
    with pytest.raises(ModelError, match=r"num_attention_heads to be a multiple of 4.*DeepseekV3ForCausalLM has 2"):
        check_engine_model("sglang", parse_model_config(LATENT), options)
    check_engine_model("sglang", parse_model_config(LATENT | {"num_attention_heads": 4}), options)


@pytest.mark.parametrize(
    "args", [{"ep_size": 2}, {"quantization": "fp8"}, {"moe_a2a_backend": "deepep"}, {"enable_dp_attention": True}]
)
def test_arguments_that_change_what_ranks_hold_are_refused_by_name(args):
    (name,) = args
    with pytest.raises(ConfigError, match=f"server_args.{name}=.*hold other parameters"):
        check_server_args(args)


def test_sizes_that_sglang_would_pad_on_a_cpu_are_refused_before_it_starts(make_folder):
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
"""Shapes, and the parts of them that weights fill."""


class TestLoader:
    """Runs the code of SGLang's ranks on a module of plain torch; answers come over a real connection."""

    @pytest.fixture
    def ask(self):
        replies, tickets = Replies(), iter(range(100))
        model = torch.nn.ParameterDict({"a": torch.full((4, 2), 9.0), "b": torch.full((3,), 9.0)})

        def ask(action, data=None, **fields):
            ticket = next(tickets)
            order = {"action": action, "ticket": ticket, "rank": 0, "to": replies.to, **fields}
            loader.load(model, [(json.dumps(order), torch.empty(0) if data is None else data)])
            return replies.collect(ticket, {0}, 10.0)[0]

        ask.model = model
        yield ask
        replies.close()

    def write(self, ask, *slabs):
        data = torch.cat([torch.full(shape, value).flatten() for _, _, shape, value in slabs]).view(torch.uint8)
        offset, described = 0, []
        for name, start, shape, _ in slabs:
            described.append((name, start, shape, "float32", offset))
            offset += 4 * torch.Size(shape).numel()
        return ask("write", data, slabs=described)

    def test_writes_what_was_announced_and_zeroes_the_padding(self, ask):
        ask("begin", params=PARAMS, version=3)
        self.write(ask, ("a", (0, 0), (3, 1), 1.0), ("b", (0,), (3,), 2.0))
        self.write(ask, ("a", (0, 1), (3, 1), 5.0))
        ask("end", version=3)
        assert ask.model["a"].tolist() == [[1, 5], [1, 5], [1, 5], [0, 0]]
        assert ask.model["b"].tolist() == [2, 2, 2]
        digests = ask("checksum", rows={"of a": ["a", 1, 2], "b": ["b", 0, 3]}).facts
        assert digests["of a"] == tensor_checksum(ask.model["a"].data[1:3])
        assert digests["b"] == tensor_checksum(ask.model["b"].data)
        reply = ask("read", name="a", first=1, rows=1)
        assert (reply.facts, struct.unpack("2f", reply.data)) == ({"dtype": "float32", "shape": [1, 2]}, (1.0, 5.0))

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (("c", (0,), (1,), 1.0), "'c' is not a parameter that this update writes"),
            (("b", (2,), (2,), 1.0), "does not fit"),
            (("a", (0, 0), (1, 1), 1.0), "overlaps"),
            (("a", (3, 0), (1, 1), 1.0), "does not fit"),
        ],
    )
    def test_nothing_of_a_bucket_with_a_bad_slab_is_written(self, ask, bad, says):
        ask("begin", params=PARAMS, version=3)
        self.write(ask, ("a", (0, 0), (1, 2), 1.0))
        with pytest.raises(WeightSyncError, match=rf"SGLang's rank 0: .*{says}"):
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
        ("params", "says"),
        [
            ({**PARAMS, "c": ((1,), (1,))}, "no parameter 'c'"),
            ({"a": PARAMS["a"]}, "'b' that no weights are sent for"),
            ({**PARAMS, "b": ((4,), (4,))}, r"'b' with shape \[3\], expected \[4\]"),
        ],
    )
    def test_another_model_is_refused_before_anything_is_written(self, ask, params, says):
        with pytest.raises(WeightSyncError, match=says):
            ask("begin", params=params, version=1)
        assert ask.model["a"].tolist() == [[9, 9]] * 4

    def test_a_rank_that_does_not_answer_is_missed(self):
        replies = Replies()
        with pytest.raises(WeightSyncError, match=r"ranks \[0, 1\] did not answer"):
            replies.collect(0, {0, 1}, 0.0)
        replies.close()


def test_ranks_on_another_host_are_told_the_address_that_leads_there(monkeypatch):
    assert own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("MEGARL_HOST_ADDRESS", "10.1.2.3")
    assert own_address("127.0.0.1") == "10.1.2.3"


def answer(pairs, kind="length", **meta):
    meta = {"output_token_logprobs": [(p, t, None) for t, p in pairs], "finish_reason": {"type": kind}, **meta}
    return {"output_ids": [t for t, _ in pairs], "meta_info": meta}


REQUEST = Request("r", [1, 2], SamplingParams(3), 5)
READING = Reading(frozenset({7}), 4)


def test_an_answer_of_several_versions_is_marked():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    done = completion_of(REQUEST, answer([(5, -1.0), (6, -2.0), (8, -0.5)], weight_versions=spans), READING)
    assert (done.token_ids, done.log_probs) == ([5, 6, 8], [-1.0, -2.0, -0.5])
    assert (done.weight_version, done.weight_versions, done.finish_reason) == (3, (3, 3, 4), "length")
    plain = completion_of(REQUEST, answer([(5, -1.0)] * 3, weight_version="2"), READING)
    assert (plain.weight_version, plain.weight_versions) == (2, ())


def test_a_stop_token_as_the_last_allowed_one_counts_as_stop():
    assert completion_of(REQUEST, answer([(5, -1.0), (6, -1.0), (7, -1.0)]), READING).finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (answer([(5, float("nan"))] * 3), "not finite"),
        (answer([(5, -1.0)], "stop", finish_reason={"type": "stop", "matched": BROKEN}), "not finite"),
        (answer([(5, -1.0)] * 2), "ended it after 2 of max_new_tokens=3"),
        ({**answer([(5, -1.0)] * 3), "output_ids": [5, 5]}, "2 tokens and log-probs of 3"),
        (answer([(5, -1.0)], "error"), "finish_reason 'error'"),
    ],
)
def test_an_answer_that_cannot_be_true_is_an_error(given, says):
    with pytest.raises(RolloutError, match=says):
        completion_of(REQUEST, given, READING)


def test_seeds_are_sent_where_sglang_knows_them():
    seeded = payload_of(REQUEST, "x-1", frozenset({7}), 50)["sampling_params"]
    assert (seeded["sampling_seed"], seeded["top_k"], seeded["stop_token_ids"]) == (5, 50, [7])
    assert "sampling_seed" not in payload_of(REQUEST, "x-1", frozenset({7}), 0)["sampling_params"]


def test_environment_of_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "0,2,4|1,3"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6})
    assert environment(SGLangOptions(tensor_parallel_size=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "6|6"
    assert set(environment(SGLangOptions(device="cuda:1"))) == {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}


def murmur3(data):
    """MurmurHash3, 32 bits, seed 0, of whole words: written from its definition."""
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


def test_the_stand_in_for_sglangs_seeding_kernel():
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
