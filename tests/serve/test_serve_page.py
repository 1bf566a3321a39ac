"""The page of the service in a real browser: an image dropped on it is answered, exits and spend change."""

import json
import math
import re
import shutil
from dataclasses import replace

import chromium
import pytest
from digit_service import folder, in_base64, pixels
from processes import service
from waiting import wait_until

from alight import load_policy

pytestmark = pytest.mark.slow  # starts a service and a browser

TOKEN = "a-token-of-many-letters"
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
        service("model expensive.json cheap.json --batch-size 8", home, ALIGHT_TOKEN=TOKEN) as running,
        chromium.opened(browser, tmp_path_factory.mktemp("profile")) as tab,
    ):
        tab.go(running.url)
        yield tab, running.url


def until(tab, script):
    """Wait until an expression in the page is true."""
    wait_until(lambda: tab.ask(script))


def test_an_image_is_answered_and_exits_and_spend_change(shown):
    tab, _ = shown
    until(tab, "!document.getElementById('key').hidden")  # it asks for the token
    tab.ask("document.getElementById('token').value = 'a-token-of-many-letters'")
    tab.ask("document.querySelector('#key button').click()")
    until(tab, "!document.getElementById('drop').hidden")
    assert tab.text("#spending") == "nothing spent yet"
    assert [text.partition(":")[0] for text in tab.texts("#policy option")] == ["expensive", "cheap"]
    for count, picture in enumerate(pixels(3), start=1):
        tab.ask(DROP % json.dumps(in_base64(picture)))
        until(tab, f"document.querySelectorAll('#predictions li').length === {count}")
    until(tab, "document.getElementById('spending').textContent.includes('of what the budget allows')")
    assert ", exit " in tab.text("#predictions li")
    assert tab.ask("document.querySelector('#predictions img').naturalWidth") == 8
    until(tab, "document.getElementById('about').textContent.startsWith('3 samples')")
    counts = [int(text) for text in tab.texts("#exits td:nth-child(3)")]
    assert (len(counts), sum(counts)) == (4, 3)
    assert tab.ask("document.getElementById('spent').getBoundingClientRect().width") > 0


def test_errors_are_shown_and_the_budget_of_a_request_can_be_lowered(shown):
    tab, _ = shown
    tab.ask(DROP % json.dumps("Zm9v"))
    until(tab, "!document.getElementById('error').hidden")
    assert "image 0: not a complete image" in tab.text("#error")
    before = len(tab.texts("#predictions li"))
    tab.ask("document.getElementById('most').value = '20%'")
    tab.ask(DROP % json.dumps(in_base64(pixels(1)[0])))
    until(tab, f"document.querySelectorAll('#predictions li').length === {before + 1}")
    assert "exit layer1.0, cost" in tab.text("#predictions li")
    assert tab.ask("document.getElementById('error').hidden")


def test_the_policy_can_be_changed_on_the_page(shown):
    tab, _ = shown
    chosen = "const select = document.getElementById('policy'); select.value = 'cheap'"  # at once: it refreshes
    tab.ask(f"(() => {{ {chosen}; return select.dispatchEvent(new Event('change')) }})()")
    response = "fetch('budget', { headers: { Authorization: 'Bearer a-token-of-many-letters' } })"
    until(tab, f"{response}.then((answer) => answer.json()).then((found) => found.policy === 'cheap')")
    assert tab.ask(f"{response}.then((answer) => answer.json()).then((found) => found.budget)") < 6e6  # 30 %, not 60


def test_it_has_two_themes_fits_a_narrow_screen_and_makes_no_request_elsewhere(shown):
    tab, url = shown
    colours = []
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        colours.append(tab.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2
    for width in (768, 320):
        tab.resize(width)
        assert tab.ask("document.documentElement.scrollWidth") <= width
    elsewhere = [address for address in tab.requests if not address.startswith((url, "data:", "blob:"))]
    assert not elsewhere
    expected = ("401", "422")  # which the browser logs: the missing token, the damaged image
    assert not [line for line in tab.console if not any(status in line for status in expected)]


STYLES = "['over', 'spending', 'overspend'].map((each) => getComputedStyle(document.getElementById(each)))"
COLOURS = "styles[0].backgroundColor, styles[1].color, styles[2].borderLeftColor"


@pytest.fixture
def overspending(tmp_path):
    """The address of a service whose policy lets every sample run to the end, whatever its budget is."""
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    policy = load_policy(tmp_path / "unpaced.json")
    replace(policy, thresholds=(math.inf,) * len(policy.thresholds)).save(tmp_path / "greedy.json")
    with service("model greedy.json --batch-size 8", tmp_path) as running:
        yield running.url


def test_spend_beyond_the_budget_is_shown_in_colour_and_in_words(shown, overspending):
    tab, _ = shown
    tab.resize(1200)
    tab.prefer("light")
    tab.go(overspending)
    until(tab, "!document.getElementById('drop').hidden")
    assert tab.ask("document.getElementById('overspend').hidden")
    calm = tab.ask("getComputedStyle(document.getElementById('spending')).color")
    tab.ask(DROP % json.dumps(in_base64(pixels(1)[0])))
    until(tab, "!document.getElementById('overspend').hidden")
    words = tab.text("#overspend")
    over = float(re.fullmatch(r"Over budget by [\d.]+ MFLOPs \(([\d.]+)%\): choose a cheaper policy,.*", words)[1])
    assert f"{100 + over:.1f}% of what the budget allows" in tab.text("#spending")
    red, text, frame = tab.ask(f"((styles) => [{COLOURS}])({STYLES})")
    assert red == text == frame != calm
    whole, exceeded = (tab.ask(f"document.getElementById('{each}').clientWidth") for each in ("meter", "over"))
    assert exceeded / whole == pytest.approx(over / (100 + over), abs=0.02)
    assert tab.ask("document.getElementById('overspend').getAttribute('role')") == "status"


def test_spend_within_the_guarantee_of_a_stream_is_shown_in_a_milder_colour(shown):
    tab, _ = shown

    def warned(spent, at_most):
        """What the page shows of a status, in one go: it refreshes every second."""
        status = f"{{ spent: {spent}, allowed: 2, max_overspend: {at_most} }}"
        words = "[overspend.hidden, overspend.textContent]"
        return tab.ask(f"((overspend) => {{ warn({status}); const styles = {STYLES}; return [...{words}, {COLOURS}] }})"
                       "(document.getElementById('overspend'))")  # fmt: skip

    (_, mild, *caution), (_, severe, *alert) = warned(3, 2), warned(3, "null")
    assert re.fullmatch(r"1 .*more than the budget allows so far; guaranteed: at most 2 .*\.", mild)
    assert severe.startswith("Over budget by 1 ")
    assert len(set(caution)) == len(set(alert)) == 1
    assert caution != alert
    assert warned(2, 2)[0]
