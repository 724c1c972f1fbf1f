"""The operators on CUDA: the engine's Triton-language kernels, compiled ahead of time and embedded in a library."""
