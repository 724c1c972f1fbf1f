"""Parts of gpu_service.py."""
