"""All commands in groups, their parser, and a script by which shells complete them."""

import argparse
import difflib
import re
from typing import Any, NoReturn

from alight import __version__
from alight.cli import deployment, fitting, getting_started, networks, running, tables
from alight.cli.arguments import count, counts, numbers
from alight.cli.command import MEANINGS, Command, CommandResult, ExitStatus, argument

ABOUT = "Early-exit inference under a budget: say what you can spend, get predictions that keep to it."
SHELLS = {
    "bash": 'eval "$(alight completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(alight completion zsh)" in ~/.zshrc, after compinit',
    "tcsh": "alight completion tcsh > ~/.alight.csh, and `source ~/.alight.csh` in ~/.tcshrc",
}


def run_completion(options: argparse.Namespace) -> CommandResult:
    """Print a script that completes commands and options in your shell."""
    import shtab

    overview = parser()
    (commands,) = (action for action in overview._actions if isinstance(action, argparse._SubParsersAction))
    for each in commands.choices.values():
        for action in each._actions:
            if action.choices is None and action.nargs != 0 and action.type not in (int, float, count, counts, numbers):
                action.complete = shtab.FILE
    return CommandResult(shtab.complete(overview, options.shell).rstrip("\n"), None)


COMPLETION = Command(
    run_completion,
    (argument("shell", choices=[*SHELLS], help="; ".join(f"{name}: {how}" for name, how in SHELLS.items())),),
    tuple(f"completion {name}" for name in SHELLS),
    results=False,
)
GROUPS = {
    "try it": getting_started.COMMANDS,
    "all at once": fitting.COMMANDS,
    "recorded outputs": tables.COMMANDS,
    "networks (with PyTorch)": (*networks.COMMANDS, *running.COMMANDS),
    "deployment": deployment.COMMANDS,
    "your shell": (COMPLETION,),
}
SYNONYMS = {  # first words of functions, and of other tools: the command
    **dict.fromkeys(("deploy", "quantize", "quantise", "convert"), "export"),
    **dict.fromkeys(("compare", "time"), "bench"),
    "tune": "plan",
    "measure": "costs",
    "infer": "predict",
    "verify": "check",
    "write": "report",
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which knows what a misspelt option is meant to be."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return the options; what is left is an error of this command, and the nearest option is named."""
        options, left = super().parse_known_args(args, namespace)
        for name in (each.partition("=")[0] for each in left if each.startswith("-")):
            near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
            self.error(f"there is no option {name}{f': did you mean {near[0]}?' if near else ''}")
        if left:
            self.error(f"too many arguments: {' '.join(left)}")
        return options, left

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit."""
        self.exit(ExitStatus.INVALID_ARGUMENTS, f"alight: {message} (see {self.prog} --help)\n")


class _Overview(Parser):
    """The parser of all commands, whose help shows them in groups."""

    def format_help(self) -> str:
        width = max(map(len, COMMANDS))
        groups = [
            "\n".join([f"{title}:", *(f"  {each.name:<{width}}  {each.purpose}" for each in group)])
            for title, group in GROUPS.items()
        ]
        statuses = "\n".join(["exit status:", *(f"  {status:<3}  {text}" for status, text in MEANINGS.items())])
        closing = "alight COMMAND --help shows options and examples; alight --version the version."
        return "\n\n".join(["usage: alight COMMAND ...", ABOUT, *groups, statuses, closing]) + "\n"

    def error(self, message: str) -> NoReturn:
        if "required: COMMAND" in message:  # an empty command line
            self.exit(ExitStatus.INVALID_ARGUMENTS, self.format_help())
        name = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose", message)
        near = _nearest(name[1]) if name else ""
        super().error(f"there is no command {name[1]!r}: did you mean {near}?" if name and near else message)


def _nearest(name: str) -> str:
    """Return the command that does what a function or another word of this name does, or is spelt most like it."""
    first = name.lower().replace("-", "_").partition("_")[0]
    same = SYNONYMS.get(first) or (first if first in COMMANDS else "")
    return same or next(iter(difflib.get_close_matches(name, COMMANDS, n=1)), "")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    overview = _Overview(prog="alight", description=ABOUT, allow_abbrev=False)
    overview.add_argument("--version", action="version", version=f"alight {__version__}")
    commands = overview.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        examples = "\n".join(["examples:" if len(command.examples) > 1 else "example:", *command.examples])
        added = commands.add_parser(
            name,
            help=command.purpose,
            description=command.purpose,
            epilog=examples.replace("\n", "\n  alight "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for add in command.arguments:
            add(added)
        if command.results:
            added.add_argument("--json", action="store_true", help="print results as JSON, for programs")
            added.add_argument("-q", "--quiet", action="store_true", help="no progress, no warnings: results alone")
        added.add_argument("--debug", action="store_true", help="show where in the code an error arose")
        added.set_defaults(
            run=command.run, default_of=added.get_default, **{} if command.results else {"json": False, "quiet": False}
        )
    return overview
