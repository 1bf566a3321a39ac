"""One command from its words to its exit status: errors are one line, results stand on stdout alone."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from alight.cli import DONE, FAULT, REFUSED, UNREAD
from alight.cli.extras import extra_of
from alight.cli.parser import parser
from alight.errors import AlightError


def run(arguments: Sequence[str] | None) -> int:
    """The exit status of a command line."""
    options = parser().parse_args(arguments)
    if options.debug:
        return _run(options)
    try:
        return _run(options)
    except BrokenPipeError:
        return _unread()
    except AlightError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ImportError as error:
        extra = extra_of(error.name or "")
        return _fail(f'{error}: pip install "alight[{extra}]"' if extra else str(error))
    except MemoryError as error:
        return _fail(f"the memory is full ({error}): take a smaller batch, or fewer samples")
    except Exception as error:
        _fail(f"{type(error).__name__}: {error} (a fault of alight or of a library: --debug shows where)")
        return FAULT


def _run(options: argparse.Namespace) -> int:
    with _warnings_in_a_line(options.quiet):
        found = options.run(options)
    if found is not None:
        print(found.as_json() if options.json else found.text)
    sys.stdout.flush()
    return DONE


@contextmanager
def _warnings_in_a_line(quiet: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        warnings.showwarning = lambda message, *_, **__: print(f"alight: {_line(str(message))}", file=sys.stderr)
        yield


def _fail(message: str) -> int:
    print(f"alight: {_line(message)}", file=sys.stderr)
    return REFUSED


def _line(message: str) -> str:
    return " ".join(part.strip() for part in message.splitlines() if part.strip())


def _unread() -> int:
    """Nobody reads any more: what is still to be written goes nowhere, so that nothing complains at the end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    return UNREAD
