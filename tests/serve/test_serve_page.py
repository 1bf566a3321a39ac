"""The page of the service in a real browser: an image dropped on it is answered, exits and spend change."""

import json
import shutil

import chromium
import pytest
from digit_service import folder, in_base64, pixels
from processes import service
from waiting import wait_until

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
    assert "exit 0" in tab.text("#predictions li")
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
    tab.resize(320)
    assert tab.ask("document.documentElement.scrollWidth") <= 320
    elsewhere = [address for address in tab.requests if not address.startswith((url, "data:", "blob:"))]
    assert not elsewhere
    expected = ("401", "422")  # which the browser logs: the missing token, the damaged image
    assert not [line for line in tab.console if not any(status in line for status in expected)]
