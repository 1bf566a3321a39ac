"""Numbers and tables as people read them: quantities with their unit, percent, names of exits, rows of text or HTML."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from html import escape

LARGE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SMALL = {"": 1.0, "n": 1e-9, "u": 1e-6, "\u00b5": 1e-6, "\u03bc": 1e-6, "m": 1e-3, "k": 1e3}  # both signs for micro
SHOWN = {  # prefixes that are shown, from large to small
    "FLOPs": ("P", "T", "G", "M", "K", ""),
    "MACs": ("P", "T", "G", "M", "K", ""),
    "s": ("", "m", "\u00b5", "n"),
    "J": ("k", "", "m", "\u00b5", "n"),
}
DIGITS = 3  # that matter
MOST_DIGITS = 9  # behind the point of a percentage just below 100


def quantity(value: float, unit: str) -> str:
    """Return a cost with its unit in three digits, with the prefix that suits it; times from 0.01 ms up are in ms.

    >>> quantity(9_194_000.0, "FLOPs"), quantity(0.2071, "ms"), quantity(0.0032, "J"), quantity(1234.5, "")
    ('9.19 MFLOPs', '0.207 ms', '3.2 mJ', '1,234')
    """
    base = base_unit(unit)
    if base is None:
        return f"{number(value)}{unit and ' ' + unit}"
    scale, kind = base
    amount = float(f"{value * scale:.{DIGITS}g}")  # rounded before the prefix is chosen: 999.9 K is 1 M
    scales = {**LARGE, **SMALL} if kind in ("s", "J") else LARGE
    prefixes = SHOWN[kind]
    prefix = next((each for each in prefixes if scales[each] <= abs(amount)), prefixes[-1] if amount else "")
    if kind == "s" and 1e-5 <= abs(amount) < 1e-3:
        prefix = "m"
    return f"{number(amount / scales[prefix])} {prefix}{kind}"


def number(value: float) -> str:
    """Return a number in three digits, or whole and with commas from 1,000 up; small ones without an exponent.

    >>> number(0.20714), number(999.9), number(12345.6), number(0.0000122)
    ('0.207', '1,000', '12,346', '0.0000122')
    """
    if 1e-9 <= abs(value) < 1e-4:  # prices of single calls
        return f"{Decimal(f'{value:.{DIGITS}g}'):f}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.{DIGITS}g}"


def percent(share: float, digits: int = DIGITS) -> str:
    """Return a share in percent, in so many digits.

    >>> percent(0.5), percent(0.93149), percent(1.2), percent(0.99961, 5)
    ('50 %', '93.1 %', '120 %', '99.961 %')
    """
    return f"{float(f'{100 * share:.{digits}g}'):g} %"


def accuracy_text(share: float, sign: str = " %") -> str:
    """Return an accuracy, or a share of samples, in percent with one digit; with more where 100 would be rounded up.

    >>> accuracy_text(0.93149), accuracy_text(1999 / 2000), accuracy_text(1.0)
    ('93.1 %', '99.95 %', '100.0 %')
    """
    digits, shown = 1, f"{100 * share:.1f}"
    while share < 1 and float(shown) == 100 and digits < MOST_DIGITS:
        digits += 1
        shown = f"{100 * share:.{digits}f}"
    return f"{shown}{sign}"


def shape_text(shape: Iterable[int]) -> str:
    """Return the shape of a sample in words.

    >>> shape_text((3, 32, 32))
    '3 x 32 x 32'
    """
    return " x ".join(map(str, shape))


def exit_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of so many exits: those given, or "exit 1", "exit 2", ... where there are none.

    >>> exit_names((), 2), exit_names(("layer1", "end"), 2)
    (('exit 1', 'exit 2'), ('layer1', 'end'))
    """
    return tuple(names) or tuple(f"exit {index + 1}" for index in range(count))


def layer_label(name: str) -> str:
    """Return the name of a module as text: one that is a number, as in a row of layers, gets a word before it.

    >>> layer_label("7"), layer_label("layer1.0")
    ('layer 7', 'layer1.0')
    """
    return f"layer {name}" if name.isdigit() else name


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return names in a row, and no more than `most` of them.

    >>> listed(["cat", "dog"]), listed(map(str, range(100)), most=3)
    ('cat, dog', '0, 1, 2, ... (100 in all)')
    """
    every = [*names]
    return ", ".join(every if len(every) <= most else [*every[:most], f"... ({len(every)} in all)"])


def base_unit(unit: str) -> tuple[float, str] | None:
    """Return scale and kind of a unit, None where it is not known.

    >>> base_unit("GFLOPs"), base_unit("ms"), base_unit("dollars")
    ((1000000000.0, 'FLOPs'), (0.001, 's'), None)
    """
    for name, kind in {"FLOPS": "FLOPs", "FLOP": "FLOPs", "MACS": "MACs", "MAC": "MACs"}.items():
        if unit.upper().endswith(name) and unit.upper().removesuffix(name) in LARGE:
            return LARGE[unit.upper().removesuffix(name)], kind  # in any case: a milliflop is never meant
    if unit[-1:] in ("s", "J") and unit[:-1] in SMALL:
        return SMALL[unit[:-1]], unit[-1]
    return None


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table of columns, each headed by its name: the first to the left, the others to the right.

    >>> aligned([["exit", "layer1", "end"], ["cost", "1", "10"]])
    ['exit    cost', 'layer1     1', 'end       10']
    """
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]


@contextmanager
def shown_steps(title: str, count: int, *, progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that says on stderr which of so many steps begins; it says nothing without `progress`.

    >>> with shown_steps("plan", 2, progress=False) as begin:
    ...     begin("time stages")
    """
    from tqdm import tqdm

    layout = "{desc}: {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
    with tqdm(total=count, desc=title, disable=not progress, bar_format=layout) as bar:
        begun = 0

        def begin(step: str) -> None:
            nonlocal begun
            bar.update(min(begun, 1))
            begun += 1
            bar.set_postfix_str(step)

        yield begin
        bar.update(min(begun, 1))
        bar.set_postfix_str("done")


def html_table(title: str, columns: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table with a title, columns whose first cell is their name, and notes below: HTML, all text escaped.

    >>> html_table("Two < three", [["exit", "0"], ["cost", "1.5"]])
    '<table><caption>Two &lt; three</caption><thead><tr><th>exit</th><th>cost</th></tr></thead><tbody><tr><td>0</td><td>1.5</td></tr></tbody></table>'
    """  # noqa: E501
    header, *rows = zip(*columns, strict=True)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return table + "".join(f"<p>{escape(note)}</p>" for note in notes if note)
