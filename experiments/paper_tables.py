"""The numbers behind every figure and table of the paper, and beyond, from the recordings in results/.

    python experiments/paper_tables.py                      # all of them
    python experiments/paper_tables.py weights two_exits    # some

Writes results/paper/NAME.csv for each of TABLES and results/paper/made.json (hardware, versions, date, commit and
seconds). Needs no network and no GPU: two minutes on two cores, most of it `genetic` and `auto` in the sweep. The
networks are those of cifar100_train.py, as cifar100_ship.py kept them. `paper_figures.py` draws what this writes.
"""

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
from recorded_cifar100 import NETWORKS, RESULTS, TEXTS, Result, budgets, load

from alight import Costs, HeadOutputs, calibrate, recordings, replay, sweep
from alight.budgeting.rates import inverse_cost_prior
from alight.evaluation import bootstrap, oracle, oracle_within
from alight.files import write_text
from alight.provenance import provenance

FOLDER = RESULTS / "paper"
SEED, DRAWS = 0, 1000  # of the bootstrap over test images
ROUNDING = 1e-9  # of a spent share, which is a sum over images
SLOW = ("genetic", "auto")  # seconds for one budget
FAST = tuple(name for name in calibrate.METHODS if name not in SLOW)
RIVALS = ("eero_marginal", "geometric", "gaussian", "patience", "best_single_exit")
SPENDS = tuple(percent / 100 for percent in range(20, 101, 10))  # of the full network
EARLY = (2, 3, 4)  # auxiliary heads that the paper takes one at a time, counted from 1
WEIGHED = {"convnext_frozen": ("20%", "50%", "80%")}  # a small, a medium and a large budget
TEMPERATURES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
SIZES = (100, 200, 500, 1000, 2000, 5000)  # calibration images
REPEATS = 40  # draws of calibration images
SIZE_BUDGET = "50%"
EXACT_SIZES = (1000,)  # for which the exact slack is computed too: seconds for some draws
SCORED = "resnet18_frozen"  # the recording with several scores

Row = dict[str, object]
Floats = npt.NDArray[np.float64]


def sweep_rows(network: str, methods: Sequence[str] = tuple(calibrate.METHODS), step: int = 5) -> Iterator[Row]:
    """All methods at all budgets, with bootstrap intervals; the oracle and each exit alone beside them."""
    result = load(network)
    fast, slow = ([name for name in methods if (name in SLOW) == is_slow] for is_slow in (False, True))
    for names, width in ((fast, step), (slow, 2 * step)):
        if not names:
            continue
        points = sweep(
            {name: calibrate.METHODS[name] for name in names},
            result.costs,
            budgets(result.costs, width),
            labelled=result.calibration,
            test=result.test,
            references=names is fast,
            seed=SEED,
        )
        for point in points:
            plain = point.full_cost
            yield {
                "network": network,
                "method": point.method,
                "allowed": point.budget / plain,
                "spent": point.mean_cost / plain,
                "spent_low": point.mean_cost_low / plain,
                "spent_high": point.mean_cost_high / plain,
                "accuracy": point.accuracy,
                "low": point.accuracy_low,
                "high": point.accuracy_high,
            }


def gain_rows(network: str, rivals: Sequence[str] = RIVALS) -> Iterator[Row]:
    """What `eero` gains on others at equal spent budget, in accuracy, with paired intervals."""
    result = load(network)
    draws = draws_of_test(len(result.test))
    own = curve(calibrate.eero, result, draws)
    for rival in rivals:
        other = curve(calibrate.METHODS[rival], result, draws)
        for row in _gains(own, other):
            yield {"network": network, "rival": rival, **row}


def score_rows() -> Iterator[Row]:
    """What the margin gains on other scores at equal spent budget."""
    result = load(SCORED)
    draws = draws_of_test(len(result.test))
    for name in ("eero", "global_threshold"):
        method = calibrate.METHODS[name]
        own = curve(method, result, draws)
        for score in result.test.features:
            calibration, test = (table.with_score(score) for table in (result.calibration, result.test))
            other = curve(method, Result(result.run, calibration, test, result.costs), draws)
            for row in _gains(own, other):
                yield {"network": SCORED, "method": name, "score": score, **row}


def label_rows(network: str) -> Iterator[Row]:
    """What labels gain: the same methods, calibrated with and without them."""
    result = load(network)
    draws = draws_of_test(len(result.test))
    for name in ("eero", "optimal_stopping", "search"):
        blind = partial(_without_labels, calibrate.METHODS[name])
        own, other = (curve(method, result, draws, step=10) for method in (calibrate.METHODS[name], blind))
        for row in _gains(own, other):
            yield {"network": network, "method": name, **row}


def _without_labels(method: calibrate.Method, costs: Costs, budget: str, labelled: HeadOutputs) -> object:
    return method(costs, budget, labelled.unlabelled())


