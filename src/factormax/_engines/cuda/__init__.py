"""The engine of NVIDIA GPUs: kernels in CUDA C++, compiled at run time."""
