"""Engines of the real SGLang, shared by tests since each takes 10 to 30 seconds to start."""

import json
from pathlib import Path

from megarl.rollout import create_engine
from megarl.rollout.sglang.options import SGLangOptions

IN_PROCESS, OVER_HTTP = "sglang", "sglang-http"

# What an engine is left out of: a start each, for what another case shows.
_LEFT_OUT = {
    IN_PROCESS: {"test_a_waiting_request_can_be_aborted", "test_the_models_own_eos_ends_the_answer"},
    OVER_HTTP: {
        "test_a_waiting_request_can_be_aborted",
        "test_generation_ends_with_the_token_that_completes_a_stop_string",
    },
}
_FAMILIES = {"family": "qwen2", "tied": False}


def is_for_engine(item):
    """Whether a collected test is to run: SGLang's models are SGLang's to test, one family stands for all."""
    values = getattr(item, "callspec", None) and item.callspec.params
    engine = values and values.get("engine_name")
    if engine not in _LEFT_OUT:
        return True
    if any(values.get(name, value) != value for name, value in _FAMILIES.items()):
        return False
    return item.originalname not in _LEFT_OUT[engine]


def kind_of(folder):
    """What a running SGLang cannot change: the model's sizes, and whether there is a tokenizer."""
    sizes = json.loads((Path(folder) / "config.json").read_text())
    sizes.pop("eos_token_id")
    return json.dumps(sizes, sort_keys=True), (Path(folder) / "tokenizer_config.json").is_file()


class SGLangEngines:
    """At most one engine in this process and one server; started anew for another kind of model."""

    def __init__(self):
        self._kinds, self._running, self._attached = {}, {}, {}

    def get(self, name, folder):
        """An engine for models of the folder's kind."""
        if self._kinds.get(name) != kind_of(folder) or self._running[name].closed:
            self._start(name, folder)
        if name == IN_PROCESS:
            return self._running[name]
        # A server serves any number of engine objects; each has the end tokens of its folder.
        if folder not in self._attached or self._attached[folder].closed:
            self._attached[folder] = self.new(name, folder)
        return self._attached[folder]

    def new(self, name, folder):
        """An engine of which nothing was asked yet; over HTTP, one that knows a running server by its address."""
        if name == IN_PROCESS:
            self._start(name, folder)
            return self._running[name]
        if self._kinds.get(name) != kind_of(folder):
            self._start(name, folder)
        options = SGLangOptions(url=self._running[name].url)
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
        if name == OVER_HTTP:
            for engine in self._attached.values():
                engine.shutdown()
            self._attached = {}
        options = (
            SGLangOptions(max_num_seqs=128) if name == IN_PROCESS else SGLangOptions(max_num_seqs=128, mode="http")
        )
        self._running[name] = create_engine("sglang", str(folder), options)
        self._kinds[name] = kind_of(folder)
