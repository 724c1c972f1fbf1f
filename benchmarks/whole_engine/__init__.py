"""What `benchmarks/gpu_engine.py` is made of; nothing here is a script."""
