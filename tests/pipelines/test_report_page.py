"""The report's page in a real Chromium, opened from a file: it shows, sorts, filters, plots, and asks no network for anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_document import HOSTILE, RTL, build_document, build_forecast, summary_of
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from pipelines.forecast_text import closing_lines
from pipelines.report_data import embedded_json, flat_histogram, merge_buckets
from pipelines.report_page import render_page, visible

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-default-apps", "--hide-scrollbars",
)  # fmt: skip
_EMPTY_DOCUMENT = {
    "dataset": {"name": "none", "url_shown": "/none", "tool_version": "0", "format_version": 1, "num_sources": 0},
    "profiles": {}, "sources": {}, "excluded": {}, "cards": {}, "forecast": {"packing": None, "balance": None}, "notes": [],
}  # fmt: skip


class Page:
    """A browser with the page open; what the tests ask of it in a line each."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, file: Path, *, width: int = 1400, scheme: str = "light") -> Page:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        )
        self.emulate(scheme=scheme)
        self.driver.get(file.as_uri())
        return self

    def emulate(self, *, scheme: str = "light", media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, code: str, *arguments: Any) -> Any:
        return WebDriverWait(self.driver, 20, poll_frequency=0.05).until(lambda _: self.js(code, *arguments))

    def plot(self, name: str) -> WebElement:
        """A plot, scrolled to and drawn, of what is chosen now."""
        host = self.one(f'.plot[data-name="{name}"]')
        self.js("arguments[0].scrollIntoView({block: 'center'})", host)
        self.until("return arguments[0].dataset.drawn === 'yes' && arguments[0].querySelector('svg.main-svg') !== null", host)
        return host

    def names(self) -> list[str]:
        rows = "[...document.querySelectorAll('#table tbody tr')].filter(row => !row.hidden)"
        return self.js(f"return {rows}.map(row => row.querySelector('bdi').textContent)")

    def choose(self, select: str, place: int) -> None:
        code = "arguments[0].selectedIndex = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
        self.js(code, self.one(select), place)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    browser, service = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or service is None:
        pytest.skip("needs chromium and chromedriver on the path: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(service))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(12)


@pytest.fixture(scope="module")
def hostile() -> dict[str, Any]:
    return build_document(125, is_hostile=True, scale=7.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], hostile: dict[str, Any]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, content in {"usual": document, "hostile": hostile}.items():
        (folder / f"{name}.html").write_text(render_page(content), encoding="utf-8")
    return {file.stem: file for file in folder.iterdir()}


@pytest.fixture
def usual(driver: webdriver.Chrome, files: dict[str, Path]) -> Page:
    return Page(driver).open(files["usual"])


def test_every_plot_is_drawn_without_errors_and_without_network(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    page = Page(driver).open(files["hostile"])
    assert page.js("return window.Plotly === undefined")
    hosts = page.js("return [...document.querySelectorAll('.plot')].map(host => host.dataset.name)")
    assert len(hosts) == 8
    for name in hosts:
        page.plot(name)
    page.js("for (const node of [...document.querySelectorAll('details')].slice(0, 4)) node.open = true")
    page.until("return document.querySelectorAll('.card').length >= 12")
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}
    assert [url for url in asked if url.startswith("file:")] == [files["hostile"].as_uri()]


def test_nothing_moves_once_it_is_shown(usual: Page) -> None:
    code = """
        const done = arguments[0];
        let sum = 0;
        new PerformanceObserver((list) => { for (const entry of list.getEntries()) sum += entry.value; })
            .observe({type: "layout-shift", buffered: true});
        scrollTo(0, 2000);
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(sum), 100)));
    """
    usual.plot("sizes")
    assert usual.driver.execute_async_script(code) < 0.01


def test_the_page_cannot_reach_a_network(usual: Page) -> None:
    code = """
        const done = arguments[0];
        document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
        fetch("http://127.0.0.1:9/").catch(() => {});
    """
    assert usual.driver.execute_async_script(code) == "connect-src"
    assert len(usual.driver.get_log("browser")) >= 1  # the refusal itself; leaves the log empty for the next test


def test_hostile_names_and_texts_stay_text(driver: webdriver.Chrome, files: dict[str, Path], hostile: dict[str, Any]) -> None:
    page = Page(driver).open(files["hostile"])
    page.js("for (const node of [...document.querySelectorAll('details')].slice(0, 5)) node.open = true")
    page.until("return document.querySelectorAll('.card').length >= 9")
    shown = page.js("return document.getElementById('details-list').textContent")
    assert HOSTILE in shown
    assert f"{HOSTILE} <b>bold</b> & \\x00 " in shown
    assert "한국어 'quotes' \"double\"" in shown
    assert visible(RTL) == "invoice<U+202E>gnp.exe" in shown
    assert "nul\\x00in\\x1bname" in shown
    assert not {"\x00", "\x1b", "\u202e"} & set(page.js("return document.body.innerText"))
    assert page.js("return document.title") == "harbour-v3 · bayplan report"
    assert page.js("return document.querySelectorAll('main script, img[src=x], main b b').length") == 0
    assert set(page.names()) == {visible(name) for name in hostile["sources"]}
    page.choose("#source", 1)
    assert page.one(".scope bdi").text.startswith("</script><script>")
    page.choose("#source", list(hostile["sources"]).index("__proto__") + 1)
    page.choose("#profile", 1)
    assert page.one(".scope bdi").text == "__proto__"
    assert page.js("return document.title") == "harbour-v3 · bayplan report"


def test_sorting_by_click_and_by_key_in_both_directions(usual: Page, document: dict[str, Any]) -> None:
    sources = next(iter(document["profiles"].values()))["sources"]
    by_tokens = sorted(sources, key=lambda name: -sources[name]["num_tokens"])
    assert usual.names() == by_tokens
    header = usual.one("th[data-column=samples]")
    header.find_element(By.TAG_NAME, "button").click()
    falling = sorted(sources, key=lambda name: -sources[name]["num_samples"])
    assert (header.get_attribute("aria-sort"), usual.names()) == ("descending", falling)
    header.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    rising = sorted(sources, key=lambda name: sources[name]["num_samples"])
    assert (header.get_attribute("aria-sort"), usual.names()) == ("ascending", rising)
    usual.one("th[data-column=name] button").click()
    assert (header.get_attribute("aria-sort"), usual.names()) == ("none", sorted(sources))
    usual.one("th[data-column=median] button").click()
    usual.one("th[data-column=median] button").click()
    assert set(usual.names()[-2:]) == {name for name in sources if not sources[name]["num_samples"]}, "unknown comes last"


def test_filtering_by_words_and_by_trouble(usual: Page, document: dict[str, Any]) -> None:
    sources = next(iter(document["profiles"].values()))["sources"]
    usual.one("#filter").send_keys("KO web")
    assert usual.names() == [name for name in sources if "web-ko" in name]
    assert usual.one("#table-count").text == "1 of 12 sources"
    assert usual.js("return [...document.querySelectorAll('details')].filter(node => !node.hidden).length") == 1
    usual.one("#filter").clear()
    usual.one("#filter").send_keys("a", Keys.BACKSPACE)
    assert len(usual.names()) == 12
    usual.one("#only-quarantine").click()
    refused = {name for name in sources if sources[name]["num_quarantined"]}
    assert 0 < len(refused) < 12
    assert set(usual.names()) == refused
    usual.one("#only-over").click()
    assert set(usual.names()) == {name for name in refused if sources[name]["over_long"][0]["num_samples"]}


def test_profile_source_and_sequence_length_change_what_is_shown(usual: Page, document: dict[str, Any]) -> None:
    def seen() -> tuple[str, str]:
        path = "[...arguments[0].querySelectorAll('path.js-line')].at(-1).getAttribute('d')"
        tiles = "document.getElementById('tiles').textContent"
        return tuple(usual.js(f"return [{tiles}, {path}]", usual.plot("tokens_per_sample")))

    first = seen()
    usual.choose("#profile", 1)
    second = seen()
    assert usual.one("#facts").text.count("internvl3-8b/tokenizer.json") == 1
    usual.choose("#source", 3)
    third = seen()
    assert len({first[0], second[0], third[0]}) == len({first[1], second[1], third[1]}) == 3
    name = list(document["sources"])[2]
    assert {scope.text.partition("\n")[0] for scope in usual.driver.find_elements(By.CSS_SELECTOR, ".scope")} == {name}
    usual.one(".scope button").send_keys(Keys.ENTER)
    assert seen() == second
    over = usual.js("return document.querySelectorAll('#tiles .tile')[5].textContent")
    usual.choose("#length", 1)
    assert "32,768 tokens" in usual.js("return document.getElementById('attention').textContent")
    assert usual.js("return document.querySelectorAll('#tiles .tile')[5].textContent") != over


def test_plots_wait_until_they_are_near_and_tell_on_hover(usual: Page) -> None:
    assert usual.js("return document.querySelector('[data-name=mixture]').dataset.drawn === undefined")
    for name in ("tokens_per_sample", "images_per_sample", "sizes", "mixture"):
        host = usual.plot(name)
        target = {"images_per_sample": ".points path", "mixture": ".points path"}.get(name, ".nsewdrag")
        ActionChains(usual.driver).move_to_element(host.find_element(By.CSS_SELECTOR, target)).perform()
        tip = usual.until("return arguments[0].querySelector('.hovertext text.nums')?.textContent", host)
        assert "%" in tip, name


def test_zooming_in_and_out_again(usual: Page) -> None:
    host = usual.plot("tokens_per_sample")
    labels = "[...arguments[0].querySelectorAll('.xtick text')].map(label => label.textContent).join(' ')"
    whole = usual.js(f"return {labels}", host)
    area = host.find_element(By.CSS_SELECTOR, ".nsewdrag")
    ActionChains(usual.driver).move_to_element(area).click_and_hold().move_by_offset(60, 0).release().perform()
    usual.until(f"return {labels} !== arguments[1]", host, whole)
    ActionChains(usual.driver).double_click(area).perform()
    usual.until(f"return {labels} === arguments[1]", host, whole)


def test_a_plot_out_of_view_does_not_pass_for_drawn_when_the_choice_changes(usual: Page) -> None:
    host = usual.plot("tokens_per_sample")
    line = "return [...arguments[0].querySelectorAll('path.js-line')].at(-1).getAttribute('d')"
    old = usual.js(line, host)
    usual.js("scrollTo(0, document.body.scrollHeight)")
    frames = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
    usual.driver.execute_async_script(frames)  # what watches the view is told of it once in a frame
    usual.choose("#source", 3)
    assert (host.get_attribute("data-drawn"), usual.js(line, host)) == ("stale", old)
    assert usual.js(line, usual.plot("tokens_per_sample")) != old


def test_a_source_without_images_empties_their_plots_and_all_sources_fill_them_again(
    usual: Page, document: dict[str, Any]
) -> None:
    host = usual.plot("sizes")
    usual.choose("#source", 1 + [facts["schema"] for facts in document["sources"].values()].index("text"))
    assert host.text == "Nothing to plot here."
    usual.choose("#source", 0)
    assert usual.plot("sizes").find_elements(By.CSS_SELECTOR, ".heatmaplayer image")


def test_dark_and_light(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    page = Page(driver).open(files["usual"], scheme="dark")
    background = "return getComputedStyle(document.body).backgroundColor"
    grid = "return document.querySelector('[data-name=tokens_per_sample] .xgrid').style.stroke"
    page.plot("tokens_per_sample")
    dark, dark_grid = page.js(background), page.js(grid)
    assert page.one("#theme").get_attribute("aria-pressed") == "true"
    page.one("#theme").send_keys(Keys.SPACE)
    assert page.one("#theme").get_attribute("aria-pressed") == "false"
    light = page.js(background)
    assert max(map(int, dark[4:-1].split(","))) < 40 < 200 < min(map(int, light[4:-1].split(",")))
    page.until("return arguments[0] !== document.querySelector('[data-name=tokens_per_sample] .xgrid').style.stroke", dark_grid)


def test_a_telephone_shows_everything_without_scrolling_sideways(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    page = Page(driver).open(files["hostile"], width=390)
    page.js("for (const node of [...document.querySelectorAll('details')].slice(0, 5)) node.open = true")
    for name in ("tokens_per_sample", "mixture"):
        page.plot(name)
    assert page.js("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    box = page.one("#table-box")
    assert page.js("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    first = "return document.querySelector('#table tbody th').getBoundingClientRect().left"
    before = page.js(first)
    page.js("arguments[0].scrollLeft = 300", box)
    assert page.js(first) == before, "the names stay"


def test_paper_is_light_whole_and_without_controls(driver: webdriver.Chrome, files: dict[str, Path]) -> None:
    page = Page(driver).open(files["usual"], scheme="dark")
    page.emulate(scheme="dark", media="print")
    page.until("return document.querySelectorAll('.plot[data-drawn=yes]').length === 8")
    assert page.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not [part for part in (".bar", ".tools", "#theme") if page.one(part).is_displayed()]
    assert page.js("return arguments[0].scrollHeight <= arguments[0].clientHeight", page.one("#table-box"))
    page.emulate(scheme="dark")
    page.until("return !document.documentElement.classList.contains('printing')")
    assert page.one("#theme").get_attribute("aria-pressed") == "true"


def test_numbers_are_for_people_and_exact_on_request(driver: webdriver.Chrome, tmp_path: Path) -> None:
    document = build_document(3)
    everything = document["profiles"]["qwen3-vl-8b"]["all"]
    everything |= {"num_tokens": 2_104_000_123_456, "num_samples": 340_200_000}
    document["notes"] = ["a note"]
    (tmp_path / "page.html").write_text(render_page(document), encoding="utf-8")
    page = Page(driver).open(tmp_path / "page.html")
    tiles = page.js("return [...document.querySelectorAll('.tile-value')].map(tile => [tile.textContent, tile.title])")
    assert ["2.1 T", "2,104,000,123,456"] in tiles
    assert ["340 M", "340,200,000"] in tiles
    assert "None was given." in page.one("#forecast").text
    assert not page.driver.find_elements(By.CSS_SELECTOR, "nav a[href='#forecast']")


def test_a_forecast_is_shown_in_tables_of_the_page(driver: webdriver.Chrome, tmp_path: Path) -> None:
    document = build_document(3)
    forecast = build_forecast("qwen3-vl-8b", "f" * 32)
    document["forecast"] = {**forecast, "lines": [*closing_lines(forecast), HOSTILE]}
    (tmp_path / "page.html").write_text(render_page(document), encoding="utf-8")
    page = Page(driver).open(tmp_path / "page.html", scheme="dark")
    assert page.one("nav a[href='#forecast']").text == "Forecast"
    packing, balance = page.driver.find_elements(By.CSS_SELECTOR, "#forecasts table")
    assert packing.find_element(By.CSS_SELECTOR, "tbody tr").text.startswith(
        "8,192 99.963 % ± 0.002 99.993 % 7.3 14.8 19.8 k 11.8 MB"
    )
    rows = [" ".join(row.text.split()) for row in balance.find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert rows[0] == "64 x 128 8,192 arrival 1.185 ± 0.001 1.000"
    assert rows[2] == "ep auto 1.006 ± 0.001 +17.8 % ± 0.1 32.0 % 3.6 % 25 MB 21 ms"
    assert page.js("return document.title") != "owned"
    assert HOSTILE in page.one("#forecasts > .quiet").text
    # Phones scroll the tables, not the page; paper shows them whole and light.
    page.open(tmp_path / "page.html", width=390)
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    page.emulate(scheme="dark", media="print")
    page.until("return document.documentElement.classList.contains('printing')")
    assert page.js("return getComputedStyle(arguments[0]).overflowX", page.one("#forecasts .scroll")) == "visible"
    page.emulate()
    page.until("return !document.documentElement.classList.contains('printing')")
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_dataset_without_a_profile_says_so(driver: webdriver.Chrome, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_page(_EMPTY_DOCUMENT), encoding="utf-8")
    page = Page(driver).open(tmp_path / "page.html")
    assert "No profile is indexed yet" in page.one("main").text
    assert driver.get_log("browser") == []


def test_one_sample_of_text_without_lengths_or_weights(driver: webdriver.Chrome, tmp_path: Path) -> None:
    document = build_document(1)
    document["profiles"] = {"only": {**document["profiles"]["qwen3-vl-8b"], "sequence_lengths": []}}
    profile = document["profiles"]["only"]
    for numbers in (profile["all"], *profile["sources"].values()):
        five, none = summary_of([[5, 6, 1]]), summary_of([])
        numbers["distributions"] = {name: five if "per_sample" in name else none for name in numbers["distributions"]}
        numbers["distributions"]["images_per_sample"] = summary_of([[0, 1, 1]])
        numbers |= {
            "num_samples": 1,
            "num_images": 0,
            "num_tokens": 5,
            "width_height": [],
            "over_long": [],
            "formats": {},
            "status": {},
        }
        numbers["mixture"] = dict.fromkeys(numbers["mixture"])
    (tmp_path / "page.html").write_text(render_page(document), encoding="utf-8")
    page = Page(driver).open(tmp_path / "page.html")
    assert page.plot("tokens_per_sample").get_attribute("aria-label").endswith("max 5, mean 5")
    assert page.one(".plot[data-name=sizes]").text == "Nothing to plot here."
    assert "names no sequence length" in page.one("#over-long").text
    assert page.js("return document.querySelectorAll('#profile-pick[hidden], #length-pick[hidden]').length") == 2
    assert driver.get_log("browser") == []


def test_pieces_of_the_page_are_package_data() -> None:
    names = {file.name for file in (resources.files("pipelines") / "report").iterdir()}
    assert {"page.html.jinja", "page.css", "main.js"} <= names


def test_130_sources_fit_a_small_page(files: dict[str, Path]) -> None:
    from plotly.offline import get_plotlyjs

    assert files["hostile"].stat().st_size - len(get_plotlyjs().encode()) < 3_000_000


def test_embedded_json_reads_back_and_holds_no_markup() -> None:
    value = {HOSTILE: [RTL, "\x00\ud800\u2028", "한국어", 2**53, None, True]}
    text = embedded_json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


histograms = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10**6), st.integers(1, 10**12)), min_size=1, max_size=400).map(
    lambda steps: _histogram(steps)
)


def _histogram(steps: list[tuple[int, int, int]]) -> list[list[int]]:
    buckets, at = [], 0
    for gap, width, count in steps:
        buckets.append([at + gap, at + gap + width, count])
        at += gap + width
    return buckets


@given(histograms)
def test_merging_keeps_counts_ends_and_the_zeros(histogram: list[list[int]]) -> None:
    merged = merge_buckets(histogram, 40)
    assert len(merged) <= max(41, min(len(histogram), 40))
    assert sum(count for _, _, count in merged) == sum(count for _, _, count in histogram)
    assert (merged[0][0], merged[-1][1]) == (histogram[0][0], histogram[-1][1])
    assert {low for low, _, _ in merged} <= {low for low, _, _ in histogram}
    assert all(low >= end for (_, end, _), (low, _, _) in pairwise(merged))
    if histogram[0][0] == 0:
        assert merged[0] == histogram[0]


@given(histograms)
def test_flat_histograms_read_back(histogram: list[list[int]]) -> None:
    flat = flat_histogram(histogram)
    lows, counts = flat[::2], flat[1::2]
    read = [[low, high, n] for low, high, n in zip(lows, lows[1:], counts, strict=False) if n]
    assert read == histogram
