"""Logs of models become a table and its costs: no network, no torch.

A log has a row for every request and model, with a score, what tells a right answer from a wrong one, and a cost:

    question,model,confidence,correct,cost_usd
    0,small,-1.04,1,0.0000122
    0,large,-0.41,1,0.0001098

or a row for every request, with a column of each kind for each model: score_small, correct_small, cost_small, ...
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.budgeting.thresholds import hash01
from alight.costs import Costs
from alight.data.columns import first_of, whole
from alight.data.preprocess import InputSpec
from alight.data.tables import csv_columns, frame_columns, is_frame, line_columns, parquet_columns
from alight.errors import BadInput
from alight.outputs import Floats, HeadOutputs, Integers

NAMES = {  # of columns, the first that is there
    "request": ("request", "request_id", "question", "question_id", "query", "prompt_id", "id"),
    "model": ("model", "member", "llm", "engine"),
    "score": ("score", "confidence", "margin", "probability", "logprob", "mean_logprob"),
    "correct": ("correct", "is_correct", "right", "success"),
    "quality": ("quality", "grade", "reward", "rating"),
    "answer": ("answer", "prediction", "response", "output"),
    "truth": ("truth", "label", "gold", "target", "expected"),
    "cost": ("cost", "cost_usd", "usd", "price", "dollars", "tokens", "latency_ms", "ms"),
}
UNITS = {"usd": "USD", "dollars": "USD", "price": "USD", "cost": "USD", "tokens": "tokens", "ms": "ms"}
TRUE, FALSE = ("1", "1.0", "true", "yes", "right", "correct"), ("0", "0.0", "false", "no", "wrong", "incorrect")
JUDGED = ("quality", "correct", "truth")  # kinds of columns that tell right answers from wrong ones
WHOLE = re.compile(r"([-+]?\d+)\.0+")  # a whole number written as a fraction, as beside missing ones
REVERSED = -4  # standard errors below which scores and grades do not differ by chance
CODES = 200  # purposes of the draws that number the answers to a request


class RequestLog(NamedTuple):
    """What models said about requests, and what they cost on average."""

    outputs: HeadOutputs
    costs: Costs


def read_log(
    log: Any,
    *,
    unit: str | None = None,
    models: Sequence[str] | None = None,
    incomplete: Literal["refuse", "drop"] = "refuse",
    **names: str | None,
) -> RequestLog:
    """Return the table of a log and the mean costs of its models: a cascade, cheapest model first, without a network.

    Columns are named, `request="question"`, or found by usual names. `correct` says whether an answer is right,
    `quality` grades it from 0 to 1; with `answer` and `truth` answers are right that equal the truth; with `answer`
    alone, those that equal the answer of the last model. Scores are higher where a model is surer. Every call has its
    own cost.

    Answers of any kind are numbered anew for every request, in an order drawn for each, so that numbers say which
    models agree and nothing else: least of all which of them are right.

    Args:
        log: The path of a CSV, Parquet or JSON lines file, a DataFrame, or columns by name.
        unit: Of the costs; None: what their column's name (cost_usd, cost, tokens, latency_ms) or a currency says.
        models: Which models, in which order; None: all, the cheapest first.
        incomplete: What becomes of requests that lack a model: "refuse" or "drop".
        **names: Of the columns of request, model, score, cost, correct, quality, answer and truth.

    >>> columns = {"question": [1, 1, 2, 2], "model": ["large", "small"] * 2, "confidence": [0.9, 0.8, 0.7, 0.1]}
    >>> outputs, costs = read_log({**columns, "correct": [1, 1, 1, 0], "cost_usd": [0.008, 0.001, 0.012, 0.003]})
    >>> outputs.exits, outputs.risks(), costs
    (('small', 'large'), array([0.5, 0. ]), Costs(0.002 USD, 0.012 USD per sample, cumulative))
    """
    if incomplete not in ("refuse", "drop"):
        raise BadInput(f"incomplete {incomplete!r}: choose 'refuse' or 'drop'")
    columns, found = _named_columns(_columns(log), names)
    if len({len(columns[name]) for name in found.values() if name is not None}) > 1:
        lengths = ", ".join(f"{name} {len(columns[name]):,}" for name in found.values() if name is not None)
        raise BadInput(f"the columns of the log are not equally long ({lengths}): give every row a value in each")
    rows, members, requests = _places(columns[found["request"]], columns[found["model"]], models, incomplete)
    costs = _costs(columns, found["cost"], rows, members)
    if models is None:
        order = np.argsort(costs.mean(axis=0), kind="stable")
        rows, members, costs = rows[:, order], [members[index] for index in order], costs[:, order]
    graded = _quality(columns, found, rows)
    codes = _codes(columns, found["answer"], rows, has_grades=graded is not None)
    labels = None
    if graded is not None:
        best = codes[np.arange(requests), graded.argmax(axis=1)]
        labels = np.where(graded.max(axis=1) > 0, best, len(members))
    scores, cost_name = _numbers(columns, found["score"], rows), str(found["cost"])
    outputs = HeadOutputs(scores, codes, labels, score=str(found["score"]), exits=members, costs=costs, quality=graded)
    if graded is not None:
        _warn_of_reversed_scores(outputs)
    if unit is None and (unit := _unit(columns, cost_name)) is None:
        raise BadInput(f"the unit of the costs in {cost_name!r} is not known: give it, unit='USD' or another name")
    return RequestLog(outputs, Costs(np.zeros(len(members)), costs.mean(axis=0), unit))


def _warn_of_reversed_scores(outputs: HeadOutputs) -> None:
    """Warn of models that are surer of wrong answers than of right ones, as if a score were an entropy or a latency."""
    from scipy.stats import spearmanr  # slow to import

    assert outputs.quality is not None
    for name, scores, quality in zip(outputs.exits[:-1], outputs.scores.T, outputs.quality.T, strict=False):
        if np.ptp(scores) and np.ptp(quality) and spearmanr(scores, quality).statistic * len(scores) ** 0.5 < REVERSED:
            warnings.warn(
                f"the {outputs.score} of {name} is higher where its answers are worse: give scores that are higher"
                " where a model is surer, the negative of an entropy or a perplexity",
                stacklevel=3,
            )


def _unit(columns: Mapping[str, Any], cost_name: str) -> str | None:
    """Return the unit of costs: what their name says, or the one value of a column of currencies where it does not."""
    said = cost_name.lower().split("_")[-1]
    currency = first_of([*columns], ("currency",))
    if currency is None or said not in ("cost", "price"):
        return UNITS.get(said)
    found = sorted({str(each).strip().upper() for each in _listed(columns[currency])})
    if len(found) > 1:
        raise BadInput(f"the costs of the log are in {', '.join(found[:3])}, which do not add up: convert them to one")
    return found[0]


def numbering(samples: Integers, count: int) -> Integers:
    """Return the numbers of the first, second, ... distinct answer to each request, drawn anew for each.

    >>> numbering(np.arange(3), 2)
    array([[0, 1],
           [0, 1],
           [1, 0]])
    """
    draws = [hash01(samples, purpose=CODES + index) for index in range(count)]
    return np.argsort(np.stack(draws, axis=1), axis=1)


def same_answer(value: Any) -> str | None:
    """Return an answer as the text by which answers are compared, None where it is missing: that equals no other.

    Numbers are compared by value, arrays by all of theirs, texts without outer blanks.

    >>> same_answer(" 3.0 "), same_answer(np.float32(3)), same_answer([3, "b "]), same_answer(float("nan"))
    ('3', '3', "['3', 'b']", None)
    """
    if isinstance(value, list | tuple):
        value = [same_answer(each) for each in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if _is_missing(value):
        return None
    text = str(value).strip()
    return whole_number[1] if (whole_number := WHOLE.fullmatch(text)) else text


def _columns(log: Any) -> Mapping[str, Any]:
    if is_frame(log):
        return frame_columns(log)
    if isinstance(log, Mapping):
        return log
    if not isinstance(log, str | Path):
        raise BadInput(f"a {type(log).__name__} is not a log: give a file, a DataFrame, or columns by name")
    path = Path(log)
    if path.suffix == ".parquet":
        return {name: whole(column) for name, column in parquet_columns(path).items()}
    return line_columns(path, InputSpec()) if path.suffix == ".jsonl" else csv_columns(path, InputSpec())


def _named_columns(columns: Mapping[str, Any], given: Mapping[str, str | None]) -> tuple[Mapping[str, Any], Any]:
    """Return the columns, one row per request and model, and the name of each kind, None where there is none."""
    if unknown := given.keys() - NAMES.keys():
        raise BadInput(f"a log has no column of the kind {min(unknown)!r}: name columns of {', '.join(NAMES)}")
    if given.get("model") is None and first_of([*columns], NAMES["model"]) is None:
        columns = _long(columns)
    found = {kind: _name(columns, kind, given.get(kind)) for kind in NAMES}
    if judged := [kind for kind in JUDGED if given.get(kind)]:  # columns that were only guessed do not overrule it
        found |= {kind: None for kind in JUDGED if kind not in judged}
    kinds = dict[str, str]()
    for kind, name in found.items():
        if name is not None and (other := kinds.setdefault(name, kind)) != kind:
            raise BadInput(f"{name!r} is taken as the {other} and as the {kind} of the log: name a column of its own")
    for kind in ("request", "model", "score", "cost"):
        if found[kind] is None:
            usual = ", ".join(NAMES[kind])
            raise BadInput(
                f"the log has no column of the {kind}, only {', '.join(columns)}: name it, {kind}=... ({usual})"
            )
    return columns, found


def _long(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of one row per request as one of one row per request and model."""
    named = {name: name.removeprefix("score_") for name in columns if name.startswith("score_")}
    if not named:
        raise BadInput(
            f"the log has no column of the model, only {', '.join(columns)}: name it, model=..., or give each model"
            " columns of its own: score_small, correct_small, cost_small"
        )
    models, long = [*named.values()], dict[str, Any]()
    long["model"] = [model for name, model in named.items() for _ in range(len(columns[name]))]
    taken = set[str]()
    for kind in NAMES:
        own = {model: f"{kind}_{model}" for model in models if f"{kind}_{model}" in columns}
        if 0 < len(own) < len(models):
            raise BadInput(f"only some of {', '.join(models)} have a column of the {kind}: give each one")
        if own:
            long[kind] = [value for model in models for value in columns[own[model]]]
            taken |= {*own.values()}
    return long | {name: [*values] * len(models) for name, values in columns.items() if name not in taken}


