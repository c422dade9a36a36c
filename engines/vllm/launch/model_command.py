"""``hear vllm make-model``: write a small generated model, to try a server without fetching one."""

import argparse
from pathlib import Path
from typing import Final

import msgspec

from hear.app.cli import Command
from hear.engines.vllm.launch.model import ModelShape, make_model
from hear.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the folder, and an option for each field of a shape."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder for it")
    for field in msgspec.structs.fields(ModelShape):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int,
            default=field.default,
            metavar="N",
            help=f"({field.default})",
        )


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command."""
    given = {field: getattr(namespace, field) for field in ModelShape.__struct_fields__}
    try:
        shape = msgspec.convert(given, ModelShape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the model's shape: {error}") from error
    make_model(namespace.folder, shape)
    return 0


COMMAND: Final = Command("write a small generated model for trials and tests", configure, run)
