"""Programs of a few C++ files, each with flags of its own, as tests of kernels need them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "native"
# What files of a level are compiled with; `native/CMakeLists.txt` says the same.
FLAGS: Mapping[str, Sequence[str]] = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512bw": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    "neon": [],
}
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(
    folder: Path, family: str, levels: Sequence[str], *sources: Path, compiler: str = "g++",
    flags: Sequence[str] = (),
) -> Path:  # fmt: skip
    """A program of `sources` and the kernels of `family` for `levels`."""
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
