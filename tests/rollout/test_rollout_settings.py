import pytest
import torch

from megarl.base.errors import ConfigError
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import (
    EngineKwargsConfig,
    SGLangConfig,
    TrainingRolloutConfig,
)
from megarl.rollout import EngineOptions
from megarl.rollout.settings import FreeMemory, engine_options, shared_fraction
from megarl.rollout.sglang.options import SGLangOptions


def test_common_options_of_every_engine():
    rollout = RolloutConfig(dtype="float32", max_num_seqs=7)
    assert engine_options(rollout, "cuda:1") == EngineOptions(dtype="float32", device="cuda:1", max_num_seqs=7)


@pytest.mark.parametrize("name", ["embedded", "sglang"])
def test_engines_get_the_options_of_the_image_processor(name):
    options = engine_options(RolloutConfig(name=name), "cuda", image_options={"max_pixels": 50176})
    assert options.image_options == {"max_pixels": 50176}


def test_sglang_options_come_from_its_section():
    own = SGLangConfig(mode="http", server_args={"mem_fraction_static": 0.5})
    rollout = TrainingRolloutConfig(
        name="sglang", tensor_model_parallel_size=2, engine_kwargs=EngineKwargsConfig(own), dtype="bfloat16"
    )
    options = engine_options(rollout, "cpu")
    assert options == SGLangOptions(
        dtype="bfloat16",
        tensor_parallel_size=2,
        mode="http",
        server_args={"mem_fraction_static": 0.5},
    )
    assert rollout.devices_per_replica == 2 and options.device_of(1) == "cpu"
    assert isinstance(options, SGLangOptions) and options.seeded and not options.stop_strings


def test_each_replica_has_its_server_url_and_all_have_the_key(monkeypatch):
    monkeypatch.setenv("KEY_OF_SERVERS", "secret")
    own = SGLangConfig(urls=["http://a:1", "http://b:1"], api_key_env="KEY_OF_SERVERS")
    rollout = RolloutConfig(
        name="sglang", tensor_model_parallel_size=8, engine_kwargs=EngineKwargsConfig(sglang=own), dtype="bfloat16"
    )
    first, second = (engine_options(rollout, "cuda:3", replica) for replica in range(2))
    assert isinstance(first, SGLangOptions) and isinstance(second, SGLangOptions)
    assert (first.url, second.url) == ("http://a:1", "http://b:1")
    assert first.api_key == second.api_key == "secret" and "secret" not in repr(first)
    monkeypatch.delenv("KEY_OF_SERVERS")
    with pytest.raises(ConfigError) as caught:
        engine_options(rollout, "cuda:3")
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.engine_kwargs.sglang.api_key_env=KEY_OF_SERVERS: the environment variable is not "
        "set; it must hold the API key that the servers of urls demand [sglang.api-key-unset]"
    )
    # Its devices are not this host's.
    assert rollout.devices_per_replica == 1


GIB = 2**30
TOTAL = 80 * GIB
RESERVED = (512 + 1.5 * 8192 + 2 * 256 + 128) * 2**20
"""Memory that SGLang leaves free on such a GPU: 13.1 GiB, by its rule."""


def rollout(free_cache_engine=True, tp=1, **sglang):
    engines = EngineKwargsConfig(sglang=SGLangConfig(**sglang))
    return TrainingRolloutConfig(
        name="sglang", free_cache_engine=free_cache_engine, tensor_model_parallel_size=tp, engine_kwargs=engines
    )


@pytest.fixture
def gpus(monkeypatch):
    """Free GiB of GPUs of 80 GiB, by index."""
    free = {0: 60, 1: 60}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index or 0] * GIB, TOTAL))
    return free


def test_weights_and_cache_leave_room_for_the_first_update():
    """An actor of 2 billion parameters gets 16 GB of Adam's moments after SGLang has taken its memory."""
    moments = 8 * 2_000_000_000
    fraction = shared_fraction([FreeMemory(60 * GIB, TOTAL)], moments, keeps_memory=False)
    assert 60 * GIB * (1 - fraction) >= moments + RESERVED - 1e-3 * TOTAL
    assert fraction == pytest.approx(1 - (moments + RESERVED) / (60 * GIB), abs=2e-3)


def test_the_device_with_the_least_room_counts(gpus):
    gpus[1] = 30
    both = engine_options(rollout(tp=2), "cuda", pending_bytes=2 * GIB).server_args["mem_fraction_static"]
    assert both == pytest.approx(1 - (2 * GIB + RESERVED + 128 * 2**20) / (30 * GIB), abs=3e-3)


def test_an_engine_that_stays_during_updates_gets_half_at_most():
    alone = [FreeMemory(70 * GIB, TOTAL)]
    assert shared_fraction(alone, 0, keeps_memory=False) > 0.8
    assert shared_fraction(alone, 0, keeps_memory=True) == 0.5


def test_the_share_is_set_beside_training_roles_only(gpus, monkeypatch):
    monkeypatch.setenv("KEY_OF_SERVERS", "secret")
    beside = engine_options(rollout(server_args={"attention_backend": "fa3"}), "cuda", pending_bytes=2 * GIB)
    assert set(beside.server_args) == {"attention_backend", "mem_fraction_static"}
    assert engine_options(rollout(server_args={"mem_fraction_static": 0.7}), "cuda", pending_bytes=0).server_args == {
        "mem_fraction_static": 0.7
    }
    assert engine_options(rollout(), "cuda").server_args == {}
    assert engine_options(rollout(), "cpu", pending_bytes=0).server_args == {}
    assert (
        engine_options(rollout(urls=["http://a:1"], api_key_env="KEY_OF_SERVERS"), "cuda", pending_bytes=0).server_args
        == {}
    )


def test_a_full_gpu_is_refused_before_sglang_starts(gpus):
    gpus[0] = 20
    with pytest.raises(ConfigError) as caught:
        engine_options(rollout(), "cuda", pending_bytes=9 * GIB)
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.engine_kwargs.sglang.server_args.mem_fraction_static is not set, and no memory is "
        "left for SGLang: 20.0 of 80.0 GiB are free next to the training roles, which will need 9.0 GiB more. Set "
        "param_offload=true and optimizer_offload=true of the roles, or use more devices [sglang.no-memory]"
    )
