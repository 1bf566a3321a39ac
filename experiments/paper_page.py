"""The tables of docs/experiments.md, filled from results/.

    python experiments/paper_page.py        # `make figures` does it; seconds

Each table stands between the markers of its name. A test holds the page against this.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from page_rows import Rows, gain_cell, markdown, percents, table, values
from paper_claims import reviewer
from paper_seeds_page import frozen, frozen_losses, frozen_shares
from recorded_cifar100 import MODES, NETWORKS, PUBLISHED, RESULTS, TEXTS, USUAL, rows, usual
from recorded_cifar100 import RUNS as RUN_ROWS

from alight.files import write_text

PAGE = RESULTS.parent / "docs" / "experiments.md"
PLAIN = "resnet18_plain"
MODE_SPENDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
TEXT_METHODS = ("eero", "eero_marginal", "geometric", "gaussian", "global_threshold", "patience", "optimal_stopping")
TEXT_SPENDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TOLERANCE = 0.5  # points that half of the FLOPs may lose


def trainings() -> str:
    """Every training: epochs, seconds, and the accuracy of every exit."""
    found = rows(RUN_ROWS)
    keys = dict.fromkeys((row["run"], row["seed"], row["calibration_images"]) for row in found)
    lines = []
    for run, seed, images in keys:
        own = [row for row in found if (row["run"], row["seed"], row["calibration_images"]) == (run, seed, images)]
        made = own[0]
        name = f"`{run}`" if images == USUAL else f"`{run}`, {images} calibration images"
        lines.append(
            [
                name,
                seed,
                made["epochs"],
                f"{float(made['seconds']):.0f}",
                percents(own, "test_accuracy", 2),
                f"{100 * float(own[-1]['calibration_accuracy']):.1f}",
                made["date"],
                f"`{made['commit']}`",
            ]
        )
    header = [
        "training",
        "seed",
        "epochs",
        "seconds",
        "test accuracy of each exit, %",
        "last, calibration",
        "date",
        "commit",
    ]
    hardware = ", ".join(dict.fromkeys(row["hardware"] for row in found))
    versions = ", ".join(dict.fromkeys(row["versions"] for row in found))
    return markdown(header, lines) + f"\n\n{hardware}; {versions}."


def epsilon_table() -> str:
    """Risk, prior, planned weight and observed shares of every exit of ConvNeXt for three budgets."""
    own = table("weights")
    budgets = list(dict.fromkeys(row["budget"] for row in own))
    header = ["exit", "risk", "prior"]
    for budget in budgets:
        header += [f"{float(budget):.0%}: planned", "observed", "observed, the paper's thresholds"]
    lines = []
    for number in dict.fromkeys(row["exit"] for row in own):
        at = [row for row in own if row["exit"] == number]
        line = [number, f"{float(at[0]['risk']):.2f}", f"{float(at[0]['prior']):.2f}"]
        for row in at:
            line += [f"{float(row[name]):.2f}" for name in ("planned", "observed", "observed_marginal")]
        lines.append(line)
    return markdown(header, lines)


def gains() -> str:
    """What EERO gains on published methods at equal spent budget, with intervals."""
    spends = list(dict.fromkeys(row["spent"] for row in table("gains")))
    lines = []
    for network, title in NETWORKS.items():
        for rival in PUBLISHED:
            cells = {row["spent"]: row for row in table("gains", network=network, rival=rival)}
            lines.append([title, rival, *(gain_cell(cells.get(spend)) for spend in spends)])
    return markdown(["network", "EERO over", *(f"{float(spend):.0%}" for spend in spends)], lines)


def seeds() -> str:
    """For every training with exits, what EERO gains on average over spent budgets."""
    found = usual(MODES)
    spends = [spend / 100 for spend in range(20, 91, 5)]
    lines = []
    for run, seed in dict.fromkeys((row["run"], row["seed"]) for row in found):
        curves = {
            method: [row for row in found if (row["run"], row["seed"], row["method"]) == (run, seed, method)]
            for method in ("eero", *PUBLISHED)
        }
        cells = []
        for rival in PUBLISHED:
            both = [(_accuracy_at(curves["eero"], spend), _accuracy_at(curves[rival], spend)) for spend in spends]
            gain = [100 * (own - other) for own, other in both if own is not None and other is not None]
            cells.append(f"{np.mean(gain):+.2f} ({min(gain):+.2f} to {max(gain):+.2f})")
        lines.append([f"`{run}`", seed, *cells])
    return markdown(["training", "seed", *(f"EERO over {rival}" for rival in PUBLISHED)], lines)


def modes() -> str:
    """EERO's accuracy at spent budgets for every way to train, beside the plain networks."""
    found = [row for row in usual(MODES) if row["method"] == "eero"]
    lines = []
    for run, seed in dict.fromkeys((row["run"], row["seed"]) for row in found):
        if run.startswith("resnet18"):
            own = [row for row in found if (row["run"], row["seed"]) == (run, seed)]
            lines.append([f"`{run}`", seed, *(_at(own, spend) for spend in MODE_SPENDS), _last(run, seed)])
    header = ["training", "seed", *(f"{spend:.0%} spent" for spend in MODE_SPENDS), "last exit, 100 %"]
    plain = [
        f"`{run}` {', '.join(_last(run, seed) for seed in _seeds(run))}"
        for run in (PLAIN, "resnet18_longer", "resnet10_plain")
    ]
    return (
        markdown(header, lines) + f"\n\nPlain networks, each seed: {'; '.join(plain)} (ResNet-10: 46 % of the FLOPs)."
    )


