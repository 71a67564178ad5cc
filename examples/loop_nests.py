"""Loop nests whose schedules are predicted and searched.

slipstream loops predict examples/loop_nests.py:product -t "interchange(j,k)" -t "tile(i,j,32,64)"
slipstream loops search examples/loop_nests.py:blur -o blur.cpp
"""

from __future__ import annotations

from typing import Any

from slipstream import loops

N = 256


def product() -> loops.Program:
    """Return ``out = in0 @ in1``."""
    return loops.einsum("ik,kj->ij", i=N, j=N, k=N)


def blur() -> loops.Program:
    """Return the mean of three neighbours in each row, and then in each column."""
    image = loops.Buffer("image", (N + 2, N + 2))
    rows = loops.Buffer("rows", (N + 2, N), role="out")
    out = loops.Buffer("out", (N, N), role="out")

    def mean(buffer: loops.Buffer, *points: Any) -> Any:
        a, b, c = (loops.Load(buffer.name, buffer.at(*point)) for point in points)
        return loops.apply("mul", loops.apply("add", loops.apply("add", a, b), c), 1 / 3)

    across = mean(image, *(("i", {"j": 1, "": d}) for d in range(3)))
    down = mean(rows, *(({"u": 1, "": d}, "v") for d in range(3)))
    return loops.Program(
        (image, rows, out),
        (loops.Axis("i", N + 2), loops.Axis("j", N), loops.Axis("u", N), loops.Axis("v", N)),
        (
            loops.Statement("rows", rows.at("i", "j"), across, ("i", "j")),
            loops.Statement("out", out.at("u", "v"), down, ("u", "v")),
        ),
    )


if __name__ == "__main__":
    nest = product()
    (estimate,) = loops.CostModel.load().predict(nest, [loops.schedule(nest, "interchange(j,k)")])
    print("interchange(j,k):", estimate)
    result = loops.autoschedule(nest)
    print(f"{result.best.schedule}: measured {result.best.measured:.1f}x")
