"""The engine for NVIDIA GPUs: kernels in CUDA C++, compiled at run time."""
