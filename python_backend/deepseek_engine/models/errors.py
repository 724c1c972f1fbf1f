"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """The folder cannot be served. The message names the file, tensor or architecture and says what to do."""
