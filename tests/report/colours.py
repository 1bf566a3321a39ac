"""How far two colours are apart, as the guidelines for accessible pages (WCAG 2) measure it."""

import numpy as np


def luminance(color: str) -> float:
    """The relative luminance of a colour such as rgb(30, 34, 39)."""
    channels = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(first: float, second: float) -> float:
    """The ratio of two luminances: text needs 4.5 at least."""
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)
