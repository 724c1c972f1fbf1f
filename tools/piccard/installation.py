"""What the checkout that this Piccard was installed from brings along."""

from pathlib import Path

from piccard.errors import OperationError


def demo_checkpoint() -> Path:
    """The demo checkpoint.

    Raises:
        OperationError: this Piccard was not installed from a checkout.
    """
    folder = Path(__file__).resolve().parents[2] / "assets" / "demo"
    if not (folder / "config.json").is_file():
        raise OperationError(f"the demo checkpoint is not at {folder}; name one with --checkpoint")
    return folder
