"""Canary routing for Triton: admission, decision, resume and the life of versions."""
