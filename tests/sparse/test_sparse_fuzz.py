"""The kernels under the address and undefined-behaviour sanitizers, on inputs of all shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUZZ = """
import sys
from pathlib import Path
import numpy as np
import scipy.sparse as sp
from slipstream.native import loader
loader._search_folders = lambda: [Path(sys.argv[1])]
from slipstream.sparse import METRICS, kernels, pairwise_distances
from slipstream.sparse.matrix import as_rows
from slipstream.sparse.metrics import NON_NEGATIVE
from slipstream.sparse.search import Limits, Searcher
assert kernels.native() is not None
for seed in range(int(sys.argv[2])):
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(1, 200))
    shapes = [(int(rng.integers(0, top)), columns) for top in (40, 600)]
    density = rng.choice([0.0, 0.01, 0.1, 0.6, 1.0])
    a, b = (sp.random(*shape, density=density, random_state=seed, format="csr") for shape in shapes)
    for rows in (a, b):
        rows.data = rng.choice([0.0, 1.0, 2.5, 1e-30, 1e30, 0.1], len(rows.data))
    for metric in METRICS:
        queries = a.copy()
        if metric not in NON_NEGATIVE:
            queries.data *= rng.choice([-1, 1], len(a.data))
        given = {"p": float(rng.choice([0.5, 3, 3.5]))} if metric == "minkowski" else {}
        for dtype in (np.float32, np.float64):
            limits = Limits(2 ** int(rng.integers(16, 24)), int(rng.integers(1, 4)),
                            int(rng.choice([128, 256, 4096])))
            run = Searcher(as_rows(b.astype(dtype), "B"), metric, given, limits).against(
                as_rows(queries.astype(dtype), "A"))
            out = np.empty((len(run.left), len(run.right)), run.dtype)
            run.distances(out)
            if len(run.right):
                run.nearest(int(rng.integers(1, len(run.right) + 1)))
print("done")
"""


@pytest.mark.full
@pytest.mark.parametrize("level", ["avx512bw", "avx2", "scalar"])
def test_sanitizers_find_nothing(
    tmp_path_factory: pytest.TempPathFactory, level: str, require: Callable[[str, bool, str], None]
) -> None:
    require("compiler", shutil.which("g++") is not None, "g++ is not installed")
    folder = tmp_path_factory.getbasetemp() / "sanitized"
    library = folder / "libslipstream_native.so"
    if not library.exists():
        folder.mkdir()
        flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
        build = folder / "build"
        for command in (
            ["cmake", "-S", str(ROOT), "-B", str(build), f"-DCMAKE_CXX_FLAGS={flags}"],
            ["cmake", "--build", str(build), "-j2"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        shutil.copy(next(build.rglob("libslipstream_native.so")), library)
    asan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FUZZ, str(folder), "30"],
        env={
            **os.environ, "LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0",
            "SLIPSTREAM_INSTRUCTION_SET": level, "PYTHONMALLOC": "malloc",
        },
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "done"
