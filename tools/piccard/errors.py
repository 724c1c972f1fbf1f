"""What a command tells instead of a traceback."""


class OperationError(Exception):
    """A command cannot do what was asked; the message says what to change.

    Args:
        message: one sentence, with the remedy.
        exit_code: 1 where the home or the server is in the way, 2 where the command line itself is wrong.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
