import pytest

from megarl.base.errors import ConfigError
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import (
    EngineKwargsConfig,
    SGLangConfig,
    TrainingRolloutConfig,
)
from megarl.rollout import EngineOptions
from megarl.rollout.settings import engine_options
from megarl.rollout.sglang.options import SGLangOptions


def test_common_options_of_every_engine():
    rollout = RolloutConfig(dtype="float32", max_num_seqs=7)
    assert engine_options(rollout, "cuda:1") == EngineOptions(dtype="float32", device="cuda:1", max_num_seqs=7)


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