def _name(columns: Mapping[str, Any], kind: str, given: str | None) -> str | None:
    """Return the name of the column of this kind, None where there is none."""
    if given is not None and given not in columns:
        raise BadInput(f"the log has no column {given!r} for the {kind}, only {', '.join(map(str, columns))}")
    return given or first_of([*columns], NAMES[kind])


def _places(
    requests: Any, models: Any, chosen: Sequence[str] | None, incomplete: str
) -> tuple[Integers, list[str], int]:
    """Return the row of every request and model, (requests, models), the models' names and the number of requests."""
    places: dict[tuple[Any, str], int] = {}
    for row, key in enumerate(_keys(_listed(requests), _listed(models))):
        if places.setdefault(key, row) != row:
            raise BadInput(f"request {key[0]!r} has two rows of model {key[1]!r}: give one")
    every = [*dict.fromkeys(model for _, model in places)]
    if chosen is not None and len({*chosen}) < len(chosen):
        raise BadInput(f"models {', '.join(chosen)} name one twice: give each once")
    if chosen is not None and (unknown := [name for name in chosen if name not in every]):
        raise BadInput(f"the log has no model {unknown[0]!r}, only {', '.join(every)}")
    members = every if chosen is None else [*chosen]
    complete = _complete(places, members, incomplete)
    rows = [[places[request, name] for name in members] for request in complete]
    return np.array(rows, dtype=np.int64), members, len(complete)


