"""Fused Triton kernels: the same bytes in the interpreter, one machine code, invalid input."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError, UsageError
from slipstream.techniques.side_by_side.cuda import CompiledKernel
from slipstream.techniques.side_by_side.hfuse import (
    EmulatorError,
    KernelSourceError,
    Launch,
    parse_launch,
)
from slipstream.techniques.side_by_side.triton import (
    ProgramResources,
    arguments_of,
    compile_fused,
    emulate,
    fuse,
)
from slipstream_bench.systems.hfuse.kernels import PROGRAMS, programs
from triton_children import run_tests

TESTS = Path(__file__).with_name("triton_hfuse.py")
Require = Callable[[str, bool, str], None]
HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = "@triton.jit\ndef good(x, n):\n    tl.store(x + tl.program_id(0), n)\n"


@pytest.fixture
def need_triton(require: Require) -> None:
    """Skip, or fail, if Triton is not installed."""
    require("triton", importlib.util.find_spec("triton") is not None, "triton is not installed")


def source(folder: Path, text: str, name: str = "bad.py") -> Path:
    """Write a file with `text` after the usual imports."""
    path = folder / name
    path.write_text(HEAD + text)
    return path


def good(folder: Path, more: str = "x=4xfp32,n=1") -> Launch:
    """A correct kernel."""
    return parse_launch(f"{source(folder, KERNEL, 'good.py')}:good:{more}")


def test_fused_programs_leave_the_bytes_of_their_kernels(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS, tmp_path, require, interpreted=True)


@pytest.mark.full
def test_all_pairs_leave_the_bytes_of_their_kernels(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS.with_name("triton_hfuse_all.py"), tmp_path, require, interpreted=True)


@pytest.mark.full
@pytest.mark.usefixtures("need_triton")
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PROGRAMS, 2)))
def test_every_pair_compiles_to_one_machine_code(first: str, second: str) -> None:
    needs = compile_fused(fuse([programs(first), programs(second, 1)]), "sm_90")
    most = max(kernel.registers for kernel in needs.alone)
    for variant in (needs.evenly, needs.in_order):
        # With up to 32 registers a multiprocessor has all its threads.
        assert 0 < variant.registers <= max(most + 8, 32)
        assert variant.shared_bytes == max(alone.shared_bytes for alone in needs.alone)
    assert needs.code_bytes > 1000


def test_kernels_that_compete_for_registers_are_reported_as_better_apart(tmp_path: Path) -> None:
    fused = fuse([good(tmp_path), good(tmp_path)])

    def summary(*registers: int) -> str:
        *alone, both = (CompiledKernel(count, 0, 0, ()) for count in registers)
        return ProgramResources("sm_90", tuple(alone), both, both, 0).summary(fused)

    # 2,048 threads of a multiprocessor have 32 registers each.
    assert "do not fuse" in summary(32, 128, 128)
    assert "do not fuse" not in summary(10, 32, 32)
    assert "do not fuse" not in summary(100, 128, 128)


@pytest.mark.usefixtures("need_triton")
def test_the_command_writes_verified_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.cli._main import _command

    monkeypatch.chdir(tmp_path)
    first, second = source(tmp_path, KERNEL, "a.py"), source(tmp_path, KERNEL, "b.py")
    arguments = ["hfuse", "a.py:good:grid=3,x=3xfp32,n=2", "b.py:good:grid=2x2,x=2xi64,n=5"]
    assert _command([*arguments, "-o", "fused.py", "--arch", "sm_90", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["emulated"] == {
        "schedules": 2, "compared": 3 * 4 + 2 * 8, "differing": 0, "trouble": "",
        "float_atomics": False, "ordered": "programs", "equal": True,
    }  # fmt: skip
    assert [part["programs"] for part in payload["parts"]] == [3, 4]
    needs = payload["resources"]
    assert 0 < needs["in_order"]["registers"] <= needs["evenly"]["registers"] <= 32
    assert all(kernel["registers"] > 0 for kernel in needs["alone"])
    assert needs["code_bytes"] > 1000
    assert "def good_good(" in Path("fused.py").read_text()
    assert first.read_text() == second.read_text() == HEAD + KERNEL


@pytest.mark.usefixtures("need_triton")
def test_an_access_outside_of_arrays_is_named(tmp_path: Path) -> None:
    beyond = source(tmp_path, KERNEL.replace("tl.program_id(0)", "5000"))
    launches = [good(tmp_path), parse_launch(f"{beyond}:good:x=4xfp32,n=1")]
    with pytest.raises(EmulatorError, match=r"good alone fails .* out of bounds") as error:
        emulate(fuse(launches))
    assert str(error.value.where) == str(beyond)


def test_a_missing_triton_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from slipstream.errors import MissingExtraError\n"
        "from slipstream.techniques.side_by_side.triton import check\n"
        "try:\n    check.run_in_child('compare')\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'slipstream[triton]'" in run.stdout


def jitted(body: str, head: str = "", more: str = "", decorators: str = "@triton.jit") -> str:
    """A kernel named bad, after `head`."""
    return f"{head}\n{decorators}\ndef bad(x, n{more}):\n    {body}\n"


ID = "@triton.jit\ndef here():\n    return tl.program_id(0)\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def bad(x):\n    pass\n", "no @triton.jit"),
        ("bad = 3\n", "not a function"),
        (jitted("pass", decorators="@tl.core.builtin"), "not part of Triton"),
        (jitted("pass", decorators="@triton.jit(debug=True)"), "not supported"),
        (jitted("pass", more=", *rest"), "keyword-only"),
        (jitted("pass", decorators="@triton.autotune([triton.Config({}, pre_hook=print)], [])\n"
                "@triton.jit"), "hook"),
        (jitted("pass") * 2, "more than once"),
        (jitted("tl.store(x, SIZE)", "SIZE = tl.constexpr(1)\nSIZE = tl.constexpr(2)"),
         "more than once"),
        (jitted("tl.store(x, SIZE)", "SIZE = tl.constexpr(1)\ndef f():\n    global SIZE\n"
                "    SIZE = 2"), "changes 'SIZE'"),
        (jitted("tl.store(x, SIZE)"), "'SIZE' is not defined"),
        (jitted("tl.store(x, SIZE)", "from os import *"), "import"),
        (jitted("tl.store(x, SIZE)", "from .nowhere import SIZE"), "not found"),
        (jitted("tl.store(x, f())", "f = tl.program_id"), "outside of a function"),
        (jitted("f = tl.program_id\n    tl.store(x, f(0))"), "as a value"),
        (jitted("f = here\n    tl.store(x, f())", ID), "as a value"),
        (jitted("getattr(tl, 'store')(x, n)"), "as a value"),
        (jitted("tl.store(x, tl.inline_asm_elementwise('mov.u32 $0, %ctaid.x;', '=r', [], "
                "tl.int32, True, 1))"), "assembly"),
        (jitted("pass").replace("def bad(", "def bad(("), "not valid Python"),
    ],
)  # fmt: skip
def test_unsupported_kernels_are_named(tmp_path: Path, text: str, what: str) -> None:
    path = source(tmp_path, text)
    with pytest.raises(KernelSourceError, match=what) as error:
        fuse([parse_launch(f"{path}:bad"), good(tmp_path)])
    assert re.fullmatch(r"bad\.py:\d+", str(error.value.where))


def test_invalid_files_and_grids_are_refused(tmp_path: Path) -> None:
    path = source(tmp_path, KERNEL)
    (tmp_path / "text.py").write_bytes(b"\xff\xfe")
    for spec, what in (
        (f"{tmp_path}/none.py:good", "cannot be read"),
        (f"{tmp_path}/text.py:good", "not valid Python"),
        (f"{path}:goods", "did you mean good"),
        (f"{path}:good:grid=65536x65536", "more than 2,147,483,647"),
        (f"{path}:good:num_warps=3", "num_warps=3"),
        (f"{path}:good:num_stages=0", "num_stages=0"),
    ):
        with pytest.raises(SlipstreamError) as error:
            fuse([parse_launch(spec), good(tmp_path)])
        assert what in str(error.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("x=4xfp32", "no value of 'n'"), ("x=4xfp32,n=1,m=2", "no argument 'm'"),
        ("x=4xfp33,n=1", "not an array"), ("x=0xfp32,n=1", "not an array"),
        ("x=4xfp32,n=one", "n=one"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(tmp_path: Path, settings: str, what: str) -> None:
    fused = fuse([good(tmp_path, settings), good(tmp_path)])
    with pytest.raises(EmulatorError, match=what):
        arguments_of(fused.parts[0])


def test_arguments_have_the_specified_types(tmp_path: Path) -> None:
    more = ", flag, big, wide: tl.int64, TYPE: tl.constexpr, MODE: tl.constexpr, k: tl.constexpr=3"
    path = source(tmp_path, jitted("pass", more=more))
    spec = f"{path}:bad:x=8xi32<5,n=0.5,flag=True,big=4294967296,wide=1,TYPE=tl.float16,MODE=sum"
    some = arguments_of(fuse([parse_launch(spec), good(tmp_path)]).parts[0])
    assert [(argument.kind, argument.value, argument.type) for argument in some] == [
        ("array", 8, "i32"), ("number", 0.5, "fp32"), ("number", True, "u1"),
        ("number", 2**32, "i64"), ("number", 1, "i64"), ("dtype", "float16", ""),
        ("constexpr", "sum", ""), ("constexpr", 3, ""),
    ]  # fmt: skip
    assert some[0].below == 5


def test_mixed_languages_and_wrong_options_are_refused(tmp_path: Path) -> None:
    from slipstream.cli._main import _command

    path, output = source(tmp_path, KERNEL), tmp_path / "out.py"
    helpers = source(tmp_path, ID, "helpers.py")
    calling = source(tmp_path, jitted("tl.store(x, here())", "from helpers import here"), "a.py")
    for arguments, what in (
        ([f"{path}:good", "a.cu:k", "-o", str(output)], "and Triton"),
        ([f"{path}:good", f"{path}:good", "-o", str(tmp_path / "out.cu")], "does not end in .py"),
        ([f"{path}:good", f"{path}:good", "-o", str(path)], "is a source"),
        ([f"{path}:good", f"{calling}:bad", "-o", str(helpers)], "is a source"),
        ([f"{path}:good", f"{path}:good", "-o", str(output), "--name", "def"], "keyword of Python"),
        ([f"{path}:good<float>", f"{path}:good", "-o", str(output)], "no template"),
    ):
        with pytest.raises(UsageError, match=what):
            _command(["hfuse", *arguments])
    assert not output.exists()
    assert path.read_text() == HEAD + KERNEL
