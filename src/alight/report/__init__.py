"""Show me: the points of a sweep as one HTML page that opens from disk and asks nothing of any network.

    write_report(points, "report.html", title="ResNet-18 on CIFAR-100")

The page is drawn in the browser by d3 and Observable Plot, which it carries along (`assets/`).
"""

from alight.report.page import write_report

__all__ = ["write_report"]
