"""The command line of ``report`` and ``plan``: options, a target, and for a script the arguments of its own.

An argument of the script that has the name of an option of the command goes after ``--``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from dtensor_compile.report.target import TargetError, is_script

_USAGE = """\
usage: {program} [options] TARGET [options]
       {program} [options] script.py [--] [arguments of the script]

TARGET is package.module:function or script.py:function: a function without arguments, or with a mesh, \
that returns a model
and its inputs, or a step to call. {script} An argument of
the script that has the name of an option of this command goes after --.
"""


def options_parser(program: str) -> argparse.ArgumentParser:
    """A parser for options, without the target."""
    p = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    p.add_argument("-h", "--help", action="store_true", help="show this message and exit")
    return p


def usage(options: argparse.ArgumentParser, script: str) -> str:
    """The text of ``--help``.

    Args:
        script: handling of a script, as a sentence.
    """
    return _USAGE.format(program=options.prog, script=script) + "\n" + options.format_help().partition("\n\n")[2]


def parsed(options: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options, with `target` (None without one) and `rest`: the arguments of a script.

    Raises:
        TargetError: an option of the command is behind a script.
    """
    with_target = argparse.ArgumentParser(prog=options.prog, parents=[options], add_help=False, allow_abbrev=False)
    with_target.add_argument("target", nargs="?")
    with_target.add_argument("rest", nargs=argparse.REMAINDER)
    argv, theirs = _split(argv)  # argparse drops the first `--` after a positional argument
    args = with_target.parse_args(argv)
    if args.target is not None and not is_script(args.target):
        args = options.parse_args([*args.rest, *theirs], namespace=args)
        args.rest = []
    misplaced = _options_in(args.rest, options)
    if misplaced:
        raise TargetError(
            f"{' and '.join(misplaced)} behind {args.target}: put options of this command in front of the script, and "
            f"its own arguments of that name behind --, {args.target} -- ..."
        )
    args.rest += theirs if args.rest else theirs[1:]  # a `--` right after the script belongs to this command
    return args


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first ``--``, and the rest with it."""
    before = list(itertools.takewhile(lambda text: text != "--", argv))
    return before, list(argv[len(before) :])


def _options_in(texts: Sequence[str], options: argparse.ArgumentParser) -> list[str]:
    """The names of those of `options` that are among `texts`."""
    ours = {name for action in options._actions for name in action.option_strings}
    return [name for name in dict.fromkeys(text.partition("=")[0] for text in texts) if name in ours]
