"""Facts about torch, inference runtimes and accelerators."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from typing import Any

from slipstream.child.program import answer_of
from slipstream.measure.facts_machine import UNREADABLE
from slipstream.measure.redact import Redactor

_RUNTIMES = {"onnxruntime": "onnxruntime", "litert": "ai-edge-litert", "tflite": "tflite-runtime"}
# Of nvidia-smi: what stays (hashed) and what changes while it runs (recorded only).
_GPU_STABLE = (
    "name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "compute_cap", "mig.mode.current", "persistence_mode", "ecc.mode.current",
)  # fmt: skip
_GPU_NOW = ("clocks.sm", "clocks.mem", "temperature.gpu", "pstate", "power.draw")
_TIMEOUT_S = 20.0


def facts(redact: Redactor, *, may_import: bool) -> dict[str, Any]:
    """Groups ``torch``, ``onednn``, ``runtime``, ``gpu``."""
    return _torch(redact, may_import) | _runtimes() | _gpus()


def _torch(redact: Redactor, may_import: bool) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {"torch.version": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {"torch.version": None}
    if "torch" not in sys.modules and not may_import:
        return found
    try:
        import torch
    except (ImportError, OSError):
        # Installed and broken (a missing shared library) is an environment too.
        return found | {"torch.config": UNREADABLE}
    return found | {
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
        # oneDNN does not tell its choice; it obeys this variable when set, else it takes all the
        # processor has.
        "onednn.max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA")
        or os.environ.get("DNNL_MAX_CPU_ISA")
        or "all",
    }


def _runtimes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, package in _RUNTIMES.items():
        try:
            found[f"runtime.{name}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[f"runtime.{name}"] = None
    # Its import is slow: asked only when the user's code has imported it.
    if "onnxruntime" in sys.modules:
        found["runtime.onnxruntime_providers"] = sys.modules[
            "onnxruntime"
        ].get_available_providers()
    return found


def _gpus() -> dict[str, Any]:
    found: dict[str, Any] = {"gpu.visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    program = shutil.which("nvidia-smi")
    if program is None:
        present = os.path.exists("/proc/driver/nvidia/version")
        return found | {"gpu.count": UNREADABLE if present else 0}
    names = (*_GPU_STABLE, *_GPU_NOW)
    rows = _nvidia_smi(program, names)
    if rows is None:
        return found | {"gpu.count": UNREADABLE}
    found["gpu.count"] = len(rows)
    for number, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            group = "gpu" if name in _GPU_STABLE else "now.gpu"
            found[f"{group}.{number}.{name.replace('.', '_')}"] = value
    return found


def _nvidia_smi(program: str, names: tuple[str, ...]) -> list[list[str]] | None:
    query = f"--query-gpu={','.join(names)}"
    done = answer_of(program, query, "--format=csv,noheader", timeout_s=_TIMEOUT_S)
    if done is None:
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if done.returncode != 0 or any(len(row) != len(names) for row in rows):
        return None
    return rows
