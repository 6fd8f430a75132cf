"""Contract of weight updates: every element exactly once, or the engine stays stale."""

import pytest
import torch
from safetensors.torch import load_file
from support.expected_errors import raises
from weight_syncs import WeightSync, update

from megarl.base.errors import WeightSyncError
from megarl.models.verification import tensor_checksum
from megarl.rollout import (
    NO_VERSION,
    Request,
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


@pytest.fixture
def folders(make_folder):
    return make_folder(seed=0), make_folder(seed=1)


@pytest.fixture
def engine(engine_for, folders):
    return engine_for(folders[0], max_num_seqs=16)


def test_a_new_engine_is_stale(new_engine, folders):
    fresh = new_engine(folders[0])
    with raises("sync.no-receivers", "connect"):
        fresh.receiver.begin(1)
    assert (fresh.stale, fresh.weight_version) == (True, NO_VERSION)
    with raises("engine.stale-weights", error=WeightSyncError):
        fresh.generate(REQUESTS)


@pytest.mark.parametrize("transport", ["auto", "inline"])
def test_a_sync_in_buckets_brings_the_folders_weights(engine, folders, reference_for, transport):
    old = engine.generate(REQUESTS)
    sync = WeightSync(engine, folders[1], transport)
    assert len(sync.plan.buckets) > 5
    sync.begin(5)
    assert engine.stale
    sync.send()
    usage = sync.close()
    assert engine.stale
    engine.receiver.end(5)
    assert (engine.stale, engine.weight_version) == (False, 5)
    new = engine.generate(REQUESTS)
    assert {c.weight_version for c in new} == {5}
    assert [c.token_ids for c in new] != [c.token_ids for c in old]
    for request, completion in zip(REQUESTS, new, strict=True):
        expected = reference_for(folders[1]).log_probs(request.prompt_ids, completion.token_ids)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)
    expected = {name: tensor_checksum(tensor) for name, tensor in rollout_tensors(folders[1]).items()}
    assert engine.checksum() == expected
    # Shared memory is read in place; messages inside commands are held by the receiver.
    largest = max(sync.plan.buckets)
    assert usage[0].peak_bytes == (0 if transport == "auto" else largest)


def test_a_missing_bucket_leaves_the_engine_stale_until_a_whole_sync(engine, folders):
    sync = WeightSync(engine, folders[0])
    count = len(sync.plan.buckets)
    sync.begin(3)
    sync.send(range(count - 1))
    with raises("sync.incomplete", f"{count - 1} of {count}", "version 3"):
        engine.receiver.end(3)
    sync.sender.close(completed=False)
    assert (engine.stale, engine.weight_version) == (True, NO_VERSION)
    with raises("engine.stale-weights"):
        engine.generate(REQUESTS)
    # Buckets of the unfinished update do not count.
    sync.begin(4)
    with raises("sync.bucket-order", f"bucket {count - 1}, expected 0"):
        sync.send([count - 1])
    sync.begin(5)
    sync.send()
    sync.close()
    engine.receiver.end(5)
    assert engine.generate(REQUESTS)[0].weight_version == 5


def test_updates_begin_and_end_in_order(engine, folders):
    sync = WeightSync(engine, folders[0])
    with raises("sync.no-open-update", "begin(version)"):
        sync.send([0])
    engine.load_hf(str(folders[0]))
    with raises("sync.negative-version", -2):
        sync.begin(-2)
    assert not engine.stale
    sync.begin(1)
    sync.send()
    with raises("sync.version-mismatch", "version 1", "version 2"):
        engine.receiver.end(2)
    assert engine.stale


def test_a_message_to_another_replica_is_refused(engine, folders):
    sync = WeightSync(engine, folders[0])
    sync.begin(1)
    (message,) = sync.sender.export_bucket(0).values()
    with raises("sync.wrong-rank", "ranks [0]", "rank 7"):
        engine.receiver.import_bucket(0, [message._replace(dst_rank=7)])
    sync.close(completed=False)


def test_a_folder_of_another_model_is_refused(engine, make_folder):
    with raises("engine.other-model", make_folder(tied=True)):
        engine.load_hf(str(make_folder(tied=True)))
    assert not engine.stale


def test_sleep_and_wake_of_the_kv_cache(engine):
    before = engine.generate(REQUESTS)
    engine.sleep(["kv_cache"])
    assert engine.asleep == {"kv_cache"}
    with raises("engine.asleep", "'kv_cache'"):
        engine.generate(REQUESTS)
    engine.wake(["kv_cache"])
    assert not engine.asleep
    after = engine.generate(REQUESTS)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    for one, other in zip(after, before, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_sleeping_weights_come_back_empty(engine, folders):
    engine.generate(REQUESTS)
    engine.sleep(["weights"])
    sync = WeightSync(engine, folders[1])
    with raises("engine.asleep", "'weights'", error=WeightSyncError):
        sync.begin(1)
    engine.wake(["weights"])
    assert engine.stale
    with raises("engine.stale-weights"):
        engine.generate(REQUESTS)
    update(engine, folders[1], 1)
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
    with raises("engine.unknown-sleep-tag", "'weight'", "weights, kv_cache"):
        engine.sleep(["weight"])


def test_shutdown_is_final(new_engine, folders):
    engine = new_engine(folders[0])
    engine.load_hf(str(folders[0]))
    engine.shutdown()
    engine.shutdown()
    with raises("engine.stale-weights"):
        engine.generate(REQUESTS)
    with raises("engine.shut-down"):
        engine.wake()
