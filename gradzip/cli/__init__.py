"""Gradient compression for data-parallel PyTorch training.

examples:
  gradzip info                what is installed, built and found here
  gradzip info --json | jq .extension.simd
  gradzip advise --model resnet50 --bandwidth 10gbit --ranks 16 --step-ms 180
  gradzip inspect step500.pt  what methods make of the gradients that gradzip.capture saved
  gradzip list topk           what a method does, and its arguments
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import gradzip

from . import advise, info, inspect, listing
from .command import CommandError

# A command's module has its help as docstring; `add_arguments(parser)`; and `run(options)`, which prints its report,
# as JSON with `options.json`, and raises CommandError for bad input.
COMMANDS = {"info": info, "advise": advise, "inspect": inspect, "list": listing}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process). Returns the exit status."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gradzip", description=__doc__, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=f"gradzip {gradzip.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        title = text.partition("\n")[0].partition(": ")[2].rstrip(".")
        command = commands.add_parser(name, help=title, description=text, formatter_class=as_written)
        command.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`gradzip info | head`). Python must not fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CommandError, OSError) as error:
        print(f"gradzip {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0
