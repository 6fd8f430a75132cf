"""Contract of weight updates: every element exactly once, or the engine stays stale."""

import pytest
import torch
from safetensors.torch import load_file

from megarl.base.errors import ModelError, WeightSyncError
from megarl.models.checksum import tensor_checksum
from megarl.rollout import (
    NO_VERSION,
    Request,
    RolloutError,
    SamplingParams,
)

REQUESTS = [Request(f"r{i}", [3, 1, 4, 1, 5][: i + 1], SamplingParams(6, ignore_eos=True), i) for i in range(4)]


def rollout_tensors(folder):
    """The engine's parameters, fused by hand from the Hugging Face tensors."""
    source = load_file(folder / "model.safetensors")
    fused = {}
    for name, tensor in source.items():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            if f".{parts[0]}." in name:
                pieces = [source[name.replace(parts[0], part)] for part in parts]
                fused[name.replace(parts[0], whole)] = torch.cat(pieces)
                break
            if any(f".{part}." in name for part in parts):
                break
        else:
            fused[name] = tensor
    return fused


def row_slices(tensors, rows):
    for name, tensor in tensors.items():
        for start in range(0, len(tensor), rows):
            yield name, (start, *[0] * (tensor.dim() - 1)), tensor[start : start + rows]


@pytest.fixture
def folders(make_folder):
    return make_folder(seed=0), make_folder(seed=1)


@pytest.fixture
def engine(engine_for, folders):
    return engine_for(folders[0], max_num_seqs=16)


def test_a_new_engine_is_stale(new_engine, folders):
    fresh = new_engine(folders[0])
    assert (fresh.stale, fresh.weight_version, fresh.health().ready) == (True, NO_VERSION, False)
    with pytest.raises(WeightSyncError, match="absent or incomplete"):
        fresh.generate(REQUESTS)


def test_update_in_buckets_of_slices(engine, folders, reference_for):
    old = engine.generate(REQUESTS)
    tensors = rollout_tensors(folders[1])
    slices = list(row_slices(tensors, rows=7))
    engine.begin_update(5)
    assert engine.stale
    for start in range(0, len(slices), 10):
        engine.update_weights(slices[start : start + 10])
    engine.end_update(5)
    assert (engine.stale, engine.weight_version) == (False, 5)
    new = engine.generate(REQUESTS)
    assert {c.weight_version for c in new} == {5}
    assert [c.token_ids for c in new] != [c.token_ids for c in old]
    for request, completion in zip(REQUESTS, new, strict=True):
        expected = reference_for(folders[1]).log_probs(request.prompt_ids, completion.token_ids)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)
    assert engine.checksum() == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_whole_parameters_need_no_offset(engine, folders):
    tensors = rollout_tensors(folders[1])
    engine.begin_update(2)
    engine.update_weights(tensors.items())
    engine.end_update(2)
    assert engine.checksum() == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_the_memory_of_a_slice_may_be_reused(engine, folders):
    tensors = rollout_tensors(folders[1])
    largest = max(t.numel() for t in tensors.values())
    buffer = torch.empty(largest)

    def through_one_buffer():
        for name, tensor in tensors.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, (0,) * tensor.dim(), view

    engine.begin_update(2)
    engine.update_weights(through_one_buffer())
    buffer.fill_(torch.nan)
    engine.end_update(2)
    assert engine.checksum() == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


BAD_SLICES = {
    "unknown name": (("model.layers.9.nothing", (0,), torch.zeros(1)), "'model.layers.9.nothing' is not a parameter"),
    "beyond the end": (("model.norm.weight", (31,), torch.zeros(2)), r"\[2\] at \[31\] does not fit shape \[32\]"),
    "before the start": (("model.norm.weight", (-1,), torch.zeros(2)), "does not fit"),
    "wrong rank": (("model.norm.weight", (0, 0), torch.zeros(2, 2)), "does not fit"),
    "no offset": (("model.norm.weight", torch.zeros(31)), r"shape \[31\], expected \[32\]"),
    "twice": (("model.norm.weight", (4,), torch.zeros(8)), "overlaps"),
}


