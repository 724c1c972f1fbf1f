"""Writes a checkpoint as an ONNX model over the com.deepseek operators."""
