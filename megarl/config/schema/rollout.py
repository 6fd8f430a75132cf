"""The `actor_rollout_ref.rollout` section: sampling, engines, multi-turn agents and the chat endpoint."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import derived_key, key, section
from megarl.config.schema.model import DTYPES, LogProbBatchConfig, OwnDevicesConfig

QUANTIZATION_KEY = "actor_rollout_ref.rollout.quantization"
SUPPORT_KEY = "actor_rollout_ref.rollout.support"
SUPPORT_TIES = 8
"""Tokens beyond ``top_k`` that a support has room for: some of SGLang's kernels keep all tokens of equal rank."""
FP8 = "fp8"
"""Value of the key: blockwise FP8."""


@dataclass(frozen=True)
class SGLangConfig:
    """SGLang; see docs/how_to/rollout.md."""

    mode: str = key(
        "in_process",
        "Process of SGLang's front end: in_process = the replica's process; http = a server that the replica starts.",
        choices=("in_process", "http"),
    )
    urls: list[str] = key(
        [],
        "Running servers to use instead, one per replica, on any number of nodes; they keep running after the run.",
    )
    api_key_env: str | None = key(
        None,
        "Environment variable with the API key of `urls`, which must demand one (`--api-key`); a server that the "
        "replica starts gets a random key; null = none.",
    )
    host: str = key("127.0.0.1", "Listen address of a server that the replica starts, on a free port.")
    deterministic: bool | None = derived_key(
        "SGLang's deterministic mode, which seeds need; auto = on a CPU only, since it is slower."
    )
    stop_strings: bool | None = derived_key(
        "SGLang decodes every response, as stop strings need; auto = if the model folder has a tokenizer."
    )
    start_timeout_s: float = key(600.0, "Seconds that SGLang may take to start.", above=0)
    call_timeout_s: float = key(600.0, "Seconds that a call for weights or memory may take.", above=0)
    server_args: dict[str, Any] = key(
        {}, "Further SGLang server arguments by name, such as `mem_fraction_static`; checked against SGLang's."
    )


@dataclass(frozen=True)
class EngineKwargsConfig:
    """Settings of a single rollout engine."""

    sglang: SGLangConfig = section(SGLangConfig)


@dataclass(frozen=True)
class SearchConfig:
    """Search agent (Search-R1) and its retrieval server; see docs/how_to/agents.md."""

    enable: bool = key(False, "Use `search_agent`, which queries `url`, as default agent loop.")
    url: str | None = key(None, "Address of POST requests, such as http://127.0.0.1:8000/retrieve; null = none.")
    topk: int = key(3, "Documents per query.", at_least=1)
    max_turns: int = key(2, "Turns with search results; one more turn follows without a search.", at_least=0)
    max_obs_length: int = key(
        500, "Longest search result in a trajectory, in tokens; longer results are cut.", at_least=16
    )
    timeout_s: float = key(30.0, "Seconds that one request may take.", above=0)
    retries: int = key(3, "Retries of a failed request; then the trajectory fails.", at_least=0)


@dataclass(frozen=True)
class MultiTurnConfig:
    """Multi-turn trajectories with tools; see docs/how_to/agents.md."""

    enable: bool = key(False, "Use `tool_agent` for rows if neither the row nor `agent` names another agent loop.")
    max_assistant_turns: int | None = key(None, "Most turns of the policy; null = no limit.", at_least=1)
    max_user_turns: int | None = key(None, "Most turns of the tools; null = no limit.", at_least=1)
    max_parallel_calls: int = key(
        1, "Tool calls per turn that are executed; further calls get an error as result.", at_least=1
    )
    max_tool_response_length: int = key(256, "Longest tool result, in tokens; longer results are cut.", at_least=1)
    tool_response_truncate_side: str = key(
        "middle",
        "Part to keep of a longer result: left, right, or both ends (middle).",
        choices=("left", "middle", "right"),
    )
    tool_config_path: str | None = key(None, "YAML list of the tools; null = none.")
    format: str = key(
        "hermes",
        "Parser of tool calls: hermes (also Qwen), llama3_json, or a parser that a user module registers.",
    )
    search: SearchConfig = section(SearchConfig)


