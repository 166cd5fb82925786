"""`accelerate launch` with the backend's names: a module that runs the command line of accelerate.

    accelerate launch --dynamo_backend dtensor train.py --epochs 3          # invalid choice: 'dtensor'
    python -m dtensor_compile.integrations.accelerate_launch --dynamo_backend dtensor train.py --epochs 3

accelerate checks the name twice: in the launcher, against the choices of its parser, and in each process that it
starts, where the script creates an `Accelerator`. This module enables the names here, and makes the launcher start the
script through this module, which enables them there (`integrations.accelerate.enable`) before it runs the script as
``__main__``."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

# isort: skip - the module above raises if accelerate is missing
from accelerate.commands.config import config_utils

from dtensor_compile.integrations.accelerate import NAMES, enable

from accelerate.commands.launch import launch_command, launch_command_parser  # isort: skip

#: First argument of the processes that the launcher starts; it says what follows.
_SCRIPT, _MODULE = "--run-script", "--run-module"


def launch(arguments: Sequence[str]) -> None:
    """Does what ``accelerate launch`` does with these arguments; `run` runs the script."""
    enable()
    config_utils.DYNAMO_BACKENDS.extend(name for name in NAMES if name not in config_utils.DYNAMO_BACKENDS)
    parsed = launch_command_parser().parse_args(arguments)
    if parsed.no_python:
        raise SystemExit(
            "accelerate_launch: --no_python starts no Python that could enable the backend; name it in the program"
        )
    parsed.training_script_args = [
        _MODULE if parsed.module else _SCRIPT,
        parsed.training_script,
        *parsed.training_script_args,
    ]
    parsed.training_script, parsed.module = "dtensor_compile.integrations.accelerate_launch", True
    launch_command(parsed)


def run_script(kind: str, script: str, arguments: Sequence[str]) -> None:
    """Runs a script, or a module, as ``python script arguments`` does, with the backend's names known to accelerate."""
    enable()
    sys.argv = [script, *arguments]
    if kind == _MODULE:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


def main() -> None:
    if sys.argv[1:2] in ([_SCRIPT], [_MODULE]):
        run_script(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        launch(sys.argv[1:])


if __name__ == "__main__":
    main()
