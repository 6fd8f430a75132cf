"""Detection of compilers that torch calls at run time."""

import os
import subprocess
import sys
import sysconfig

import pytest

from megarl.base.compilers import missing_extension_tools

SCRIPT = "from megarl.base.compilers import fusion_error; print(fusion_error('cpu'))"
ONLY_THE_KERNEL = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""By default torch also compiles its headers, and a program per vector extension of the processor."""


@pytest.mark.parametrize("compiler", ["", "/nowhere/g++"])
def test_a_kernel_is_really_compiled(tmp_path, compiler):
    environment = {**os.environ, **ONLY_THE_KERNEL, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment |= {"CXX": compiler} if compiler else {}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (compiler in done.stdout) if compiler else done.stdout == "\n"
    assert any(tmp_path.rglob("*.so")) == (not compiler)


def test_missing_tools_are_named(tmp_path, monkeypatch):
    for tool in ("c++", "ninja"):
        (tmp_path / tool).touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert missing_extension_tools() == []
    monkeypatch.setenv("CXX", "clang++")
    (tmp_path / "ninja").unlink()
    (tmp_path / "Python.h").unlink()
    assert missing_extension_tools() == ["clang++", "ninja", "Python.h"]
