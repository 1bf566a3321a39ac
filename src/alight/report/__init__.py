"""Show me: the points of a sweep as one HTML page that opens from disk and asks nothing of any network.

    write_report(points, "report.html", title="ResNet-18 on CIFAR-100")
    small = ReportedNetwork(points, exits=model.exits, examples=examples(images, policies, test))
    write_report({"small": small, "large": others}, "report.html")

The page is drawn in the browser by d3 and Observable Plot, which it carries along (`assets/`).
"""

from alight.report.page import Baseline, MeasuredSpeed, ReportedNetwork, as_html, write_report
from alight.report.samples import Examples, SampleWalk, examples, read_images

__all__ = [
    "Baseline",
    "Examples",
    "MeasuredSpeed",
    "ReportedNetwork",
    "SampleWalk",
    "as_html",
    "examples",
    "read_images",
    "write_report",
]
