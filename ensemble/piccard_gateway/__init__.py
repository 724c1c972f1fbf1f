"""OpenAI-compatible HTTP front door of the services of a home."""
