"""The error of a command that was given bad input."""


class CommandError(Exception):
    """Bad input. The message is one line: what was got, what was expected, what to do. The exit status is 2."""
