"""The DeepSeek inference engine: scheduling, paged latent cache, models and sampling. Runs without a server."""
