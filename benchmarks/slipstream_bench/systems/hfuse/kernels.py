"""The twenty kernels of `kernels.cu`, the Triton kernels, and their launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.resources import files

from slipstream.techniques.side_by_side.cuda import Launch, parse_launch

# Settings of three launches by kernel: blocks of another size or shape, and grids.
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
    """Return a kernel's launch, in one of three settings."""
    source = files(__package__).joinpath("kernels.cu")
    return parse_launch(f"{source}:{name}:{_LAUNCHES[name][split]}")


def pairs() -> Iterator[tuple[str, str]]:
    """Yield all 190 pairs."""
    return itertools.combinations(NAMES, 2)


# Two launches of each Triton kernel: grids of one, two and three axes.
_F = "xfp32"
_PROGRAMS = {
    "softmax": (
        f"grid=3,x=700{_F},y=700{_F},rows=7,columns=100,block=128",
        f"grid=8,x=480{_F},y=480{_F},rows=8,columns=60,block=64",
    ),
    "layer_norm": (
        f"grid=5,x=500{_F},weight=100{_F},bias=100{_F},y=500{_F},columns=100,block=128",
        f"grid=12,x=768{_F},weight=64{_F},bias=64{_F},y=768{_F},columns=64,block=64",
    ),
    "product": (
        f"grid=2x2,a=960{_F},b=1280{_F},c=1200{_F},m=30,n=40,k=32,tile=32,deep=16",
        f"grid=3x1,a=1280{_F},b=512{_F},c=1000{_F},m=40,n=16,k=32,tile=16,deep=32",
    ),
    "gather": (
        f"grid=9,table=2000{_F},index=9xi32<20,out=900{_F},width=100,block=128",
        f"grid=4,table=640{_F},index=4xi64<10,out=256{_F},width=64,block=64",
    ),
    "dropout": (
        f"grid=4,x=1000{_F},y=1000{_F},n=1000,p=0.3,seed=7,block=256",
        f"grid=9,x=1100{_F},y=1100{_F},n=1100,p=0.5,seed=1,block=128",
    ),
    "row_sums": (
        f"grid=6,x=1800{_F},out=6{_F},columns=300,block=128",
        f"grid=3,x=192{_F},out=3{_F},columns=64,block=64",
    ),
    "histogram": (
        "grid=4,x=900xi32<500,counts=32xi32,n=900,bins=32,block=256",
        "grid=11,x=1400xi32<500,counts=16xi32,n=1400,bins=16,block=128",
    ),
    "transpose": (
        f"grid=2x3,x=1200{_F},y=1200{_F},height=30,width=40,tile=16",
        "grid=4x1,x=1600xfp16,y=1600xfp16,height=100,width=16,tile=32",
    ),
    "adam": (
        f"grid=4,weight=1000{_F},gradient=1000{_F},first=1000{_F},second=1000{_F},n=1000,"
        "rate=0.01,beta1=0.9,beta2=0.99,block=256",
        f"grid=7,weight=850{_F},gradient=850{_F},first=850{_F},second=850{_F},n=850,rate=0.1,"
        "beta1=0.5,beta2=0.9,block=128",
    ),
    "recurrence": (
        f"grid=3,gate=300{_F},x=300{_F},y=300{_F},length=100,block=128",
        f"grid=5,gate=320{_F},x=320{_F},y=320{_F},length=64,block=64",
    ),
    "mean_pool": (
        f"grid=2x3x2,x=600{_F},y=12{_F},size=50,channels=3,block=64",
        f"grid=1x2x4,x=800{_F},y=8{_F},size=100,channels=2,block=128",
    ),
    "dot": (
        f"grid=4,x=1000{_F},y=1000{_F},total=1{_F},n=1000,block=256",
        f"grid=9,x=1100{_F},y=1100{_F},total=1{_F},n=1100,block=128",
    ),
}  # fmt: skip
PROGRAMS = tuple(_PROGRAMS)


def programs(name: str, split: int = 0) -> Launch:
    """Return a Triton kernel's launch, in one of two settings."""
    source = files(__package__).joinpath("triton_kernels.py")
    return parse_launch(f"{source}:{name}:{_PROGRAMS[name][split]}")
