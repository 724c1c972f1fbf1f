"""The models on a GPU: weights as the device kernels take them, and steps that run from CUDA graphs."""
