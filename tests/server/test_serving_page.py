"""The page at /: its files, and in a browser where there is one (pip install playwright, and Debian's chromium)."""

import re
import shutil

import httpx
import pytest
from test_fim import coder  # noqa: F401

import saltus
from saltus.server.app import PAGE
from saltus.server.guard import PAGE_FILES
from tiny_models import TEMPLATE
from tiny_server import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def engine(coder) -> saltus.Engine:  # noqa: F811
    made = coder("qwen")
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, api_keys=("secret",)) as (_, address):
        yield address


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(url):
    answer = httpx.get(f"{url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    for name in PAGE_FILES:
        assert httpx.get(f"{url}/page/{name}").text == (PAGE / name).read_text()
    assert "https://" not in answer.text + "".join((PAGE / name).read_text() for name in PAGE_FILES)
    assert httpx.get(f"{url}/page/other.js", headers={"authorization": "Bearer secret"}).status_code == 404


@pytest.fixture
def page(url):
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        faults = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.goto(url)
        yield opened
        browser.close()
        assert not faults


def give_key(page):
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Tab")
    page.locator("#model", has_text="tiny").wait_for()


@pytest.mark.external
def test_a_text_is_written_with_drafts_and_plainly_by_keyboard_alone(page, engine):
    give_key(page)
    page.get_by_role("spinbutton", name="Tokens").fill("20")
    page.get_by_role("textbox", name="Prompt").fill("the cat sat on the mat and the cat sat on")
    page.keyboard.press("Control+Enter")
    page.get_by_role("status").filter(has_text="The two texts are the same.").wait_for(timeout=30_000)
    asked = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
    expected = engine.generate(asked, method="plain", max_new_tokens=20)
    assert page.locator("#plain").text_content() == expected.text
    assert "20 tokens in 20 calls" in page.locator("#plain-figures").text_content()
    titles = page.locator("#drafted .call").evaluate_all("spans => spans.map(span => span.title)")
    numbers = [[int(number) for number in re.findall(r"\d+", title)] for title in titles]
    calls, tokens, drafted, accepted = zip(*numbers, strict=True)  # a span may show several calls, and numbers the last
    assert sum(tokens) == 20
    assert 20 - sum(accepted) <= calls[-1] <= 20
    figures = page.locator("#drafted-figures").text_content()
    assert figures.startswith(f"20 tokens in {calls[-1]} calls")
    assert figures.endswith(f"{sum(accepted)} of {sum(drafted)} drafts accepted")


@pytest.mark.external
def test_a_hole_is_filled(page):
    give_key(page)
    page.get_by_role("tab", name="Fill a hole").click()
    page.get_by_role("textbox", name="Text, with a hole").fill("the cat [[…]] the mat")
    page.get_by_role("spinbutton", name="Tokens").fill("12")
    page.get_by_role("button", name="Write").click()
    page.get_by_role("status").filter(has_text="The two texts are the same.").wait_for(timeout=30_000)
    text = page.locator("#plain").text_content()
    assert text.startswith("the cat ")
    assert text.endswith(" the mat")
    page.get_by_role("textbox", name="Text, with a hole").fill("no hole")
    page.get_by_role("button", name="Write").click()
    page.get_by_role("status").filter(has_text="Mark a hole").wait_for()


@pytest.mark.external
def test_a_wrong_setting_and_a_missing_key_are_said_in_one_line(page):
    page.get_by_role("status").filter(has_text="API key").wait_for()
    give_key(page)
    page.get_by_role("textbox", name="Prompt").fill("the cat")
    page.get_by_label("Temperature").fill("3")
    page.keyboard.press("Control+Enter")
    page.get_by_role("status").filter(has_text="temperature").wait_for()
