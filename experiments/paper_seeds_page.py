"""The parts of docs/experiments.md about all seeds with frozen heads, from what paper_seeds.py wrote."""

import numpy as np
from page_rows import Rows, gain_cell, markdown, table, values
from recorded_cifar100 import FROZEN, NETWORKS, PACKAGED, PUBLISHED

BEST, ALL = "best", "mean"
TITLES = {network: NETWORKS[network] for network in FROZEN} | PACKAGED
CHANGED = {
    "eero": "as it is",
    "eero, risks of the test": "with the risks of the test images",
    "eero, flat prior": "with a flat prior",
    "eero, first half closed": "with the first half of the exits closed",
}
LAST = 2  # exits that are told together, as are the first quarter and those between


def frozen() -> str:
    """What EERO gains at spent budgets that all seeds reach: on each rival, and on the best of them seed by seed."""
    lines = []
    for network, title in TITLES.items():
        found = table("frozen_seeds", network=network, method="eero")
        for spent in [row["spent"] for row in _of(found, seed=ALL, rival=BEST)]:
            at = _of(found, spent=spent)
            means = [gain_cell(_of(at, seed=ALL, rival=rival)[0]) for rival in (*PUBLISHED, BEST)]
            seeds = [_short(row) for row in _of(at, rival=BEST) if row["seed"] != ALL]
            redrawn = _redrawn(_of(at, seed=ALL, rival=BEST)[0])
            lines.append([title, f"{float(spent):.0%}", *means, ", ".join(seeds), redrawn])
    over = [f"over {rival}" for rival in (*PUBLISHED, "the best of the three")]
    return markdown(["network", "spent", *over, "seed by seed", "other calibration images"], lines)


def frozen_losses() -> str:
    """Where a seed is below the best rival beyond its interval, and what that becomes when something is changed."""
    found = table("frozen_seeds")
    lines = []
    for row in found:
        if row["method"] == "eero" and row["rival"] == BEST and row["seed"] != ALL and float(row["high"]) < 0:
            where = {name: row[name] for name in ("network", "seed", "rival", "spent")}
            changed = [_of(found, method=method, **where) for method in CHANGED]
            cells = [_changed(each, row) for each in changed]
            lines.append([TITLES[row["network"]], row["seed"], f"{float(row['spent']):.0%}", *cells, _redrawn(row)])
    return markdown(["network", "seed", "spent", *CHANGED.values(), "as it is, other calibration images"], lines)


def frozen_shares() -> str:
    """Who leaves where, and how many points are lost because they did not stay to the end."""
    found = table("frozen_shares")
    lines = []
    for network, seed, method in dict.fromkeys((row["network"], row["seed"], row["method"]) for row in found):
        own = _of(found, network=network, seed=seed, method=method)
        first = len(own) // 4
        groups = (own[:first], own[first:-LAST], own[-LAST:])
        told = [f"{own[0]['budget']} ({100 * float(own[0]['spent']):.1f} %)", *(_left(group) for group in groups)]
        lines.append([TITLES[network], seed, method, *told, f"{_lost(own):.1f}"])
    header = ["network", "seed", "method", "budget (spent)", "first quarter of the exits", "between", "last two"]
    return markdown([*header, "lost in all"], lines)


def _changed(found: Rows, row: dict[str, str]) -> str:
    """A gain beside that of EERO as it is; a dash where the change changes nothing."""
    same = not found or (found[0]["method"] != row["method"] and found[0]["gain"] == row["gain"])
    return gain_cell(None if same else found[0])


def _left(group: Rows) -> str:
    """Their share, how many of them are right there and at the end, and the points lost."""
    share = values(group, "observed").sum()
    if not share:
        return "–"
    right, at_end = (100 * values(group, name).sum() / share for name in ("right", "right_at_end"))
    return f"{100 * share:.1f} %: {right:.0f} % right, {at_end:.0f} % at the end, {_lost(group):.1f} lost"


def _lost(group: Rows) -> float:
    return float(100 * np.sum(values(group, "right_at_end") - values(group, "right")))


def _of(rows: Rows, **where: str) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def _short(row: dict[str, str]) -> str:
    text = f"{100 * float(row['gain']):+.1f}"
    return f"**{text}**" if float(row["high"]) < 0 else text


def _redrawn(row: dict[str, str]) -> str:
    """Mean and standard deviation over draws of calibration images, and in how many EERO is below."""
    if not row["redrawn"]:
        return "–"
    mean, deviation = (100 * float(row[name]) for name in ("redrawn", "redrawn_deviation"))
    return f"{mean:+.1f} ± {deviation:.1f}, below in {float(row['redrawn_below']):.0%}"
