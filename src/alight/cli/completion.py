"""`alight completion`: scripts by which shells complete words, made from the parser, so that a Tab runs no Python."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from alight.cli.command import Command, Found

SETUP = {
    "bash": 'eval "$(alight completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(alight completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "alight completion fish > ~/.config/fish/completions/alight.fish",
}


OVERVIEW = {"--help": "show all commands", "--version": "show the version"}  # what stands without a command


@dataclass(frozen=True)
class Option:
    """An option of a command, or what stands without one."""

    names: tuple[str, ...]  # none of a word that stands for itself
    choices: tuple[str, ...]
    takes_value: bool
    purpose: str


@dataclass(frozen=True)
class Word:
    """A command and all that may follow it."""

    name: str
    purpose: str
    options: tuple[Option, ...]

    @property
    def positional_choices(self) -> tuple[str, ...]:
        """What may stand without an option, where that is known."""
        return tuple(choice for each in self.options if not each.names for choice in each.choices)


def run_completion(options: argparse.Namespace) -> Found:
    """Write what lets a shell complete commands and options."""
    from alight.cli.parser import COMMANDS, parser  # which knows this command

    parsers = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    words = [Word(name, COMMANDS[name].purpose, tuple(_options(each))) for name, each in parsers.items()]
    return Found(SHELLS[options.shell](words).rstrip("\n"), None)


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        purpose = (action.help or "").replace("%%", "%")
        yield Option(tuple(action.option_strings), choices, action.nargs != 0, purpose)


def bash(words: list[Word]) -> str:
    """The script for bash, old ones too: files where nothing better is known."""
    names = " ".join(word.name for word in words)
    values = [
        f'        "{word.name} {name}") _alight_words "{" ".join(option.choices)}"; return ;;'
        for word in words
        for option in word.options
        for name in option.names
        if option.choices
    ]
    listed = [
        f'        {word.name}) _alight_words "{" ".join(name for each in word.options for name in each.names)}" ;;'
        for word in words
    ]
    free = [
        f'        {w.name}) _alight_words "{" ".join(w.positional_choices)}" ;;' for w in words if w.positional_choices
    ]
    return "\n".join(
        [
            f"# {SETUP['bash']}",
            "_alight_words() {",
            '    COMPREPLY=($(compgen -W "$1" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "_alight() {",
            "    COMPREPLY=()",
            '    local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}"',
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        _alight_words "{names} {" ".join(OVERVIEW)}"; return',
            "    fi",
            '    case "$command ${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            "    esac",
            '    if [ "${word#-}" != "$word" ]; then',
            '        case "$command" in',
            *(f"    {line}" for line in listed),
            "        esac",
            "        return",
            "    fi",
            '    case "$command" in',
            *free,
            "    esac",
            "}",
            "complete -o default -F _alight alight",
            "",
        ]
    )


def zsh(words: list[Word]) -> str:
    """The script for zsh."""
    lines = ["#compdef alight", f"# {SETUP['zsh']}", "_alight() {", "    local -a commands=("]
    lines += [f"        '{_escaped(word.name, ':')}:{_escaped(word.purpose, '')}'" for word in words]
    lines += ["    )", "    local -a options=(", *(f"        '{name}:{told}'" for name, told in OVERVIEW.items())]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe 'command' commands",
        "        _describe -o 'option' options",
        "        return",
        "    fi",
    ]
    lines += ['    case "$words[2]" in']
    for word in words:
        lines.append(f"        {word.name})")
        lines.append("            _arguments \\")
        for option in word.options:
            lines += [f"                {_zsh_option(name, option)} \\" for name in option.names]
        rest = f"({' '.join(word.positional_choices)})" if word.positional_choices else "_files"
        lines += [f"                '2:word:{rest}' '*:file:_files' ;;"]
    return "\n".join([*lines, "    esac", "}", "compdef _alight alight", ""])


def _zsh_option(name: str, option: Option) -> str:
    told = f"{name}[{_escaped(option.purpose, '[]:')}]"
    if not option.takes_value:
        return f"'{told}'"
    return f"'{told}:value:{'(' + ' '.join(option.choices) + ')' if option.choices else '_files'}'"


def fish(words: list[Word]) -> str:
    """The script for fish."""
    lines = [f"# {SETUP['fish']}"]
    lines += [f"complete -c alight -n __fish_use_subcommand -l {n[2:]} -d '{told}'" for n, told in OVERVIEW.items()]
    for word in words:
        told = f"-d '{_fish_text(word.purpose)}'"
        lines.append(f"complete -c alight -n __fish_use_subcommand -f -a {word.name} {told}")
    for word in words:
        start = f"complete -c alight -n '__fish_seen_subcommand_from {word.name}'"
        if word.positional_choices:
            lines.append(f"{start} -f -a '{' '.join(word.positional_choices)}'")
        for option in word.options:
            if option.names:
                names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
                value = f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r" * option.takes_value
                lines.append(f"{start} {names}{value} -d '{_fish_text(option.purpose)}'")
    return "\n".join([*lines, ""])


def _escaped(text: str, special: str) -> str:
    """Text inside single quotes of zsh, with a backslash before what is special there."""
    text = text.replace("\\", "\\\\")
    for sign in special:
        text = text.replace(sign, f"\\{sign}")
    return text.replace("'", "'\\''")


def _fish_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


SHELLS: dict[str, Callable[[list[Word]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="; ".join(f"{name}: {how}" for name, how in SETUP.items()))


COMMANDS = (
    Command(
        "completion",
        run_completion,
        _arguments,
        ("completion bash", "completion zsh", "completion fish"),
        results=False,
    ),
)
