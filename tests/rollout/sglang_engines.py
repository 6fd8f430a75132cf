"""Engines of the real SGLang, shared by tests, since each takes 10 to 30 seconds to start."""

import json
from pathlib import Path

from support.release import RELEASE

from megarl.rollout import create_engine
from megarl.rollout.sglang.options import SGLangOptions

IN_PROCESS, OVER_HTTP, TWO_RANKS = "sglang", "sglang-http", "sglang-two-ranks"
API_KEY = "key-of-the-tests"
NEED_SGLANG = [
    f"test_rollout_sglang_{name}.py" for name in ("two_ranks", "experts", "families", "teacher", "tower", "vision")
]
_OPTIONS = {
    IN_PROCESS: {},
    OVER_HTTP: {"mode": "http", "api_key": API_KEY},
    TWO_RANKS: {"mode": "http", "tensor_parallel_size": 2, "api_key": API_KEY},
}

# Cases that an engine skips: each would start SGLang for something that another case covers.
_STOP_STRINGS = "test_a_stop_string_ends_generation_after_the_completing_token"
_MIN_P = "test_min_p_samples_only_likely_tokens"
"""Needs SGLang without its deterministic mode, which these engines run in."""
_SKIPPED = {
    IN_PROCESS: {"test_a_waiting_request_can_be_aborted", "test_the_models_eos_ends_the_response", _MIN_P},
    OVER_HTTP: {"test_a_waiting_request_can_be_aborted", _STOP_STRINGS, _MIN_P},
    TWO_RANKS: {
        _MIN_P,
        "test_a_waiting_request_can_be_aborted",
        _STOP_STRINGS,
        "test_tokens_follow_the_models_distribution",
        "test_top_k_and_top_p_sample_only_likely_tokens",
    },
}
# Cases that would start an engine once more, and a slow one that the engine in process has, too.
_NOT_IN_CI = {
    IN_PROCESS: {"test_a_new_engine_is_stale", "test_shutdown_is_final", _STOP_STRINGS},
    TWO_RANKS: {
        "test_a_stop_string_ends_a_response_that_ignores_stop_tokens",
        "test_an_aborted_request_returns_its_tokens_and_others_continue",
    },
}
_ONE_RANK = "test_rollout_contract_weights"
"""Cases that update one rank; test_rollout_sglang_two_ranks.py has those for several."""
_FAMILIES = {"family": "qwen2", "tied": False}


def engine_of(item):
    """Name of a collected test's engine; None without this parameter."""
    values = getattr(item, "callspec", None) and item.callspec.params
    return values and values.get("engine_name")


def is_for_engine(item):
    """Whether a collected test runs; one model family is enough for SGLang."""
    engine = engine_of(item)
    if engine not in _SKIPPED:
        return True
    if any(item.callspec.params.get(name, value) != value for name, value in _FAMILIES.items()):
        return False
    if engine == TWO_RANKS and item.module.__name__.rpartition(".")[2] == _ONE_RANK:
        return False
    return item.originalname not in _SKIPPED[engine]


def is_for_ci(item):
    """Whether a test of SGLang runs in CI, marked ``sglang``; before a release all do."""
    engine = engine_of(item)
    if RELEASE:
        return engine in _SKIPPED or item.path.name in NEED_SGLANG
    if engine is None:
        return "server" in item.fixturenames
    return engine in (IN_PROCESS, TWO_RANKS) and item.originalname not in _NOT_IN_CI[engine]


def kind_of(folder):
    """Properties that a running SGLang cannot change: the model's sizes and its tokenizer."""
    sizes = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    sizes.pop("eos_token_id")
    return json.dumps(sizes, sort_keys=True), (Path(folder) / "tokenizer_config.json").is_file()


class SGLangEngines:
    """At most one engine in this process and one server of each size, restarted for other models."""

    def __init__(self):
        self._kinds, self._running, self._attached = {}, {}, {}

    def running(self, name, folder):
        """The engine that started SGLang for models of the folder's kind; starts it if needed."""
        if self._kinds.get(name) != kind_of(folder) or self._running[name]._closed:
            self._start(name, folder)
        return self._running[name]

    def get(self, name, folder):
        """An engine for models of the folder's kind."""
        running = self.running(name, folder)
        if name == IN_PROCESS:
            return running
        # A server serves any number of engine objects; each has the end tokens of its folder.
        if (name, folder) not in self._attached or self._attached[name, folder]._closed:
            self._attached[name, folder] = self.new(name, folder)
        return self._attached[name, folder]

    def new(self, name, folder):
        """An unused engine; over HTTP one with the URL of a running server."""
        if name == IN_PROCESS:
            self._start(name, folder)
            return self._running[name]
        options = SGLangOptions(**{**_OPTIONS[name], "url": self.running(name, folder).url})
        return create_engine("sglang", str(folder), options)

    def make_room(self):
        """End the engine in this process."""
        if IN_PROCESS in self._running:
            self._running[IN_PROCESS].shutdown()

    def shutdown(self):
        """Ends all."""
        for engine in [*self._attached.values(), *self._running.values()]:
            engine.shutdown()

    def _start(self, name, folder):
        if name in self._running:
            self._running.pop(name).shutdown()
        for key in [key for key in self._attached if key[0] == name]:
            self._attached.pop(key).shutdown()
        self._running[name] = create_engine("sglang", str(folder), SGLangOptions(max_num_seqs=128, **_OPTIONS[name]))
        self._kinds[name] = kind_of(folder)