@pytest.mark.parametrize("case", BAD_SLICES)
def test_a_bad_slice_is_refused_and_the_engine_stays_stale(engine, folders, case):
    tensor_slice, message = BAD_SLICES[case]
    tensors = rollout_tensors(folders[0])
    engine.begin_update(1)
    engine.update_weights([("model.norm.weight", (8,), tensors["model.norm.weight"][8:])])
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights([tensor_slice])
    with pytest.raises(WeightSyncError, match="no weight update is open"):
        engine.end_update(1)
    with pytest.raises(WeightSyncError):
        engine.generate(REQUESTS)
    assert engine.stale
    # A complete update makes the engine ready again.
    engine.begin_update(2)
    engine.update_weights(tensors.items())
    engine.end_update(2)
    assert engine.generate(REQUESTS)[0].weight_version == 2


def test_one_missing_row_leaves_the_engine_stale(engine, folders):
    slices = list(row_slices(rollout_tensors(folders[0]), rows=16))
    engine.begin_update(3)
    engine.update_weights(slices[:-1])
    with pytest.raises(WeightSyncError, match=rf"incomplete: 1 of \d+ parameters, first '{slices[-1][0]}' with"):
        engine.end_update(3)
    assert (engine.stale, engine.weight_version, engine.health().ready) == (True, NO_VERSION, False)


def test_updates_begin_and_end_in_order(engine, folders):
    with pytest.raises(WeightSyncError, match="no weight update is open"):
        engine.update_weights(rollout_tensors(folders[0]).items())
    with pytest.raises(WeightSyncError, match="no weight update is open"):
        engine.end_update(1)
    with pytest.raises(WeightSyncError, match="version -2"):
        engine.begin_update(-2)
    assert not engine.stale
    engine.begin_update(1)
    engine.update_weights(rollout_tensors(folders[0]).items())
    with pytest.raises(WeightSyncError, match="version 1 was ended as version 2"):
        engine.end_update(2)
    assert engine.stale


def test_slices_of_an_unfinished_update_do_not_count(engine, folders):
    slices = list(row_slices(rollout_tensors(folders[0]), rows=16))
    engine.begin_update(1)
    engine.update_weights(slices[:20])
    engine.begin_update(2)
    engine.update_weights(slices[20:])
    with pytest.raises(WeightSyncError, match="incomplete"):
        engine.end_update(2)


def test_a_folder_of_another_model_is_refused(engine, make_folder):
    with pytest.raises(ModelError, match="another model"):
        engine.load_hf(str(make_folder(tied=True)))
    assert not engine.stale


def test_sleep_and_wake_of_the_kv_cache(engine):
    before = engine.generate(REQUESTS)
    engine.sleep(["kv_cache"])
    assert engine.health().asleep == ("kv_cache",)
    with pytest.raises(RolloutError, match="'kv_cache' is asleep"):
        engine.generate(REQUESTS)
    engine.wake(["kv_cache"])
    assert engine.health().ready
    after = engine.generate(REQUESTS)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    for one, other in zip(after, before, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_sleeping_weights_come_back_empty(engine, folders):
    engine.generate(REQUESTS)
    engine.sleep(["weights"])
    with pytest.raises(WeightSyncError, match="wake 'weights'"):
        engine.begin_update(1)
    engine.wake(["weights"])
    assert engine.stale
    with pytest.raises(WeightSyncError, match="absent"):
        engine.generate(REQUESTS)
    engine.begin_update(1)
    engine.update_weights(rollout_tensors(folders[1]).items())
    engine.end_update(1)
    assert engine.health().ready
    assert engine.generate(REQUESTS)[0].weight_version == 1


def test_a_fingerprint_depends_on_the_weights_only(engine, folders):
    first = engine.fingerprint()
    assert len(first) == 1
    engine.generate(REQUESTS)
    assert engine.fingerprint() == first
    engine.load_hf(str(folders[1]))
    assert engine.fingerprint() != first
    engine.load_hf(str(folders[0]), version=7)
    assert engine.fingerprint() == first


def test_an_unknown_sleep_tag_is_refused(engine):
    with pytest.raises(RolloutError, match="'weight' is unknown; known ones: weights, kv_cache"):
        engine.sleep(["weight"])


def test_shutdown_is_final(new_engine, folders):
    engine = new_engine(folders[0])
    engine.load_hf(str(folders[0]))
    assert engine.health().ready
    engine.shutdown()
    engine.shutdown()
    assert not engine.health().ready
    with pytest.raises(WeightSyncError):
        engine.generate(REQUESTS)
    with pytest.raises(RolloutError, match="shut down"):
        engine.wake()
