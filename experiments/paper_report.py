"""All recorded networks of the experiments on one page to play with: `alight report` for the paper.

    python experiments/paper_report.py                # some ten seconds; writes build/experiments.html
    python experiments/paper_report.py -o page.html

The quick methods at every tenth of the budget; what takes longer is in paper_tables.py.
"""

import argparse
from pathlib import Path

from recorded_cifar100 import NETWORKS, TEXTS, budgets, load

from alight import Point, calibrate, sweep, write_report

PAGE = Path(__file__).parent.parent / "build" / "experiments.html"
METHODS = ("eero", "eero_marginal", "geometric", "gaussian", "global_threshold", "patience")


def points(name: str) -> list[Point]:
    """What the methods make of a recording."""
    kept = load(name)
    methods = {method: calibrate.METHODS[method] for method in METHODS}
    return sweep(methods, kept.costs, budgets(kept.costs, step=10), labelled=kept.calibration, test=kept.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    shown = {title: points(name) for name, title in (NETWORKS | TEXTS).items()}
    print(write_report(shown, options.output, title="The paper's experiments, run again"))


if __name__ == "__main__":
    main()
