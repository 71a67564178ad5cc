"""The twenty kernels of `kernels.cu`, and how each is launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.resources import files

from slipstream.techniques.side_by_side.cuda import Launch, parse_launch

# By kernel: settings of three launches: blocks of another size or shape, and grids.
_LAUNCHES = {
    "saxpy": ("block=128,grid=3,n=1000", "block=256,grid=5,n=4000", "block=64,grid=7x2,n=900"),
    "relu": ("block=128,grid=9,n=1000", "block=256,grid=3,n=700", "block=32,grid=20,n=640"),
    "block_sums": ("block=128,grid=4,n=3000", "block=256,grid=2,n=4000", "block=64,grid=9,n=2000"),
    "warp_sums": ("block=128,grid=4,n=500", "block=256,grid=2,n=512", "block=64,grid=9,n=570"),
    "reverse": (
        "block=128,grid=4,shared=512", "block=256,grid=3,shared=1024", "block=64,grid=7,shared=256"
    ),
    "transpose": (
        "block=32x4,grid=3x2,width=90,height=40", "block=32x8,grid=2x2,width=64,height=50",
        "block=32x2,grid=2x3,width=60,height=68",
    ),
    "stencil": (
        "block=8x4x4,grid=2x2x2,nx=16,ny=8,nz=8", "block=16x4x4,grid=1x3x2,nx=15,ny=12,nz=8",
        "block=32x1x2,grid=1x9x4,nx=30,ny=9,nz=8",
    ),
    "histogram": (
        "block=32x4,grid=4,n=4000,counts=64", "block=64x4,grid=2,n=3000,counts=64",
        "block=8x8,grid=5,n=4096,counts=64",
    ),
    "dot": (
        "block=128,grid=4,n=4000,sum=1", "block=256,grid=2,n=3000,sum=1",
        "block=32,grid=9,n=4096,sum=1",
    ),
    "powers<float, 5>": (
        "block=128,grid=5,n=600", "block=256,grid=2,n=512", "block=64,grid=8,n=500"
    ),
    "scan": ("block=128,grid=4", "block=256,grid=3", "block=64,grid=9"),
    "product": (
        "block=16x16,grid=2x2,n=32", "block=16x16,grid=3x3,n=48", "block=16x16,grid=1,n=16"
    ),
    "compact": ("block=128,grid=4,n=500", "block=256,grid=3,n=700", "block=64,grid=9,n=576"),
    "hash": ("block=128,grid=4,n=500", "block=256,grid=2,n=512", "block=32,grid=12,n=380"),
    "statistics": (
        "block=32x4,grid=3,count=300,channels=5", "block=32x8,grid=2,count=500,channels=4",
        "block=16x8,grid=4,count=200,channels=4",
    ),
    "im2col": (
        "block=128,grid=3,height=20,width=20,kernel=3,columns=3000",
        "block=256,grid=1,height=18,width=22,kernel=3,columns=3000",
        "block=64,grid=5,height=20,width=20,kernel=2,columns=1500",
    ),
    "max_pool": (
        "block=128,grid=3,height=30,width=40", "block=256,grid=2,height=32,width=40",
        "block=64,grid=5,height=40,width=30",
    ),
    "scale4": (
        "block=128,grid=4,n=500,x=500", "block=256,grid=2,n=512,x=512",
        "block=64,grid=9,n=570,x=570",
    ),
    "odd_even": ("block=128,grid=4", "block=256,grid=3", "block=64,grid=9"),
    "softmax": (
        "block=32x4,grid=5,rows=18,columns=100", "block=32x8,grid=2,rows=16,columns=200",
        "block=32x2,grid=9,rows=17,columns=70",
    ),
}  # fmt: skip
NAMES = tuple(_LAUNCHES)
SPLITS = 3


def launch(name: str, split: int = 0) -> Launch:
    """How a kernel is launched, in one of three ways."""
    source = files(__package__).joinpath("kernels.cu")
    return parse_launch(f"{source}:{name}:{_LAUNCHES[name][split]}")


def pairs() -> Iterator[tuple[str, str]]:
    """All 190 pairs."""
    return itertools.combinations(NAMES, 2)
