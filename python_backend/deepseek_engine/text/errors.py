"""What is wrong with the tokenizer files of a checkpoint."""


class TokenizerError(ValueError):
    """A tokenizer file is missing, damaged or beyond what the engine streams; names the file and the remedy."""
