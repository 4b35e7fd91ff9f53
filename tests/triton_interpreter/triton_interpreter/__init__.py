"""A back-end "cpu" of Triton without a compiler, for tests of vLLM's model runner for GPUs on a CPU.

vLLM's CPU build runs that model runner (V2) if Triton has a back-end for CPUs, which is no released package. Under
TRITON_INTERPRET=1 Triton executes kernels in Python and compiles nothing, so that a back-end need only be there. With
this directory's parent on PYTHONPATH, Triton finds it by the entry point of the `.dist-info` beside it.
"""
