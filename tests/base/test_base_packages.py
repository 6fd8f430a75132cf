"""Optional packages: found without an import, and the error for a missing one."""

import gc
import sys

import pytest
from support.expected_errors import raises

from megarl.base.packages import import_large, install_command, is_installed, require_sglang, without_garbage_collection


def test_packages_are_found_without_an_import():
    assert is_installed("this")
    assert "this" not in sys.modules
    assert not is_installed("no_such_package") and not is_installed("no_such_package.module")


def test_missing_sglang_is_an_error_with_the_key_and_the_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with raises("sglang.not-installed", "ensure_gpu_environment sglang") as caught:
        require_sglang()
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.name=sglang needs the package sglang (0.5.17 or later): "
        f"{install_command('sglang')}; on a machine without a GPU, the environment of launch/sglang_cpu.sh. "
        "Without SGLang: actor_rollout_ref.rollout.name=embedded [sglang.not-installed]"
    )


def test_collection_is_off_during_the_import_and_on_afterwards(tmp_path, monkeypatch):
    (tmp_path / "imaginary_large.py").write_text("import gc\nenabled = gc.isenabled()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not import_large("imaginary_large").enabled
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    assert import_large("imaginary_large") is sys.modules.pop("imaginary_large")
    assert gc.get_freeze_count() <= frozen, "a module that is loaded freezes nothing"


def test_collection_is_on_after_a_failed_import():
    with pytest.raises(ModuleNotFoundError):
        import_large("no_such_module")
    assert gc.isenabled()


def test_block_leaves_collection_off_if_it_was_off():
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
