"""The page at /: what is sent, to whom, and that it works in a browser (Debian's chromium, where there is one)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import pytest
from serving import Served, running

from runtime.serve.page_routes import HEADERS, NAMES, PATHS


def test_every_file_is_served_with_headers_that_load_nothing_else(served: Served) -> None:
    for path in PATHS:
        answer = served.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(("text/html", "text/css", "text/javascript"))
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    assert served.client.get("/page/../app.py").status_code == 404


def test_nothing_in_the_page_is_inline_or_from_elsewhere() -> None:
    folder = files("runtime.serve") / "page"
    assert {entry.name for entry in folder.iterdir()} == set(NAMES)
    html = (folder / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", html)
    for name in NAMES:
        text = (folder / name).read_text("utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"""(?:src|href|from|import|url)\s*[=(]?\s*["'](?:https?:)?//""", text)
    identifiers = set(re.findall(r'\bid="([\w-]+)"', html))
    assert set(re.findall(r'\$\("([\w-]+)"\)', (folder / "page.js").read_text("utf-8"))) <= identifiers


def test_the_page_needs_no_key_and_what_it_asks_does(coded_model: Any) -> None:
    with running(coded_model(), n_slots=1, n_ctx=256, keys=("secret",)) as served:
        without = httpx.Client(base_url=served.url)
        assert without.get("/").status_code == 200
        assert without.get("/props").status_code == 401
        assert served.client.get("/props").status_code == 200


def test_properties(served: Served) -> None:
    found = served.client.get("/props").json()
    assert found["total_slots"] == 4
    assert found["default_generation_settings"]["n_ctx"] == 512
    cache = found["kv_cache"]
    assert cache["type"] == "subkv" and cache["bytes"] > 0 and cache["n_cells"] == 2048
    assert "<|im_start|>" in found["chat_template"]
    messages = [{"role": "user", "content": "hi"}]
    prompt = served.client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for wrong in ({"messages": [1]}, {"messages": [{"role": "user"}] * 9000}, {}, {"messages": messages, "tools": "x"}):
        assert served.client.post("/apply-template", json=wrong).status_code == 400


def test_a_template_gets_tools_as_in_a_chat(served: Served) -> None:
    """Also those that say half a character, or leave out their parameters."""
    tools = [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    answer = served.client.post("/apply-template", content=body)
    assert answer.status_code == 200 and answer.json()["prompt"].endswith("assistant\n")


def test_tokens_with_their_pieces(served: Served) -> None:
    text = "Hello, wörld 🙂"
    plain, pieces = (
        served.client.post("/tokenize", json={"content": text, "with_pieces": how}).json()["tokens"]
        for how in (False, True)
    )
    assert [found["id"] for found in pieces] == plain
    parts = [p.encode() if isinstance(p, str) else bytes(p) for p in (found["piece"] for found in pieces)]
    assert b"".join(parts).decode().strip() == text


def test_a_template_applied_by_hand(served: Served) -> None:
    """Its prompt gets the answer that the conversation gets."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    how = {"temperature": 0, "max_tokens": 12}
    prompt = served.client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    answer = served.client.post("/completion", json=how | {"prompt": prompt}).json()
    for path in ("/v1/chat/completions", "/chat/completions"):
        chat = served.client.post(path, json=how | {"messages": messages}).json()
        assert answer["content"] == chat["choices"][0]["message"]["content"] != ""
        assert answer["tokens_evaluated"] == chat["usage"]["prompt_tokens"]


def test_llama_servers_completion(served: Served) -> None:
    """The same tokens as OpenAI's route, with llama-server's fields, whole and streamed."""
    request = {"prompt": "The house", "temperature": 0, "n_predict": 12}
    openai = served.client.post("/v1/completions", json=request).json()
    whole = served.client.post("/completion", json=request).json()
    assert whole["content"] == openai["choices"][0]["text"]
    assert whole["tokens_predicted"] == openai["usage"]["completion_tokens"] and whole["stop"]
    assert whole["stop_type"] == ("limit" if openai["choices"][0]["finish_reason"] == "length" else "eos")
    with served.client.stream("POST", "/completion", json=request | {"stream": True}) as answer:
        lines = [httpx.Response(200, text=line[6:]).json() for line in answer.iter_lines() if line]
    assert "".join(line["content"] for line in lines) == whole["content"]
    assert [line["stop"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["timings"]["predicted_n"] >= whole["tokens_predicted"] == lines[-1]["tokens_predicted"]
    stop = served.client.post("/completion", json=request | {"stop": [whole["content"][1:3]]}).json()
    assert stop["stop_type"] == "word" and whole["content"].startswith(stop["content"])
    form = request | {"json_schema": {"type": "integer"}}
    assert re.fullmatch(r"-?\d+", served.client.post("/completion", json=form).json()["content"])
    both = served.client.post("/completion", json=form | {"grammar": 'root ::= "a"'})
    assert both.status_code == 400 and "json_schema" in both.text


#
# in a browser
#


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_script_timeout(30)
    yield made
    made.quit()


def wait(browser: Any, script: str, seconds: float = 60.0) -> Any:
    """The script's first true value."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        return WebDriverWait(browser, seconds).until(lambda driver: driver.execute_script(f"return {script}"))
    except TimeoutException:
        seen = browser.find_element("tag name", "body").text
        raise AssertionError(f"expected {script}, found {seen!r}, {browser.get_log('browser')}") from None


def loaded(browser: Any, url: str) -> None:
    browser.get(url)
    wait(browser, "document.getElementById('model').textContent !== 'subkv'")


def ask(browser: Any, text: str) -> str:
    """The answer's text as shown."""
    n = browser.execute_script("return document.querySelectorAll('#log > li').length")
    words = browser.find_element("id", "words")
    words.click()  # after a dialog, Chromium without a window writes only where somebody clicked
    words.send_keys(text + "\n")
    lines = f"document.querySelectorAll('#log > li').length === {n + 2}"
    wait(browser, f"{lines} && document.getElementById('stop').hidden")
    return str(browser.execute_script("return document.querySelector('#log > li:last-child .text').textContent"))


def complaints(browser: Any) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def shown(browser: Any, text: str) -> str:
    """The HTML of a Markdown text, as the page renders it, in one piece and letter by letter alike."""
    script = """
        const [text, done] = arguments;
        import('/markdown.js').then(({Markdown}) => {
            const [whole, grown] = [0, 1].map(() => document.createElement('div'));
            new Markdown(whole).update(text);
            const growing = new Markdown(grown);
            for (let n = 0; n <= text.length; n++) growing.update(text.slice(0, n));
            done(whole.isEqualNode(grown) ? whole.innerHTML : `${whole.innerHTML} grew as ${grown.innerHTML}`);
        }, (error) => done(String(error)));
    """
    return str(browser.execute_async_script(script, text))


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** `d*e*` ~~f~~", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> <del>f</del></p>"),
        ("2 * 3 * 4, snake_case_name", "<p>2 * 3 * 4, snake_case_name</p>"),
        ("# T\ntext\n- a\n- b\n  - c\n\n3. x", "<h2>T</h2><p>text</p><ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
        ("|a|b|\n|-|-|\n|1|`x`|", '<table><tr><th scope="col">a</th><th scope="col">b</th></tr><tr><td>1</td>'),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
        ("[x](https://a.example/b)", '<p><a href="https://a.example/b" target="_blank"'),
        ("![x](https://a.example/b)", '<p><a href="https://a.example/b"'),
        ("```py\n<b>\n```\nafter", "<p>after</p>"),
        ("**open `and _so on [x](", "<p>**open `and _so on [x](</p>"),
    ],
)
def test_markdown(browser: Any, served: Served, text: str, html: str) -> None:
    loaded(browser, served.url)
    assert html in shown(browser, text)


