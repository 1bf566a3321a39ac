"""The command line: each command reads what the one before it wrote. Progress on stderr, results on stdout."""

import difflib
import gc
import os
import signal
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from alight.cli.command import ExitStatus
from alight.errors import AlightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit status."""
    try:
        with _repeated_interrupt():
            from alight.cli.parser import parser  # late: an interrupt while libraries load is one line, too

            options = parser().parse_args(arguments)
            return _run(options) if options.debug else _run_with_short_errors(options)
    except KeyboardInterrupt:
        pass
    gc.collect()  # what was running, a progress bar perhaps, is released first
    print("alight: interrupted, no partial file is left", file=sys.stderr)
    return ExitStatus.INTERRUPTED


@contextmanager
def _repeated_interrupt() -> Iterator[None]:
    """Raise an interrupt again every second until it arrives here: a library that loads can swallow one, or hide it.

    NumPy fails to import when it is interrupted, so an error after an interrupt is the interrupt.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGALRM)]
    try:
        yield
    except Exception:
        if interrupted.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)


def _run(options: Namespace) -> int:
    with warnings.catch_warnings():
        if options.quiet:
            warnings.simplefilter("ignore")
        warnings.showwarning = lambda message, *_, **__: print(f"alight: {_line(str(message))}", file=sys.stderr)
        result = options.run(options)
    if result is not None:
        print(result.as_json() if options.json else result.text)
    sys.stdout.flush()
    return ExitStatus.SUCCESS


def _run_with_short_errors(options: Namespace) -> int:
    """Run the command; an error is one line on stderr."""
    try:
        return _run(options)
    except BrokenPipeError:
        return _discard_output()
    except AlightError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}{_nearest(error)}" if error.filename else str(error))
    except ImportError as error:
        from alight.cli.getting_started import extra_of

        extra = extra_of(error.name or "")
        return _fail(f'{error}: pip install "alight[{extra}]"' if extra else str(error))
    except MemoryError as error:
        return _fail(f"out of memory ({error}): use a smaller batch, or fewer samples")
    except Exception as error:
        _fail(f"{type(error).__name__}: {error} (internal error of alight or of a library: --debug shows where)")
        return ExitStatus.INTERNAL_ERROR


def _fail(message: str) -> int:
    print(f"alight: {_line(message)}", file=sys.stderr)
    return ExitStatus.FAILURE


def _nearest(error: OSError) -> str:
    """Return which file may be meant instead of one that does not exist."""
    place = Path(str(error.filename))
    if not isinstance(error, FileNotFoundError) or not place.parent.is_dir():
        return ""
    found = difflib.get_close_matches(place.name, [each.name for each in place.parent.iterdir()], n=1)
    return f"; did you mean {found[0]}?" if found and found[0] != place.name else ": check the path"


def _line(message: str) -> str:
    return " ".join(part.strip() for part in message.splitlines() if part.strip())


def _discard_output() -> int:
    """Send the rest of the output nowhere, since its reader has closed it, so that Python reports nothing at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    return ExitStatus.BROKEN_PIPE
