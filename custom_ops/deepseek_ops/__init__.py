"""DeepSeek's operators for ONNX Runtime: their registry, what is generated from it, and the build of the library."""