@dataclass(frozen=True)
class AgentConfig:
    """Agent loop of each row, and concurrency."""

    default_agent_loop: str | None = derived_key(
        "Agent loop of rows without `agent_name`: single_turn_agent, tool_agent, search_agent, external_agent, a name "
        "from `agent_loop_config_path`, or path.py:Class; auto = by `external_agent`, "
        "`multi_turn.search.enable` and `multi_turn.enable`.",
    )
    external_agent: str | None = key(
        None,
        "User function that leads trajectories through the run's chat endpoint, with any framework: path.py:function "
        "or package.module.function; null = none.",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML list of custom agent loops: `name`, `_target_` (path.py:Class) and options; null = none."
    )
    num_workers: int = key(1, "Agent runners: processes that lead the trajectories.", at_least=1)
    max_concurrency: int = key(4096, "Concurrent trajectories of all agent runners together.", at_least=1)
    timeout_s: float | None = key(
        None,
        "Seconds that one trajectory may take; a longer one fails, is masked and counted; null = no limit.",
        above=0,
    )


@dataclass(frozen=True)
class EndpointConfig:
    """OpenAI-compatible chat endpoint of the policy during training; see docs/how_to/agents.md."""

    enable: bool = key(False, "Serve the endpoint; `agent.external_agent` serves it in any case.")
    host: str = key(
        "127.0.0.1",
        "Listen address; beyond loopback, every client with the token has access, without encryption.",
    )
    port: int = key(0, "Port; 0 = any free one, see `access_file`.", at_least=0, at_most=65535)
    access_file: str | None = derived_key(
        "File with `base_url`, `api_key` and `model` for clients, readable by its owner only; "
        "auto = `outputs/<experiment_name>/endpoint.json`.",
    )
    wait_s: float = key(
        600.0,
        "Seconds that an external request waits for the run to generate; then the client gets a retry response.",
        above=0,
    )


@dataclass(frozen=True)
class TokenFilterConfig:
    """Restrictions of the sampled tokens, besides the temperature."""

    top_p: float = key(1.0, "Smallest probability mass to sample from.", above=0, at_most=1)
    top_k: int = key(-1, "Most likely tokens to sample from; -1 = all.", at_least=1, at_most=2**31 - 1, allowed=(-1,))
    min_p: float = key(
        0.0,
        "Sample from the tokens with at least this share of the most likely token's probability; 0 = all.",
        at_least=0,
        at_most=1,
    )
    repetition_penalty: float = key(
        1.0,
        "Divides positive logits, and multiplies negative ones, of tokens that the response contains already; 1 = no "
        "penalty. Training does not apply it (see docs/how_to/rollout.md).",
        above=0,
        at_most=2,
    )


@dataclass(frozen=True)
class ValSamplingConfig(TokenFilterConfig):
    """Sampling in validation."""

    temperature: float = key(0.0, "Sampling temperature; 0 = greedy.", at_least=0)
    n: int = key(1, "Responses per prompt.", at_least=1)


@dataclass(frozen=True)
class SupportConfig:
    """Log-probs over the sampled support; see docs/reference/rollout_correction.md."""

    enable: bool = key(
        False,
        "With `top_p`, `top_k` or `min_p`: the engine returns the tokens that it sampled each token from, and actor "
        "and reference normalize over them.",
    )
    max_tokens: int = key(
        64,
        "Most tokens to sample from, the most likely ones, in training; each response token stores as many ids of 4 "
        "bytes.",
        at_least=2 * SUPPORT_TIES,
        at_most=4096,
    )


