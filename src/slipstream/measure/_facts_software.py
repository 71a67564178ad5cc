"""Facts about Python, packages, BLAS, torch, accelerators and the revision of the source code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.child.program import answer_of
from slipstream.measure.facts_machine import UNREADABLE
from slipstream.measure.redact import Redactor

# Variables that affect performance. No others are read, since they may contain secrets.
_VARIABLES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_",
    "ONEDNN_", "DNNL_", "ATEN_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "CUDA_",
    "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "TRITON_",
    "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONOPTIMIZE",
    "SLIPSTREAM_INSTRUCTION_SET", "SLIPSTREAM_NATIVE",
)  # fmt: skip
# Variables with these suffixes hold file paths; torch sets some of them on first use.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE")
# Untracked files that count as source code. Outputs do not: they would give every run a new
# environment.
_SOURCE_SUFFIXES = frozenset(
    (".py", ".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".toml")
)
_OURS = ".slipstream/"
_GIT_TIMEOUT_S = 10.0
_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"
_RUNTIMES = {"onnxruntime": "onnxruntime", "litert": "ai-edge-litert", "tflite": "tflite-runtime"}
# nvidia-smi fields: constant ones (hashed), and ones that change at run time (recorded only).
_GPU_STABLE = (
    "name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "compute_cap", "mig.mode.current", "persistence_mode", "ecc.mode.current",
)  # fmt: skip
_GPU_NOW = ("clocks.sm", "clocks.mem", "temperature.gpu", "pstate", "power.draw")
_GPU_TIMEOUT_S = 20.0


def facts(redact: Redactor, command: str | None, *, import_torch: bool) -> dict[str, Any]:
    """Return the groups ``python``, ``package``, ``blas``, ``env``, ``git``, ``torch``, ``onednn``,
    ``runtime``, ``gpu`` and ``now.command``.
    """
    line = shlex.join(sys.argv) if command is None else command
    return (
        _variables(redact)
        | _python()
        | _packages()
        | _blas()
        | _revision(Path.cwd())
        | _torch(redact, import_torch)
        | _runtimes()
        | _gpus()
        | {"now.command": redact(line)}
    )


def _python() -> dict[str, Any]:
    return {
        "python.version": platform.python_version(),
        "python.implementation": platform.python_implementation(),
        "python.compiler": platform.python_compiler(),
        "python.optimized_build": "--enable-optimizations"
        in str(sysconfig.get_config_var("CONFIG_ARGS")),
        "python.free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    }


def _packages() -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for distribution in metadata.distributions():
        name = distribution.name
        # Of duplicates on sys.path, the first is imported.
        if name and (key := f"package.{name.lower().replace('_', '-')}") not in versions:
            versions[key] = distribution.version
    return versions


def _blas() -> dict[str, Any]:
    # Loaded libraries other than NumPy's BLAS depend on earlier imports, hence group ``now``.
    pools = _thread_pools()
    if pools is None:
        return {"blas": UNREADABLE}
    of_numpy = [p for p in pools if p["user_api"] == "blas" and "numpy" in p["filepath"]]
    chosen = of_numpy or [p for p in pools if p["user_api"] == "blas"]
    return {
        "blas": [_pool(p) for p in chosen] or UNREADABLE,
        "now.thread_pools": sorted((_pool(p) for p in pools), key=str),
    }


def _thread_pools() -> list[dict[str, Any]] | None:
    before = os.environ.get(_SET_BY_THREADPOOLCTL)
    try:
        import numpy  # noqa: F401  (loads its BLAS)
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    finally:
        # Restore the environment for the user's code and its children.
        if before is None:
            os.environ.pop(_SET_BY_THREADPOOLCTL, None)
    pools: list[dict[str, Any]] = threadpool_info()
    return pools


def _pool(pool: dict[str, Any]) -> dict[str, Any]:
    keys = ("internal_api", "version", "num_threads", "threading_layer", "architecture")
    return {key: pool[key] for key in keys if pool.get(key) is not None}


def _variables(redact: Redactor) -> dict[str, Any]:
    return {
        f"env.{name}": redact(value)
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.endswith(_PLACES)
    }


def _revision(folder: Path) -> dict[str, Any]:
    """Return the commit and a hash of the changes since; None outside a repository."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return {"git.revision": None, "git.dirty": None}
    root = Path(os.fsdecode(top.strip()))
    revision = _git(root, "rev-parse", "HEAD")
    # --no-ext-diff --no-textconv: a repository's configuration must not run programs.
    diff = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if revision is None:
        return {"git.revision": "no commit yet", "git.dirty": _dirty(root, b"", new)}
    if diff is None or new is None:
        return {"git.revision": revision.decode().strip(), "git.dirty": UNREADABLE}
    return {"git.revision": revision.decode().strip(), "git.dirty": _dirty(root, diff, new)}


