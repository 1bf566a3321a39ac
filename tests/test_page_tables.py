"""Directives on pages become tables of the CSV files that they name, or fail the build."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent
CSV = """network,batch,rate,low,high,share,date,hardware,versions,commit
b,64,1200.5,1100,1300,0.25,2026-01-02,a CPU,python 3.12,abc
a,8,7,6,8,0.5,2026-01-02,a CPU,python 3.12,abc
a,16,9,8,10,,2026-01-02,a CPU,python 3.12,abc
a,8,5,4,6,0.75,2026-01-03,a CPU,python 3.12,def
"""


@pytest.fixture
def tables(tmp_path):
    """The hook, with a folder of its own in the place of the repository."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "hooks" / "tables.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    (tmp_path / "speed.csv").write_text(CSV)
    hook.ROOT = tmp_path
    return hook


def body(lines):
    """The cells below the head."""
    return [line.strip("| ").split(" | ") for line in lines[2:] if line.startswith("|")]


def shown(tables, markdown):
    return tables.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri="page.md")))


def test_without_options_every_column_is_shown_with_what_it_was_measured_on_below(tables):
    page = shown(tables, "before\n\n<!-- table: speed.csv -->\n\nafter")
    assert (
        page
        == """before

| network | batch | rate | low | high | share |
| --- | --- | --- | --- | --- | --- |
| b | 64 | 1200.5 | 1100 | 1300 | 0.25 |
| a | 8 | 7 | 6 | 8 | 0.5 |
| a | 16 | 9 | 8 | 10 | – |
| a | 8 | 5 | 4 | 6 | 0.75 |

Measured on 2026-01-02 and 2026-01-03 at commit abc, def: a CPU; python 3.12.

after"""
    )


def test_columns_without_a_value_are_left_out_and_answers_are_words(tables):
    (tables.ROOT / "claims.csv").write_text("claim,seed,holds\nfirst,,True\nsecond,,False\n")
    assert tables.render("claims.csv")[0] == "| claim | holds |"
    assert body(tables.render("claims.csv")) == [["first", "yes"], ["second", "no"]]


def test_columns_are_chosen_renamed_combined_and_formatted(tables):
    options = """columns:
      model: network
      images/s: "{rate:,.0f} ({low:.1f} to {high:.1f})"
      share: share:.1%
      points: share:+.1p"""
    assert tables.render("speed.csv", options)[0] == "| model | images/s | share | points |"
    found = body(tables.render("speed.csv", options))
    assert found[0] == ["b", "1,200 (1100.0 to 1300.0)", "25.0%", "+25.0"]
    assert found[2] == ["a", "9 (8.0 to 10.0)", "–", "–"]
    assert tables.render("speed.csv", "columns: [rate, network]")[0] == "| rate | network |"


@pytest.mark.parametrize(
    ("where", "rates"),
    [
        ("{network: a}", ["7", "9", "5"]),
        ("{network: a, batch: 8.0}", ["7", "5"]),  # numbers are compared by value
        ("{batch: [16, 64]}", ["1200.5", "9"]),
        ("[{network: b}, {batch: 16}]", ["1200.5", "9"]),
    ],
)
def test_rows_are_filtered_by_values(tables, where, rates):
    assert [row[0] for row in body(tables.render("speed.csv", f"where: {where}\ncolumns: [rate]"))] == rates


def test_the_latest_of_equal_configurations_is_kept_and_numbers_sort_as_numbers(tables):
    lines = tables.render("speed.csv", "latest: [network, batch]\nsort: [network, batch]\ncolumns: [batch, rate]")
    assert body(lines) == [["8", "5"], ["16", "9"], ["64", "1200.5"]]
    assert "2026-01-02 and 2026-01-03" in lines[-1]
    only = tables.render("speed.csv", "where: {network: b}\ncolumns: [rate]")
    assert "2026-01-02 at commit abc:" in only[-1]  # of the rows that are shown


