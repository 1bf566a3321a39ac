"""One look for all figures: colours that survive colour-blindness, a marker for each colour, small SVG files."""

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alight.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (  # of Okabe and Ito
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
WIDTH = 4.4  # inches of one panel
HEIGHT = 3.3
SETTINGS: Any = {  # by matplotlib's names
    "svg.hashsalt": "alight",  # the same file each time
    "svg.fonttype": "none",  # letters stay letters: small, and found by a search
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "figure.dpi": 110,
}


class Look(NamedTuple):
    """How a method or a network is drawn, everywhere."""

    label: str
    colour: str
    marker: str
    line: str = "-"


METHODS = {
    "eero": Look("EERO, survivor thresholds", BLUE, "o"),
    "eero_marginal": Look("EERO, the paper's thresholds", RED, "s"),
    "geometric": Look("geometric (MSDNet's)", GREEN, "^"),
    "gaussian": Look("Gaussian", ORANGE, "v"),
    "patience": Look("patience", PURPLE, "D"),
    "best_single_exit": Look("best single exit", SKY, "P"),
    "oracle": Look("oracle (knows the labels)", BLACK, "", "--"),
    "single_exit": Look("each exit alone", BLACK, "x", ""),
}
RUNS = {
    "resnet18_frozen": Look("frozen, flat linear heads", RED, "s"),
    "resnet18_frozen_separable": Look("frozen, separable heads", ORANGE, "v"),
    "resnet18_joint": Look("joint", GREEN, "^"),
    "resnet18_mixed": Look("mixed", PURPLE, "D"),
    "resnet18_mixed_distilled": Look("mixed + distilled", BLUE, "o"),
    "convnext_frozen": Look("ConvNeXt, frozen", SKY, "P"),
    "msdnet_joint": Look("MSDNet", BLACK, "X"),
}


def panels(rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = HEIGHT, **options: Any) -> Any:
    """A figure and an array of its panels, (rows, columns)."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(SETTINGS)
    return pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False, **options
    )


def legend_below(figure: "Figure", panel: "Axes", columns: int = 3) -> None:
    """The panel's legend under the whole figure, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def save(figure: "Figure", path: Path, also: Path | None = None) -> None:
    """Write the figure as SVG; `also` is a folder for the same as PNG, to look at."""
    from matplotlib import pyplot

    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, small(text.getvalue()))
    if also:
        figure.savefig(also / f"{path.stem}.png", dpi=100)
    pyplot.close(figure)


def small(svg: str) -> str:
    """The same picture in a third of the bytes: coordinates to a hundredth of a point, no spaces, names or comments."""
    for pattern, put in (
        (r"<!--.*?-->", ""),
        (r'<g id="[^"]*">', "<g>"),
        (r"'DejaVu Sans', '[^;\"]*sans-serif", "'DejaVu Sans', Arial, sans-serif"),
        (r' transform="rotate\(-0 [^"]*"', ""),
    ):
        svg = re.sub(pattern, put, svg, flags=re.DOTALL)
    svg = re.sub(r' (?:x|y|points)="[^"]*"', lambda found: _rounded(found[0]), svg)
    svg = re.sub(r' d="[^"]*"', lambda found: re.sub(r'\s*([MLQCz"])\s*', r"\1", _rounded(found[0])), svg)
    svg = re.sub(r'style="[^"]*"', lambda found: re.sub(r"([:;]) ", r"\1", found[0]), svg)
    return re.sub(r">\s+<", "><", svg).strip() + "\n"


def _rounded(attribute: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", attribute)
