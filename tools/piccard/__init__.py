"""The piccard command."""
