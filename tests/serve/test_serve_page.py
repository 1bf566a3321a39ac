"""The page of the service in a real browser: a picture dropped on it is answered, exits and spend move."""

import json
import shutil
import time

import chromium
import pytest
from processes import service
from served import folder, in_base64, pixels

DROP = """
(() => {
  const bytes = Uint8Array.from(atob(%s), (letter) => letter.charCodeAt(0));
  const dropped = new DataTransfer();
  dropped.items.add(new File([bytes], "digit.png", { type: "image/png" }));
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, cancelable: true }));
})()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A tab that shows the page, and the address of its service."""
    browser = chromium.found()
    if browser is None:
        pytest.skip("no browser: install chromium or name one in the environment variable CHROMIUM")
    home = tmp_path_factory.mktemp("service")
    shutil.copytree(folder(), home, dirs_exist_ok=True)
    with (
        service("model dear.json cheap.json --batch-size 8", home, ALIGHT_TOKEN="a-token-of-many-letters") as made,
        chromium.opened(browser, tmp_path_factory.mktemp("profile")) as tab,
    ):
        tab.go(made.url)
        yield tab, made.url


def until(tab, script, seconds=60):
    """Wait until an expression in the page is true."""
    end = time.monotonic() + seconds
    while not tab.ask(script):
        assert time.monotonic() < end, (script, tab.ask("document.body.innerText"))
        time.sleep(0.05)


def test_a_picture_is_answered_and_exits_and_spend_move(shown):
    tab, _ = shown
    until(tab, "!document.getElementById('key').hidden")  # it asks for the token
    tab.ask("document.getElementById('token').value = 'a-token-of-many-letters'")
    tab.ask("document.querySelector('#key button').click()")
    until(tab, "!document.getElementById('drop').hidden")
    assert tab.text("#spending") == "nothing spent yet"
    assert [text.partition(":")[0] for text in tab.texts("#policy option")] == ["dear", "cheap"]
    for count, picture in enumerate(pixels(3), start=1):
        tab.ask(DROP % json.dumps(in_base64(picture)))
        until(tab, f"document.querySelectorAll('#answers li').length === {count}")
    until(tab, "document.getElementById('spending').textContent.includes('of what the budget allows')")
    assert "sure, exit " in tab.text("#answers li")
    assert tab.ask("document.querySelector('#answers img').naturalWidth") == 8
    until(tab, "document.getElementById('about').textContent.startsWith('3 samples')")
    counts = [int(text) for text in tab.texts("#exits td:nth-child(3)")]
    assert (len(counts), sum(counts)) == (4, 3)
    assert tab.ask("document.getElementById('spent').getBoundingClientRect().width") > 0


def test_what_is_wrong_is_told_and_less_may_be_asked_for(shown):
    tab, _ = shown
    tab.ask(DROP % json.dumps("Zm9v"))
    until(tab, "!document.getElementById('wrong').hidden")
    assert "image 0: no whole image" in tab.text("#wrong")
    before = len(tab.texts("#answers li"))
    tab.ask("document.getElementById('most').value = '20%'")
    tab.ask(DROP % json.dumps(in_base64(pixels(1)[0])))
    until(tab, f"document.querySelectorAll('#answers li').length === {before + 1}")
    assert "exit 0" in tab.text("#answers li")
    assert tab.ask("document.getElementById('wrong').hidden")


def test_the_policy_is_changed_on_the_page(shown):
    tab, _ = shown
    chosen = "const select = document.getElementById('policy'); select.value = 'cheap'"  # at once: it refreshes
    tab.ask(f"(() => {{ {chosen}; return select.dispatchEvent(new Event('change')) }})()")
    told = "fetch('budget', { headers: { Authorization: 'Bearer a-token-of-many-letters' } })"
    until(tab, f"{told}.then((answer) => answer.json()).then((found) => found.policy === 'cheap')")
    assert tab.ask(f"{told}.then((answer) => answer.json()).then((found) => found.budget)") < 6e6  # 30 %, not 60


def test_it_reads_in_both_themes_and_on_a_narrow_screen_and_asks_nobody_else(shown):
    tab, url = shown
    colours = []
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        colours.append(tab.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2
    tab.resize(320)
    assert tab.ask("document.documentElement.scrollWidth") <= 320
    elsewhere = [address for address in tab.requests if not address.startswith((url, "data:", "blob:"))]
    assert not elsewhere
    expected = ("401", "422")  # which the browser notes: the token that was missing, the picture that was none
    assert not [line for line in tab.console if not any(status in line for status in expected)]
