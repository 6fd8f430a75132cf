"""Prepares the process whose forks are those of SGLang, which imports this module first."""

from megarl.rollout.sglang.forks import prepare_server

prepare_server()
