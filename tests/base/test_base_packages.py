"""Optional packages: found without an import, and the error for a missing one."""

from __future__ import annotations

import sys

import pytest

from megarl.base.errors import ConfigError
from megarl.base.packages import is_installed, require_sglang


def test_packages_are_found_without_an_import() -> None:
    assert is_installed("this")
    assert "this" not in sys.modules
    assert not is_installed("no_such_package") and not is_installed("no_such_package.module")


def test_missing_sglang_is_an_error_with_the_key_and_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(
        ConfigError, match=r"rollout\.name=sglang needs the package sglang .*ensure_gpu_environment sglang.*embedded"
    ):
        require_sglang()
