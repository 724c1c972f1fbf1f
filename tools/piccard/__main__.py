"""Entry of the piccard command."""

import sys

from piccard.cli import app
from piccard.errors import OperationError


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; what goes wrong is told in a sentence, with exit code 1 or 2."""
    try:
        app(args=arguments)
    except OperationError as error:
        for line in str(error).splitlines():
            print(f"piccard: {line}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"piccard: {note}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
