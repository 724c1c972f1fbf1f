"""Entry of the piccard command."""

import sys

from piccard.cli import app
from piccard.errors import OperationError


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; what goes wrong is told in a sentence, with exit code 1 or 2."""
    try:
        app(args=arguments)
    except OperationError as error:
        _tell(str(error), error)
        sys.exit(error.exit_code)
    except OSError as error:
        # A full or read-only disk, or a folder of somebody else's: what was begun is undone by now.
        where = f": {error.filename}" if error.filename else ""
        _tell(f"{error.strerror or error}{where}; what was begun is undone", error)
        sys.exit(1)


def _tell(message: str, error: BaseException) -> None:
    for line in (*message.splitlines(), *getattr(error, "__notes__", ())):
        print(f"piccard: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