def _dirty(root: Path, diff: bytes, new: bytes | None) -> str | None:
    names = [os.fsdecode(name) for name in (new or b"").split(b"\0") if name]
    sources = [
        name
        for name in sorted(names)
        if Path(name).suffix in _SOURCE_SUFFIXES and not name.startswith(_OURS)
    ]
    if not diff and not sources:
        return None
    digest = hashlib.sha256(diff)
    for name in sources:
        digest.update(os.fsencode(name) + b"\0")
        try:
            digest.update((root / name).read_bytes())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> bytes | None:
    process = answer_of(
        *("git", "-c", "core.fsmonitor=false", *arguments),
        timeout_s=_GIT_TIMEOUT_S,
        directory=folder,
        environment={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return process.stdout if process is not None and process.returncode == 0 else None


def _torch(redact: Redactor, may_import: bool) -> dict[str, Any]:
    try:
        about: dict[str, Any] = {"torch.version": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {"torch.version": None}
    if "torch" not in sys.modules and not may_import:
        return about
    try:
        import torch
    except (ImportError, OSError):
        # Installed but broken, for example because a shared library is missing.
        return about | {"torch.config": UNREADABLE}
    return about | {
        "torch.version": str(torch.__version__),
        "torch.git_revision": torch.version.git_version,
        "torch.config": redact(torch.__config__.show()),
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch.threads": torch.get_num_threads(),
        "torch.interop_threads": torch.get_num_interop_threads(),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch.mkldnn": bool(torch.backends.mkldnn.enabled),
        "torch.cudnn_benchmark": torch.backends.cudnn.benchmark,
        "torch.cuda": torch.version.cuda,
        # oneDNN does not report the instruction set it uses: this variable if set, else all that
        # the processor supports.
        "onednn.max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA")
        or os.environ.get("DNNL_MAX_CPU_ISA")
        or "all",
    }


def _runtimes() -> dict[str, Any]:
    versions: dict[str, Any] = dict.fromkeys(f"runtime.{name}" for name in _RUNTIMES)
    for name, package in _RUNTIMES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[f"runtime.{name}"] = metadata.version(package)
    # Importing onnxruntime is slow, so query it only if the user's code imported it.
    if "onnxruntime" in sys.modules:
        onnxruntime = sys.modules["onnxruntime"]
        versions["runtime.onnxruntime_providers"] = onnxruntime.get_available_providers()
    return versions


def _gpus() -> dict[str, Any]:
    about: dict[str, Any] = {"gpu.visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    program = shutil.which("nvidia-smi")
    if program is None:
        present = os.path.exists("/proc/driver/nvidia/version")
        return about | {"gpu.count": UNREADABLE if present else 0}
    names = (*_GPU_STABLE, *_GPU_NOW)
    rows = _nvidia_smi(program, names)
    if rows is None:
        return about | {"gpu.count": UNREADABLE}
    about["gpu.count"] = len(rows)
    for number, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            group = "gpu" if name in _GPU_STABLE else "now.gpu"
            about[f"{group}.{number}.{name.replace('.', '_')}"] = value
    return about


def _nvidia_smi(program: str, names: tuple[str, ...]) -> list[list[str]] | None:
    query = f"--query-gpu={','.join(names)}"
    process = answer_of(program, query, "--format=csv,noheader", timeout_s=_GPU_TIMEOUT_S)
    if process is None:
        return None
    lines = process.stdout.decode(errors="replace").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if process.returncode != 0 or any(len(row) != len(names) for row in rows):
        return None
    return rows
