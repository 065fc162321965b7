"""`python -m shardplan` is the command `shardplan`, and its entry: an interrupt while it loads leaves no traceback."""

from typing import NoReturn


def main() -> NoReturn:
    """Load the command line and run it."""
    try:
        from shardplan.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
