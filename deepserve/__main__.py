"""The command `deepserve`, which is also `python -m deepserve`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends it without a traceback, as it does later."""
    try:
        from deepserve.cli import app
    except KeyboardInterrupt:
        print("deepserve: interrupted", file=sys.stderr)
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