def temperature_rows(network: str, temperatures: Sequence[float] = TEMPERATURES) -> Iterator[Row]:
    """`eero` with other temperatures: what it spends and reaches where so much is allowed, and where it is spent."""
    result = load(network)
    draws = np.full((1, len(result.test)), 1 / len(result.test))
    for spend_all in (False, True):
        for temperature in temperatures:
            method = partial(calibrate.eero, temperature=temperature, spend_all=spend_all)
            accuracy, spent = (table[0] for table in curve(method, result, draws))
            allowed = [result.costs.budget(each) / result.costs.full for each in budgets(result.costs)]
            for budget in (0.3, 0.5, 0.7):
                at = allowed.index(budget)
                reached = spent.min() <= budget <= spent.max()
                yield {
                    "network": network,
                    "temperature": temperature,
                    "spend_all": spend_all,
                    "budget": budget,
                    "spent": spent[at],
                    "accuracy": accuracy[at],
                    "accuracy_at_equal_spend": interpolated(budget, accuracy, spent) if reached else "",
                }


def size_rows(network: str, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Iterator[Row]:
    """How well a budget is kept, and what is reached, by the number of calibration images.

    Calibration images are drawn from those held out and those of the test together, which no network was trained on;
    the rest are tested on. So calibration and test are exchangeable here, whatever the one split was.
    """
    calibration, test, costs = _tables(network)
    pool = HeadOutputs.joined([calibration, test])
    budget = costs.budget(SIZE_BUDGET)
    methods: dict[str, Callable[..., object]] = {
        "eero": calibrate.eero,
        "eero, exact slack": partial(calibrate.eero, slack="exact"),
        "eero, no labels": partial(_without_labels, calibrate.eero),
        "eero_marginal": calibrate.eero_marginal,
        "geometric": calibrate.geometric,
    }
    for size in sizes:
        dice = np.random.default_rng(SEED)
        own = {name: method for name, method in methods.items() if "exact" not in name or size in EXACT_SIZES}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in own}
        for _ in range(repeats):
            order = dice.permutation(len(pool))
            drawn, rest = pool.take(order[:size]), pool.take(order[size:])
            for name, method in own.items():
                decisions = replay(method(costs, budget, drawn), rest)  # type: ignore[arg-type]
                found[name].append((decisions.accuracy(rest.truth()), decisions.mean_cost / budget))
        for name, values in found.items():
            accuracies, uses = np.array(values).T
            yield {
                "network": network,
                "method": name,
                "calibration_images": size,
                "draws": len(values),
                "accuracy": accuracies.mean(),
                "accuracy_deviation": accuracies.std(ddof=1),
                "budget_use": uses.mean(),
                "budget_use_deviation": uses.std(ddof=1),
                "share_over_budget": (uses > 1).mean(),
                "most_used": uses.max(),
            }


def _tables(network: str) -> tuple[HeadOutputs, HeadOutputs, Costs]:
    if network in NETWORKS:
        result = load(network)
        return result.calibration, result.test, result.costs
    return recordings.load(network)


def two_exit_rows(network: str = "resnet18_frozen", early: Sequence[int] = EARLY) -> Iterator[Row]:
    """One auxiliary head and the last: `two_exits` and the oracle at every budget."""
    result = load(network)
    last, labels = len(result.costs) - 1, result.test.known_labels("two exits")
    for head in early:
        pair = (head - 1, last)
        costs, test = Costs.from_cumulative(result.costs.cumulative(pair)), result.test.at_exits(pair)
        for share in np.linspace(costs.cumulative()[0], costs.cumulative()[1], 21) / result.costs.full:
            budget = float(share * result.costs.full)
            decisions = replay(
                calibrate.two_exits(result.costs, budget, result.calibration, early=head - 1), result.test
            )
            intervals = bootstrap(decisions, labels, np.random.default_rng(SEED))
            best = oracle_within(costs, budget, test)
            yield {
                "network": network,
                "head": head,
                "allowed": share,
                "spent": decisions.mean_cost / result.costs.full,
                "accuracy": decisions.accuracy(labels),
                "low": intervals.accuracy.low,
                "high": intervals.accuracy.high,
                "oracle_spent": best.mean_cost / result.costs.full,
                "oracle_accuracy": best.accuracy(labels),
            }


def overthinking_rows(network: str) -> Iterator[Row]:
    """How many images an early exit gets right and the last wrong, and the other way round."""
    result = load(network)
    right = result.test.correct()
    best = oracle(result.costs, result.test)
    for index, name in enumerate(result.run["exits"]):
        yield {
            "network": network,
            "exit": index + 1,
            "name": name,
            "share_alone": result.costs.alone[index] / result.costs.full,
            "accuracy": right[:, index].mean(),
            "calibration_accuracy": result.calibration.correct()[:, index].mean(),
            "right_here_wrong_last": (right[:, index] & ~right[:, -1]).mean(),
            "wrong_here_right_last": (~right[:, index] & right[:, -1]).mean(),
            "right_so_far_wrong_last": (right[:, : index + 1].any(axis=1) & ~right[:, -1]).mean(),
            "oracle_accuracy": best.accuracy(result.test.truth()),
            "oracle_spent": best.mean_cost / result.costs.full,
        }


