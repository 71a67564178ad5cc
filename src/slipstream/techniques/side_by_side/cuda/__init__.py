"""Source-to-source fusion of CUDA kernels, checked on the CPU."""

from slipstream.techniques.side_by_side.cuda.emulate import SCHEDULES, emulate
from slipstream.techniques.side_by_side.cuda.fuse import (
    FusedKernel,
    Part,
    fuse,
    register_cap,
    resident_blocks,
)
from slipstream.techniques.side_by_side.cuda.resources import (
    CompiledKernel,
    CudaCompilerError,
    Resources,
    compile_fused,
    why_no_nvcc,
)
from slipstream.techniques.side_by_side.hfuse import (
    EmulationResult,
    EmulatorError,
    KernelSourceError,
    Launch,
    parse_launch,
)

__all__ = [
    "SCHEDULES",
    "CompiledKernel",
    "CudaCompilerError",
    "EmulationResult",
    "EmulatorError",
    "FusedKernel",
    "KernelSourceError",
    "Launch",
    "Part",
    "Resources",
    "compile_fused",
    "emulate",
    "fuse",
    "parse_launch",
    "register_cap",
    "resident_blocks",
    "why_no_nvcc",
]