def _keys(requests: list[Any], models: list[Any]) -> Iterator[tuple[Any, str]]:
    """Return request and model of every row."""
    if not requests:
        raise BadInput("the log has no rows: give what every model said about at least a few hundred requests")
    if nameless := sum(map(_is_missing, requests)) or sum(map(_is_missing, models)):
        raise BadInput(f"{nameless:,} of {len(requests):,} rows of the log lack their request or model: fill them in")
    return zip(requests, map(str, models), strict=True)


def _complete(places: Mapping[tuple[Any, str], int], members: Sequence[str], incomplete: str) -> list[Any]:
    """Return the requests that have a row of every member; others are refused or left out."""
    known = [*dict.fromkeys(request for request, _ in places)]
    complete = [request for request in known if all((request, name) in places for name in members)]
    if lacking := len(known) - len(complete):
        said = f"{lacking:,} of {len(known):,} requests in the log lack a row of one of {', '.join(members)}"
        if incomplete == "refuse" or not complete:
            raise BadInput(
                f"{said}: ask every model about a random sample of requests, or leave them out with incomplete='drop',"
                " if it was not the request that decided which models were asked"
            )
        warnings.warn(f"{said}, and are left out", stacklevel=4)
    return complete


def _is_missing(value: Any) -> bool:
    return value is None or str(value).strip() in ("", "nan", "<NA>", "NaT")


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else [*values]