def weight_rows(network: str) -> Iterator[Row]:
    """Planned and observed shares of every exit for three budgets."""
    result = load(network)
    risks, prior = result.calibration.risks(), inverse_cost_prior(result.costs.cumulative())
    for budget in WEIGHED[network]:
        policies = {
            name: calibrate.METHODS[name](result.costs, budget, result.calibration)
            for name in ("eero", "eero_marginal", "geometric")
        }
        observed = {name: replay(policy, result.test).exit_shares for name, policy in policies.items()}
        for index in range(len(result.costs)):
            yield {
                "network": network,
                "budget": result.costs.budget(budget) / result.costs.full,
                "exit": index + 1,
                "cost": result.costs.cumulative()[index] / result.costs.full,
                "risk": risks[index],
                "prior": prior[index],
                "planned": policies["eero"].exit_rates[index],
                "observed": observed["eero"][index],
                "observed_marginal": observed["eero_marginal"][index],
                "planned_geometric": policies["geometric"].exit_rates[index],
                "observed_geometric": observed["geometric"][index],
            }


def draws_of_test(size: int) -> Floats:
    """Return weights of the test images: first all equal, then resampled."""
    counts = np.random.default_rng(SEED).multinomial(size, np.full(size, 1 / size), size=DRAWS)
    return np.concatenate([np.ones((1, size)), counts]) / size


def curve(method: Callable[..., object], result: Result, draws: Floats, step: int = 5) -> tuple[Floats, Floats]:
    """Accuracy and spent share at every budget, (draws, budgets) each."""
    labels = result.test.known_labels("a comparison")
    decided = [
        replay(method(result.costs, budget, result.calibration), result.test)  # type: ignore[arg-type]
        for budget in budgets(result.costs, step)
    ]
    right = np.stack([decisions.predictions == labels for decisions in decided], axis=1).astype(float)
    spent = np.stack([decisions.spent for decisions in decided], axis=1) / result.costs.full
    return draws @ right, draws @ spent


def _gains(own: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Iterator[Row]:
    """What one curve gains on another at every spent budget that both reach."""
    for spend in SPENDS:
        if all(spent[0].min() - ROUNDING <= spend <= spent[0].max() + ROUNDING for _, spent in (own, other)):
            mine, theirs = (
                np.array([interpolated(spend, *each) for each in zip(*line, strict=True)]) for line in (own, other)
            )
            gain, *drawn = mine - theirs
            low, high = np.quantile(drawn, [0.025, 0.975])
            yield {"spent": spend, "accuracy": mine[0], "other": theirs[0], "gain": gain, "low": low, "high": high}


def interpolated(spend: float, accuracy: Floats, spent: Floats) -> float:
    """Accuracy at a spent share: between two budgets lies the mixture of their policies."""
    order = np.argsort(spent, kind="stable")
    return float(np.interp(spend, spent[order], accuracy[order]))


Part = Callable[[], Iterator[Row]]
TABLES: dict[str, list[Part]] = {
    "sweep": [partial(sweep_rows, network) for network in NETWORKS],
    "texts": [partial(sweep_rows, network, FAST) for network in TEXTS],
    "gains": [partial(gain_rows, network) for network in NETWORKS],
    "labels": [partial(label_rows, network) for network in NETWORKS],
    "temperature": [partial(temperature_rows, network) for network in NETWORKS],
    "calibration_size": [partial(size_rows, network) for network in (*NETWORKS, "resnet18_cifar100_frozen")],
    "scores": [score_rows],
    "two_exits": [two_exit_rows],
    "overthinking": [partial(overthinking_rows, network) for network in NETWORKS],
    "weights": [partial(weight_rows, network) for network in WEIGHED],
}


def run(names: Sequence[str], processes: int = 2) -> None:
    """Write the tables of these names."""
    begin = time.perf_counter()
    parts = [(name, index) for name in names for index in range(len(TABLES[name]))]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(parts, pool.map(_part, parts), strict=True))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows = [row for index in range(len(TABLES[name])) for row in found[name, index]]
        write_text(FOLDER / f"{name}.csv", text_of(rows))
    seconds = round(time.perf_counter() - begin, 1)
    made = provenance("numpy", "scipy", folder=RESULTS) | {"seed": SEED, "seconds": seconds, "processes": processes}
    if set(names) == set(TABLES):
        write_text(FOLDER / "made.json", json.dumps(made, indent=2) + "\n")
    print(f"{', '.join(names)}: {seconds:.0f} s")


def _part(part: tuple[str, int]) -> list[Row]:
    name, index = part
    return list(TABLES[name][index]())


def text_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as CSV, numbers to six decimals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _cell(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if not each.startswith("--")]
    strangers = [each for each in given if each not in TABLES]
    if strangers:
        raise SystemExit(f"there is no table {strangers[0]!r}: choose from {', '.join(TABLES)}")
    workers = [int(each.partition("=")[2]) for each in sys.argv[1:] if each.startswith("--processes=")]
    run(given or list(TABLES), *workers)
