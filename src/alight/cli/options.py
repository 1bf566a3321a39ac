"""Options that several commands take, and what their words mean."""

import argparse
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alight import calibrate
from alight.errors import BadInput
from alight.files import check_writable


def output(text: str) -> str:
    """A file that can be written to, checked before the work begins."""
    try:
        check_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from error
    return text


def output_folder(text: str) -> str:
    """A folder that is there or can be made, checked before the work begins."""
    target = Path(text).resolve()
    there = next(path for path in (target, *target.parents) if path.exists())
    if not text or not there.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {there if text else 'an empty name'} is no folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: nothing may be written to {there}")
    return text


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers, as 1,64."""
    return tuple(count(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers, as 0.5,0.5,0.5."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, as 0.5,0.5,0.5") from error


def words(text: str) -> list[str]:
    """Words, as layer1,layer2."""
    return text.split(",")


def words_or_auto(text: str) -> str | list[str]:
    """Words, or auto."""
    return text if text == "auto" else text.split(",")


def methods(text: str) -> list[str]:
    """Methods, as eero,geometric."""
    names = text.split(",")
    if unknown := [name for name in names if name not in calibrate.METHODS]:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}: choose among {', '.join(calibrate.METHODS)}")
    return names


def set_option(parser: argparse.ArgumentParser, what: str) -> None:
    """--set NAME=VALUE, as often as needed."""
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=what)


def output_option(
    parser: argparse.ArgumentParser, default: str | None, what: str = "", kind: Callable[[str], str] = output
) -> None:
    """-o, --output FILE."""
    told = ", ".join(part for part in (what, f"default: {default}" if default else "") if part)
    parser.add_argument("-o", "--output", metavar="FILE", type=kind, default=default, help=told)


def device_option(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument("--device", help="default: cuda if there is one")


def own_options(
    method: Callable[..., Any], settings: Sequence[str], taken: Sequence[str] = (), *, progress: bool = True
) -> dict[str, Any]:
    """A function's own keyword arguments, from name=value; those taken have an option of their own."""
    parameters = inspect.signature(method).parameters.items()
    known = [name for name, each in parameters if each.kind is each.KEYWORD_ONLY and name not in taken]
    values: dict[str, Any] = {}
    if "progress" in known:
        known.remove("progress")
        values["progress"] = progress
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name not in known or not equals:
            raise BadInput(f"--set {setting!r}: write NAME=VALUE with NAME one of {', '.join(known) or 'none here'}")
        values[name] = _value(value)
    return values


def any_options(settings: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for a function that takes any, from name=value."""
    if odd := [setting for setting in settings if "=" not in setting]:
        raise BadInput(f"--set {odd[0]!r}: write NAME=VALUE")
    return {setting.partition("=")[0]: _value(setting.partition("=")[2]) for setting in settings}


def distinct(*paths: str | None) -> None:
    """Refuse a command that would write over what it reads, or write one file twice."""
    given = [Path(path).resolve() for path in paths if path]
    if len(set(given)) < len(given):
        twice = next(path for path in given if given.count(path) > 1)
        raise BadInput(f"{twice} is named twice among inputs and outputs: give each its own file")


def _value(text: str) -> float | int | bool | str | list[float] | None:
    named = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        return [float(part) for part in text.split(",")] if "," in text else text
    except ValueError:
        return text
