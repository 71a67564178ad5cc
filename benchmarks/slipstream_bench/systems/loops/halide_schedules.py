"""Time Halide's Adams2019 schedules: ``python halide_schedules.py KERNEL...`` prints JSON, in ns.

A script of its own, since the package `halide` is installed in another environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_CALLS = 15


def _pipelines(hl: Any) -> dict[str, Callable[[], Any]]:
    # Halide does not keep the memory of inputs alive.
    memory: list[Any] = []

    def image(name: str, *shape: int) -> Any:
        """Return an input whose first dimension is the innermost one."""
        values = np.random.default_rng(0).uniform(0.5, 1.5, shape[::-1]).astype(np.float32)
        parameter = hl.ImageParam(hl.Float(32), len(shape), name)
        memory.append((values, hl.Buffer(values, name), parameter))
        parameter.set(memory[-1][1])
        parameter.set_estimates([(0, extent) for extent in shape])
        return parameter

    x, y, c = hl.Var("x"), hl.Var("y"), hl.Var("c")

    def matmul() -> Any:
        n = 512
        a, b, out = image("a", n, n), image("b", n, n), hl.Func("out")
        product, k = hl.Func("product"), hl.RDom([(0, n)])
        product[x, y] = 0.0
        product[x, y] += a[k.x, y] * b[x, k.x]
        out[x, y] = product[x, y]
        return out, (n, n)

    def blur() -> Any:
        n = 1024
        a, rows, out = image("a", n + 2, n + 2), hl.Func("rows"), hl.Func("out")
        third = hl.f32(1 / 3)
        rows[x, y] = (a[x, y] + a[x + 1, y] + a[x + 2, y]) * third
        out[x, y] = (rows[x, y] + rows[x, y + 1] + rows[x, y + 2]) * third
        return out, (n, n)

    def convolution() -> Any:
        channels, size, taps = 16, 64, 3
        a = image("a", size + taps - 1, size + taps - 1, channels)
        w, out, total = image("w", taps, taps, channels, channels), hl.Func("out"), hl.Func("total")
        r = hl.RDom([(0, taps), (0, taps), (0, channels)])
        total[x, y, c] = 0.0
        total[x, y, c] += a[x + r.x, y + r.y, r.z] * w[r.x, r.y, r.z, c]
        out[x, y, c] = hl.max(total[x, y, c], 0.0)
        return out, (size, size, channels)

    return {"matmul 512": matmul, "blur": blur, "convolution": convolution}


def main() -> None:
    """Print the minimum CPU time of each kernel."""
    import halide as hl  # type: ignore[import-not-found,unused-ignore]

    library = Path(hl.__file__).parent / "lib64" / "libautoschedule_adams2019.so"
    hl.load_plugin(str(library) if library.exists() else "autoschedule_adams2019")
    target = hl.get_jit_target_from_environment()
    pipelines, found = _pipelines(hl), {}
    for name in sys.argv[1:]:
        out, shape = pipelines[name]()
        out.set_estimates([(0, extent) for extent in shape])
        pipeline = hl.Pipeline(out)
        pipeline.apply_autoscheduler(
            target, hl.AutoschedulerParams("Adams2019", {"parallelism": "1"})
        )
        result = hl.Buffer(np.zeros(shape[::-1], np.float32))
        pipeline.compile_jit(target)
        pipeline.realize(result)
        times = []
        for _ in range(_CALLS):
            begin = time.process_time_ns()
            pipeline.realize(result)
            times.append(time.process_time_ns() - begin)
        found[name] = min(times)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
