"""Engines of the real SGLang, shared by tests since each takes 10 to 30 seconds to start."""

import json
from pathlib import Path

from megarl.rollout import create_engine
from megarl.rollout.sglang.options import SGLangOptions

IN_PROCESS, OVER_HTTP, TWO_RANKS = "sglang", "sglang-http", "sglang-two-ranks"
_OPTIONS = {
    IN_PROCESS: {},
    OVER_HTTP: {"mode": "http"},
    TWO_RANKS: {"mode": "http", "tensor_parallel_size": 2},
}

# What an engine is left out of: a start each, for what another case shows.
_STOP_STRINGS = "test_generation_ends_with_the_token_that_completes_a_stop_string"
_LEFT_OUT = {
    IN_PROCESS: {"test_a_waiting_request_can_be_aborted", "test_the_models_own_eos_ends_the_answer"},
    OVER_HTTP: {"test_a_waiting_request_can_be_aborted", _STOP_STRINGS},
    TWO_RANKS: {
        "test_a_waiting_request_can_be_aborted",
        _STOP_STRINGS,
        "test_tokens_follow_the_models_distribution",
        "test_top_k_and_top_p_keep_to_the_likely_tokens",
    },
}
# Of the engine in this process, what would start it once more; and a server of one rank altogether.
_NOT_IN_CI = {"test_a_new_engine_serves_nothing", "test_shutdown_is_final", _STOP_STRINGS}
_ONE_RANK = "test_rollout_contract_weights"
"""Cases that give weights to one rank; test_rollout_sglang_two_ranks.py has those of several."""
_FAMILIES = {"family": "qwen2", "tied": False}


def engine_of(item):
    """Name of the engine that a collected test is about; None where it has no such parameter."""
    values = getattr(item, "callspec", None) and item.callspec.params
    return values and values.get("engine_name")


def is_for_engine(item):
    """Whether a collected test is to run: SGLang's models are SGLang's to test, one family stands for all."""
    engine = engine_of(item)
    if engine not in _LEFT_OUT:
        return True
    if any(item.callspec.params.get(name, value) != value for name, value in _FAMILIES.items()):
        return False
    if engine == TWO_RANKS and item.module.__name__ == _ONE_RANK:
        return False
    return item.originalname not in _LEFT_OUT[engine]


def is_for_ci(item):
    """Whether a test of SGLang is among those that CI has the time for, which are marked ``sglang``."""
    engine = engine_of(item)
    if engine is None:
        return "server" in item.fixturenames
    return engine == TWO_RANKS or (engine == IN_PROCESS and item.originalname not in _NOT_IN_CI)


def kind_of(folder):
    """What a running SGLang cannot change: the model's sizes, and whether there is a tokenizer."""
    sizes = json.loads((Path(folder) / "config.json").read_text())
    sizes.pop("eos_token_id")
    return json.dumps(sizes, sort_keys=True), (Path(folder) / "tokenizer_config.json").is_file()


class SGLangEngines:
    """At most one engine in this process and one server of each size; started anew for another kind of model."""

    def __init__(self):
        self._kinds, self._running, self._attached = {}, {}, {}

    def running(self, name, folder):
        """The engine for models of the folder's kind that started SGLang; does so if need be."""
        if self._kinds.get(name) != kind_of(folder) or self._running[name].closed:
            self._start(name, folder)
        return self._running[name]

    def get(self, name, folder):
        """An engine for models of the folder's kind."""
        running = self.running(name, folder)
        if name == IN_PROCESS:
            return running
        # A server serves any number of engine objects; each has the end tokens of its folder.
        if (name, folder) not in self._attached or self._attached[name, folder].closed:
            self._attached[name, folder] = self.new(name, folder)
        return self._attached[name, folder]

    def new(self, name, folder):
        """An engine of which nothing was asked yet; over HTTP, one that knows a running server by its address."""
        if name == IN_PROCESS:
            self._start(name, folder)
            return self._running[name]
        options = SGLangOptions(**{**_OPTIONS[name], "url": self.running(name, folder).url})
        return create_engine("sglang", str(folder), options)

    def make_room(self):
        """Ends the engine in this process, of which there can be one."""
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
