"""The operators, one a file, each as a plain-torch reference that also serves on a CPU."""