def _at(own: Rows, spend: float) -> str:
    found = _accuracy_at(own, spend)
    return "–" if found is None else f"{100 * found:.1f}"


def _accuracy_at(own: Rows, spend: float) -> float | None:
    """Accuracy where so much is spent, None where it never is."""
    ordered = sorted(own, key=lambda row: float(row["spent"]))
    spent = values(ordered, "spent")
    if not spent[0] <= spend <= spent[-1]:
        return None
    return float(np.interp(spend, spent, values(ordered, "accuracy")))


def _seeds(run: str) -> list[str]:
    return list(dict.fromkeys(row["seed"] for row in usual(RUN_ROWS) if row["run"] == run))


def _last_accuracy(run: str, seed: str) -> float:
    return [float(row["test_accuracy"]) for row in usual(RUN_ROWS) if (row["run"], row["seed"]) == (run, seed)][-1]


def _last(run: str, seed: str) -> str:
    return f"{100 * _last_accuracy(run, seed):.2f}"


def half() -> str:
    """What half of the FLOPs reach, beside plain training with the same seed."""
    lines = []
    run = "resnet18_mixed_distilled"
    for seed in _seeds(run):
        own = [row for row in usual(MODES) if (row["run"], row["seed"], row["method"]) == (run, seed, "eero")]
        reached = _accuracy_at(own, 0.5)
        if reached is None:
            raise SystemExit(f"{run}-{seed} never spends half of the FLOPs: sweep more budgets")
        behind = 100 * (_last_accuracy(PLAIN, seed) - reached)
        verdict = "reached" if behind <= TOLERANCE else "missed"
        lines.append(
            f"- seed {seed}: EERO at 50 % spent {100 * reached:.2f} %, plain network at 100 % {_last(PLAIN, seed)} %:"
            f" {-behind:+.2f} points (aim: at least -{TOLERANCE}); {verdict}."
        )
    return "\n".join(lines)


def overthinking() -> str:
    """What the last exit gets wrong that an earlier one gets right."""
    lines = []
    for network, title in NETWORKS.items():
        own = table("overthinking", network=network)
        last = own[-1]
        better = [row["exit"] for row in own[:-1] if float(row["accuracy"]) > float(last["accuracy"])]
        lines.append(
            [
                title,
                f"{100 * float(last['accuracy']):.2f}",
                ", ".join(better) or "none",
                f"{100 * float(own[-2]['right_so_far_wrong_last']):.1f}",
                f"{100 * float(last['oracle_accuracy']):.1f}",
                f"{100 * float(last['oracle_spent']):.0f} %",
            ]
        )
    header = ["network", "last exit, %", "earlier exits above it", "some early exit right, last wrong, %"]
    return markdown([*header, "oracle, %", "oracle spends"], lines)


def texts() -> str:
    """Exits of MiniLM, and methods at equal spent budget."""
    lines = []
    for network, title in TEXTS.items():
        for method in ("single_exit", *TEXT_METHODS):
            own = table("texts", network=network, method=method)
            named = "mixtures of exits alone" if method == "single_exit" else f"`{method}`"
            lines.append([title, named, *(_at(own, spend) for spend in TEXT_SPENDS)])
    exits = "; ".join(
        f"{title}: {percents(table('texts', network=network, method='single_exit'), 'accuracy')}"
        for network, title in TEXTS.items()
    )
    header = ["network", "method", *(f"{spend:.0%}" for spend in TEXT_SPENDS)]
    return f"Test accuracy of each exit alone, %: {exits}.\n\n" + markdown(header, lines)


def calibration_sizes() -> str:
    """How a budget of half of the FLOPs is kept, by calibration images."""
    networks = list(dict.fromkeys(row["network"] for row in table("calibration_size")))
    methods = list(dict.fromkeys(row["method"] for row in table("calibration_size")))
    sizes = list(dict.fromkeys(row["calibration_images"] for row in table("calibration_size")))
    lines = []
    for network in networks:
        for method in methods:
            cells = {
                row["calibration_images"]: row for row in table("calibration_size", network=network, method=method)
            }
            lines.append([f"`{network}`", method, *(_kept(cells.get(size)) for size in sizes)])
    return markdown(["network", "method", *(f"N = {size}" for size in sizes)], lines)


def _kept(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    accuracy, use, over = (100 * float(row[name]) for name in ("accuracy", "budget_use", "share_over_budget"))
    return f"{accuracy:.1f}, {use:.1f} %, {over:.0f} %"


PARTS: dict[str, Callable[[], str]] = {
    "trainings": trainings,
    "epsilon_table": epsilon_table,
    "gains": gains,
    "seeds": seeds,
    "frozen": frozen,
    "frozen losses": frozen_losses,
    "frozen shares": frozen_shares,
    "modes": modes,
    "half": half,
    "overthinking": overthinking,
    "calibration sizes": calibration_sizes,
    "texts": texts,
    "reviewer": reviewer,
}


def page(text: str) -> str:
    """The page with the tables of results/ between its markers."""
    for name, part in PARTS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + part() + "\n" + rest[rest.index(end) :]
    return text


def main(path: Path = PAGE) -> None:
    write_text(path, page(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