@dataclass(frozen=True)
class HealthConfig:
    """Failure detection of rollout replicas: requests of a lost replica move to others, and a new one replaces it."""

    timeout_s: float = key(
        180.0,
        "Seconds after which a silent replica counts as lost: its process, or SGLang's scheduler while requests run. "
        "Below `trainer.watchdog.timeout_s`.",
        above=0,
    )
    join_timeout_s: float = key(
        600.0,
        "Seconds that a run with fewer than `min_replicas` replicas waits for others to join; then it saves and ends.",
        above=0,
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Engines, agents and the sampling of held-out prompts."""

    name: str = key("embedded", "Rollout engine.", choices=("embedded", "sglang"))
    tensor_model_parallel_size: int = key(1, "Devices per engine replica.", at_least=1)
    replicas: int | None = derived_key("Engine replicas; auto = as many as fit the trainer's devices.", at_least=1)
    max_num_seqs: int = key(256, "Sequences that one replica generates concurrently.", at_least=1)
    dtype: str = key("bfloat16", "Number format of the engine's weights.", choices=DTYPES)
    seed: int | None = derived_key("Seed of sampling; auto = `trainer.seed`.", at_least=0)
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    endpoint: EndpointConfig = section(EndpointConfig)
    health: HealthConfig = section(HealthConfig)
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig)

    @property
    def server_urls(self) -> list[str]:
        """Addresses of running servers, one per replica; empty if replicas start their engines."""
        return self.engine_kwargs.sglang.urls if self.name == "sglang" else []

    @property
    def devices_per_replica(self) -> int:
        """Devices of the run per replica: 1 for the client of a running server, which has other devices."""
        return 1 if self.server_urls else self.tensor_model_parallel_size

    @property
    def own_devices(self) -> int:
        """Devices of the engines alone; 0 = the engines run on the trainer's devices."""
        return 0

    @property
    def serves_endpoint(self) -> bool:
        """Whether the run serves the policy over OpenAI's chat interface."""
        return self.endpoint.enable or self.agent.external_agent is not None


@dataclass(frozen=True)
class TrainingRolloutConfig(OwnDevicesConfig, RolloutConfig, TokenFilterConfig):
    """Generation. The `log_prob_*` keys are those of the actor's pass for old log-probs."""

    nnodes: int = key(
        0,
        "Nodes with devices of the engines alone, for `async_training.mode: disaggregated`; 0 = the engines run on the "
        "trainer's devices.",
        at_least=0,
    )
    min_replicas: int | None = key(
        None,
        "Fewest engine replicas with which a disaggregated run starts and goes on (elastic replicas): others may join "
        "and leave at weight syncs, for example with their nodes. null = all; the run waits while a lost one is "
        "replaced. See docs/how_to/asynchronous.md.",
        at_least=1,
    )
    n: int = key(1, "Responses per prompt.", at_least=1)
    quantization: str | None = key(
        None,
        "Format of the engine's linear layers: fp8 = blockwise FP8, quantized at each weight sync; null = none. "
        "Training keeps its own format; see docs/internals/weights.md.",
        choices=(FP8,),
    )
    temperature: float = key(1.0, "Sampling temperature; training computes log-probs at the same one.", above=0)
    support: SupportConfig = section(SupportConfig)
    free_cache_engine: bool = key(
        True,
        "Engines release the memory of weights and KV cache to the trainer outside the generation phase; never with "
        "devices of their own (`nnodes`).",
    )
    calculate_log_probs: bool = key(
        False,
        "Compare the engine's log-probs with the actor's (`training/rollout_probs_diff_*`, `rollout_corr/*`), and "
        "write them next to the responses in `trainer.rollout_data_dir` as `<step>.npz`, for `megarl doctor logprobs`.",
    )
    log_prob_use_dynamic_bsz: bool | None = derived_key(
        "Cut micro-batches by tokens instead of samples; auto = the actor's `use_dynamic_bsz`, or if that is auto "
        "too, true unless `log_prob_micro_batch_size_per_gpu` is set.",
    )
    log_prob_max_token_len_per_gpu: int | None = derived_key(
        "Tokens per micro-batch and device; auto = the actor's `max_token_len_per_gpu`.", at_least=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = derived_key(
        "Samples per micro-batch and data-parallel rank; auto = the actor's `micro_batch_size_per_gpu`.",
        at_least=1,
    )

    @property
    def filters_tokens(self) -> bool:
        """Whether the engine samples from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def support_tokens(self) -> int:
        """Most tokens that a token is sampled from, which the engine returns; 0 = it returns none."""
        if not self.support.enable:
            return 0
        bound = self.support.max_tokens
        return min(bound, self.top_k + SUPPORT_TIES) if self.top_k > 0 else bound

    @property
    def log_prob_batch(self) -> LogProbBatchConfig:
        """The `log_prob_*` keys, as those of the other passes for log-probs."""
        return LogProbBatchConfig(
            self.log_prob_use_dynamic_bsz, self.log_prob_max_token_len_per_gpu, self.log_prob_micro_batch_size_per_gpu
        )

    @property
    def device_groups(self) -> list[int]:
        """See :class:`OwnDevicesConfig`; an elastic replica has a group of its own."""
        if self.min_replicas is None:
            return super().device_groups
        return [self.devices_per_replica] * (self.replicas or 1)

    @property
    def required_groups(self) -> int | None:
        """See :class:`OwnDevicesConfig`."""
        return self.min_replicas
