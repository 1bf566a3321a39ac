"""The command line: each command reads what the one before it wrote. Progress on stderr, results on stdout.

Exit status:
    0    done
    1    it cannot be done: the data, the budget, a file or a missing library, in one line on stderr
    2    the command makes no sense as it was written
    3    a fault of alight or of a library; --debug shows where
    130  interrupted (Ctrl-C), nothing half-written is left
    141  whoever read the output has gone, as in `alight sweep ... | head -1`
"""

import sys
from collections.abc import Sequence

DONE, REFUSED, MISUSED, FAULT, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line, by default that of this process."""
    try:
        from alight.cli.running import run  # late: an interrupt while libraries load is one line, too

        return run(arguments)
    except KeyboardInterrupt:
        pass  # what was running, a progress bar perhaps, is let go first
    print("alight: interrupted, nothing half-written is left", file=sys.stderr)
    return INTERRUPTED
