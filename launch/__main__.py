"""Command line of cluster tools: `python -m launch preflight [--model FOLDER]`."""

import argparse
import sys
from pathlib import Path

from launch.preflight import preflight


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("preflight", help="check packages, library versions and the model folder of this machine")
    check.add_argument("--model", type=Path, help="checkpoint folder; default: the shipped model")
    args = parser.parse_args(argv)
    return preflight(args.model)


if __name__ == "__main__":
    sys.exit(main())