def test_markdown_of_any_length_takes_no_time(browser: Any, served: Served) -> None:
    """Marks that never close, deep nesting: a hostile answer must not stop the page."""
    loaded(browser, served.url)
    script = """
        const [text, done] = arguments;
        import('/markdown.js').then(({Markdown}) => {
            new Markdown(document.createElement('div')).update(text);
            done(true);
        });
    """
    for part in (
        "**a ",
        "*a",
        "`",
        "[x](",
        "[](",
        "_",
        "> ",
        "- ",
        "  - a\n",
        "|a|b|\n",
        "~~x ",
        "http://",
        "1. a\n\n",
    ):
        assert browser.execute_async_script(script, part * (200_000 // len(part)) + ")")


def test_a_conversation(browser: Any, served: Served) -> None:
    loaded(browser, served.url)
    browser.find_element("id", "settings").click()
    for name, value in (("max_tokens", "6"), ("temperature", "0"), ("system", "Be brief.")):
        browser.find_element("id", name).clear()
        browser.find_element("id", name).send_keys(value)
    browser.find_element("css selector", "#dialog button").click()
    first = ask(browser, "<b>hello</b>")
    assert browser.execute_script("return document.querySelector('#log .user b')") is None
    assert first.strip()
    second = ask(browser, "and then?")
    assert "6 tokens" in browser.find_element("id", "status").text
    n, _, n_ctx = browser.find_element("id", "tokens").text.partition(" of ")
    assert int(n) > 20 and n_ctx == "512"
    assert re.fullmatch(r"[\d.]+ MiB, f16 [\d.]+ MiB \(subkv, [\d.]+ bits\)", browser.find_element("id", "kv").text)
    restored = browser.find_element("id", "prompt").text
    assert int(restored.split()[0]) > 20  # the first turn was not evaluated again
    # what is kept is there after a reload, and goes on
    loaded(browser, served.url)
    browser.find_element("css selector", "#talks button").click()
    wait(browser, "document.querySelectorAll('#log > li').length === 4")
    assert browser.execute_script("return document.querySelector('#log > li:last-child .text').textContent") == second
    buttons = browser.find_elements("css selector", "#log > li:last-child .actions button")
    next(button for button in buttons if button.text == "Regenerate").click()
    wait(browser, "document.getElementById('status').textContent.startsWith('Done')")
    again = browser.execute_script("return document.querySelector('#log > li:last-child .text').textContent")
    assert again == second  # greedy
    assert complaints(browser) == []


def test_stop_and_files(browser: Any, served: Served, tmp_path: Any) -> None:
    loaded(browser, served.url)
    browser.execute_script("localStorage.clear()")
    (tmp_path / "notes.txt").write_text("the house of the notes " * 4)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    browser.find_element("id", "file").send_keys(str(tmp_path / "notes.txt"))
    wait(browser, "document.getElementById('files').textContent.includes('tokens')")
    browser.find_element("id", "file").send_keys(str(tmp_path / "picture.png"))
    wait(browser, "document.getElementById('status').textContent.includes('expected a text in UTF-8')")
    browser.find_element("id", "words").send_keys("what is it?\n")
    wait(browser, "document.querySelector('#log > li:last-child .text')?.textContent.length > 0")
    browser.find_element("id", "words").send_keys("\ue00c")  # Escape
    wait(browser, "document.getElementById('stop').hidden")
    assert browser.find_element("id", "status").text.startswith(("Stopped", "Done"))
    assert served.idle(60)
    assert "notes.txt" in browser.find_element("css selector", "#log .user").text
    assert complaints(browser) == []


def test_a_key_is_asked_for(browser: Any, coded_model: Any) -> None:
    with running(coded_model(), n_slots=1, n_ctx=512, keys=("secret",)) as served:
        browser.get(served.url)
        wait(browser, "document.getElementById('dialog').open")
        assert "API key" in browser.find_element("id", "asked").text
        browser.find_element("id", "key").send_keys("secret")
        browser.find_element("id", "max_tokens").send_keys("4")
        browser.find_element("css selector", "#dialog button").click()
        wait(browser, "document.getElementById('model').textContent === 'tiny'")
        assert ask(browser, "hello").strip()


def test_by_keyboard_and_by_ear(browser: Any, served: Served) -> None:
    """The first that a key reaches leads to the message; whatever can be used has a name that is read out."""
    loaded(browser, served.url)
    first = browser.find_element("css selector", "a, button, textarea, input")
    browser.execute_script("arguments[0].focus()", first)
    assert first.text == "Skip to your message" and first.is_displayed()
    first.send_keys("\n")
    wait(browser, "document.activeElement.id === 'words'")
    usable = browser.find_elements("css selector", "a, button, textarea, meter, nav, [role=log]")
    seen = [found for found in usable if found.is_displayed()]
    assert len(seen) > 6 and all(found.accessible_name for found in seen)
    dialog = browser.find_element("id", "dialog")
    browser.find_element("id", "settings").click()
    fields = dialog.find_elements("css selector", "input, textarea, button")
    assert all(field.accessible_name for field in fields) and dialog.accessible_name == "Settings"
    browser.switch_to.active_element.send_keys("\ue00c")  # Escape
    wait(browser, "!document.getElementById('dialog').open")


CONTRAST = """
    const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
        .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(document.body);
    const [a, b] = [style.color, style.backgroundColor].map(light).sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_by_day_and_night(browser: Any, served: Served, scheme: str) -> None:
    """Nothing is wider than the screen, the conversations are behind a button, text stands out."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        loaded(browser, served.url)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        assert browser.execute_script(CONTRAST) > 7
        dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(25, 26, 28)") == (scheme == "dark")
        menu, side = browser.find_element("id", "menu"), browser.find_element("id", "side")
        assert menu.is_displayed() and not side.is_displayed()
        menu.click()
        assert side.is_displayed() and menu.get_attribute("aria-expanded") == "true"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