def _numbers(columns: Mapping[str, Any], name: str, rows: Integers) -> Floats:
    values = _listed(columns[name])
    if lacking := sum(_is_missing(values[place]) for place in rows.ravel().tolist()):
        raise BadInput(
            f"{lacking:,} of {rows.size:,} rows of the log lack their {name!r}: fill them in, or leave these requests"
            " out, if it was not the request that decided which rows lack it"
        )
    try:
        return np.array([float(values[place]) for place in rows.ravel().tolist()]).reshape(rows.shape)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the column {name!r} of the log does not hold numbers alone ({error})") from error


def _costs(columns: Mapping[str, Any], name: str, rows: Integers, members: Sequence[str]) -> Floats:
    costs = _numbers(columns, name, rows)
    if (costs < 0).any():
        raise BadInput(f"{int((costs < 0).sum())} costs in the log are negative, such as {costs[costs < 0][0]:g}")
    if free := [member for member, paid in zip(members, costs.T, strict=True) if not paid.any()]:
        raise BadInput(f"{free[0]} costs nothing in the log: give what its calls cost you, if only for electricity")
    return costs


def _quality(columns: Mapping[str, Any], names: Mapping[str, Any], rows: Integers) -> Floats | None:
    """Return the quality of every answer, 0 or 1 where it is right or wrong; None where nothing tells it."""
    if names["quality"] is not None:
        return _numbers(columns, names["quality"], rows)
    if names["correct"] is not None:
        return np.array([_truth_value(each) for each in _listed(columns[names["correct"]])])[rows]
    if names["answer"] is None:
        raise BadInput(
            f"nothing in the log tells right answers from wrong ones, only {', '.join(columns)}: name a column,"
            " correct=..., quality=..., or answer=... and truth=..."
        )
    if names["truth"] is None:
        return None
    truth = _listed(columns[names["truth"]])
    if unknown := sum(map(_is_missing, truth)):
        raise BadInput(f"{unknown:,} of {len(truth):,} rows of the log lack their {names['truth']!r}: leave these out")
    right = np.array([same_answer(each) for each in truth], dtype=object)
    if (differing := (right[rows] != right[rows[:, :1]]).any(axis=1)).any():
        raise BadInput(
            f"{names['truth']!r} differs between the models of {int(differing.sum()):,} requests: give one each, or say"
            " with correct=... which answers are right"
        )
    said = np.array([same_answer(each) for each in _listed(columns[names["answer"]])], dtype=object)
    return (said == right)[rows].astype(np.float64)


def _truth_value(value: Any) -> float:
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise BadInput(f"{value!r} in the log is neither right nor wrong: write 1 or 0, or give grades as quality=...")
    return float(text in TRUE)


def _codes(columns: Mapping[str, Any], name: str | None, rows: Integers, *, has_grades: bool) -> npt.NDArray[np.int64]:
    """Return the number of every answer: equal ones to one request share it. Missing ones equal no other."""
    numbers = numbering(np.arange(len(rows)), rows.shape[1])
    if name is None:
        assert has_grades  # else the log is refused
        return numbers
    answers = [same_answer(each) for each in _listed(columns[name])]
    if not has_grades and (lacking := sum(answers[place] is None for place in rows[:, -1].tolist())):
        raise BadInput(
            f"{lacking:,} of {len(rows):,} requests in the log lack the answer of the last model, by which the others"
            " are judged: leave these out, or say what is right with correct=..., quality=... or truth=..."
        )
    first = np.zeros_like(rows)
    for row, places in enumerate(rows.tolist()):
        seen = dict[str | int, int]()
        first[row] = [seen.setdefault(answers[place] or place, len(seen)) for place in places]
    return np.take_along_axis(numbers, first, axis=1)
