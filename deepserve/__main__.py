"""The command `deepserve`, which is also `python -m deepserve`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while it is still being imported, or begins."""
    try:
        from deepserve.cli import app

        app()
    except KeyboardInterrupt:
        print("deepserve: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
