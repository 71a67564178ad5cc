"""Native code compiled with sanitizers: programs of a few files, and the whole library."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "native"
# Compiler flags of each level, as in `native/CMakeLists.txt`.
FLAGS: Mapping[str, Sequence[str]] = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512bw": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    "neon": [],
}
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


# A sanitizer's allocator returns None for 2^62 bytes, as malloc does. Memory that Python itself
# never frees does not count as a leak.
_ASAN = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64"


def library(cache: Path) -> Path:
    """Return the folder of the whole library with sanitizers, compiled once per content.

    A build that was cut off goes on where it stopped.

    Args:
        cache: a folder that stays between runs.
    """
    flags = " ".join((*SANITIZERS, "-g1", "-fno-omit-frame-pointer"))
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    content = hashlib.sha256(version + flags.encode())
    for source in sorted(NATIVE.rglob("*")):
        if source.is_file():
            content.update(str(source.relative_to(NATIVE)).encode() + source.read_bytes())
    folder = cache / content.hexdigest()[:16]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", *generator, "-S", str(NATIVE.parent), "-B", str(folder),
         "-DSLIPSTREAM_OPTIMIZATION=-O1", f"-DCMAKE_CXX_FLAGS={flags}"],
        check=True,
    )  # fmt: skip
    subprocess.run(
        ["cmake", "--build", str(folder), "--target", "slipstream_native",
         "--parallel", str(len(os.sched_getaffinity(0)))],
        check=True,
    )  # fmt: skip
    for other in cache.iterdir():
        if other != folder:
            shutil.rmtree(other)  # of deleted sources
    return next(folder.rglob("libslipstream_native.so")).parent


def environment() -> dict[str, str]:
    """Return the environment with which Python, which has no sanitizers, loads such a library."""
    # Exceptions of other libraries pass through the sanitizer, which looks for them at its start.
    names = ("libasan.so", "libstdc++.so.6")
    paths = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": _ASAN, "OMP_NUM_THREADS": "1"}


def build(
    folder: Path, family: str, levels: Sequence[str], *sources: Path, compiler: str = "g++",
    flags: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Return a program of `sources` and the kernels of `family` for `levels`."""
    own = NATIVE / "src" / family
    kinds = [(next(own.glob(f"*_{level}.cpp")), FLAGS[level]) for level in levels]
    kernels = "".join(f"KERNEL({source.stem})\n" for source, _ in kinds)
    (folder / f"{family}_kernels.inc").write_text(kernels)
    common = [
        compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread",
        "-ffp-contract=off", *flags, f"-I{folder}", f"-I{NATIVE / 'src'}",
        f"-I{NATIVE / 'include'}",
    ]  # fmt: skip
    parts: list[tuple[Path, Sequence[str]]] = [(source, []) for source in sources]
    parts += kinds
    objects = []
    for source, extra in parts:
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run([*common, *extra, "-c", str(source), "-o", objects[-1]], check=True)
    program = folder / family
    subprocess.run([*common, *objects, "-o", str(program)], check=True)
    return program