def test_groups_show_all_their_values_or_reduce_them(tables):
    options = (
        'group: [network]\ncolumns: {n: network, all: rate, a: "rate:mean:.1f", b: "{low:min:.0f}-{high:max:.0f}"}'
    )
    assert body(tables.render("speed.csv", options)) == [
        ["b", "1200.5", "1200.5", "1100-1300"],
        ["a", "7 9 5", "7.0", "4-10"],
    ]


def test_a_column_goes_across(tables):
    options = 'latest: [network, batch]\nsort: [batch]\ncolumns: [network]\nacross: "batch of {batch}"\ncell: rate:.1f'
    lines = tables.render("speed.csv", options)
    assert lines[0] == "| network | batch of 8 | batch of 16 | batch of 64 |"
    assert body(lines) == [["a", "5.0", "9.0", "–"], ["b", "–", "–", "1200.5"]]


def test_values_get_other_names_and_bars_do_not_end_a_cell(tables):
    lines = tables.render("speed.csv", 'names: {a: "small | fast"}\nwhere: {network: a, batch: 16}\ncolumns: [network]')
    assert lines[2] == "| small \\| fast |"


def test_a_named_device_is_hardware_and_a_file_may_say_what_was_used(tables):
    (tables.ROOT / "gpu.csv").write_text(CSV.replace("network,", "device,").replace("\nb,", "\nNVIDIA H200,"))
    assert tables.render("gpu.csv")[-1].endswith(": NVIDIA H200, a CPU; python 3.12.")
    (tables.ROOT / "bare.csv").write_text("what\nthis\n")
    assert tables.render("bare.csv") == ["| what |", "| --- |", "| this |"]
    made = '{"date": "2026-01-04", "commit": "fed", "hardware": "a phone", "versions": "python 3.13"}'
    (tables.ROOT / "made.json").write_text(made)
    last = tables.render("bare.csv", "measured: made.json")[-1]
    assert last == "Measured on 2026-01-04 at commit fed: a phone; python 3.13."


def test_a_table_keeps_the_indentation_of_its_directive(tables):
    page = shown(tables, '??? note "more"\n\n    <!-- table: speed.csv\n    columns: [network]\n    -->\n')
    assert page.startswith('??? note "more"\n\n    | network |\n    | --- |\n    | b |\n')


@pytest.mark.parametrize(
    ("directive", "reason"),
    [
        ("missing.csv", "missing.csv"),
        ("speed.csv\ncolumns: [speed]\n", "no column 'speed' among network, batch"),
        ("speed.csv\nwhere: {model: a}\n", "no column 'model'"),
        ("speed.csv\nlatest: [model]\n", "no column 'model'"),
        ("speed.csv\nsort: [model]\n", "no column 'model'"),
        ('speed.csv\ncolumns: {rate: "{rate:.1f} {speed}"}\n', "no column 'speed'"),
        ("speed.csv\nwhere: {network: c}\n", "no row is left"),
        ("speed.csv\nfilter: {network: a}\n", "no option 'filter'"),
        ("speed.csv\ncolumns: {name: network:.1f}\n", "could not convert string to float: 'b'"),
        ("speed.csv\ncolumns: [network]\nacross: batch\ncell: rate\n", "two rows are a at 8"),
        ("speed.csv\ncolumns: [network]\nacross: batch\n", "cell"),
        ("speed.csv\nmeasured: made.json\n", "made.json"),
        ("speed.csv\ncolumns: {\n", "while parsing"),
    ],
)
def test_what_cannot_be_shown_is_an_error_that_names_the_page_and_the_file(tables, directive, reason):
    with pytest.raises(PluginError, match=r"page.md: the table of .*csv cannot be rendered") as error:
        shown(tables, f"<!-- table: {directive} -->")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "text", ["<!-- table speed.csv -->", "<!--table: speed.csv-->", "see <!-- table: speed.csv -->"]
)
def test_a_directive_that_is_misspelt_is_an_error(tables, text):
    with pytest.raises(PluginError, match=r"page.md: .* is not a directive"):
        shown(tables, text)
