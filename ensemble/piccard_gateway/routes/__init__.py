"""One resource a module."""
