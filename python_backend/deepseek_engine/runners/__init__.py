"""Model runners: each executes one step plan on a model."""
