"""The command line ``gradzip``: one module for each subcommand.

A subcommand's module has `add(commands)`, which adds its parser, and `run(options)`, which returns the exit status and
raises CommandError for bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import gradzip

from . import advise, info, inspect, listing
from .command import CommandError

COMMANDS = (info, advise, inspect, listing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process). Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        status = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`gradzip info | head`). Python must not fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CommandError, OSError) as error:
        print(f"gradzip {options.command}: error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradzip",
        description="Gradient compression for data-parallel PyTorch training.",
        epilog="examples:\n  gradzip info                what is installed, built and found here\n"
        "  gradzip info --json | jq .extension.simd\n"
        "  gradzip advise --model resnet50 --bandwidth 10gbit --ranks 16 --step-ms 180\n"
        "  gradzip inspect step500.pt  what methods make of the gradients that gradzip.capture saved\n"
        "  gradzip list topk           what a method does, and its arguments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gradzip {gradzip.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    return parser
