"""All commands, in groups, and what their --help says."""

import argparse
import textwrap
from typing import Any, NoReturn

from alight import __version__, cli
from alight.cli import completion, demo, deployment, doctor, networks, policies, serving, tables
from alight.cli.command import Command

GROUPS = {
    "try it": (*demo.COMMANDS, *doctor.COMMANDS),
    "recorded outputs": tables.COMMANDS,
    "networks (with PyTorch)": (*networks.COMMANDS, *policies.COMMANDS),
    "at work": (*deployment.COMMANDS, *serving.COMMANDS),
    "your shell": completion.COMMANDS,
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
ABOUT = "Early-exit inference under a budget: say what you can spend, get predictions that keep to it."


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(cli.MISUSED, f"alight: {message} (see {self.prog} --help)\n")


class _Overview(Parser):
    """The parser of all commands, whose help shows them in groups."""

    def format_help(self) -> str:
        width = max(map(len, COMMANDS))
        groups = [
            f"{title}:\n" + "\n".join(f"  {each.name:<{width}}  {each.purpose}" for each in group)
            for title, group in GROUPS.items()
        ]
        status = textwrap.indent(textwrap.dedent((cli.__doc__ or "").partition("Exit status:\n")[2]).rstrip(), "  ")
        closing = "alight COMMAND --help shows options and examples; alight --version the version."
        return "\n\n".join(["usage: alight COMMAND ...", ABOUT, *groups, f"exit status:\n{status}", closing]) + "\n"

    def error(self, message: str) -> NoReturn:
        if "required: COMMAND" in message:  # nothing was asked for
            self.exit(cli.MISUSED, self.format_help())
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    overview = _Overview(prog="alight", description=ABOUT)
    overview.add_argument("--version", action="version", version=f"alight {__version__}")
    commands = overview.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS.values():
        add(commands, command)
    return overview


def add(commands: Any, command: Command) -> None:
    """Put a command's parser among the others."""
    examples = "\n".join(f"  alight {example}" for example in command.examples)
    title = "examples" if len(command.examples) > 1 else "example"
    added = commands.add_parser(command.name, description=command.purpose, epilog=f"{title}:\n{examples}")
    command.arguments(added)
    if command.results:
        added.add_argument("--json", action="store_true", help="print results as JSON, for programs")
        added.add_argument("-q", "--quiet", action="store_true", help="no progress, no warnings: results alone")
    added.add_argument("--debug", action="store_true", help="show where in the code an error arose")
    added.set_defaults(run=command.run, **{} if command.results else {"json": False, "quiet": False})
