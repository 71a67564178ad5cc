"""Kernels side by side: fused CUDA kernels in an emulated block, loops on a CPU."""
