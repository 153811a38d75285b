"""Pages in a headless browser: charts are drawn, toggles work, and nothing is fetched."""

from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from lightfed.lab.report.comparison import compare
from lightfed.lab.report.page import build
from tests.lab.report.make_run import ENVIRONMENT, METRICS, write_run

pytestmark = pytest.mark.browser
LONG = "HeteroFL_with_a_name_longer_than_a_row"
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run's page with names that are markup, and a comparison."""
    root = tmp_path_factory.mktemp("runs")
    first, second, long = (
        [
            write_run(
                root / f"{name}-s{seed}",
                environment={
                    **ENVIRONMENT, "name": f"{name}-s{seed}", "algorithm": name, "seed": seed
                },
                metrics={**METRICS, f"personal/{EVIL}": (0.1, "", 0.2)},
                config=f"seed_everything: {seed}\nmodel:\n  algorithm: {name}\n",
            )
            for seed in (0, 1)
        ]
        for name in ("FedAvg", "HeteroFL", LONG)
    )  # fmt: skip
    environment = {**ENVIRONMENT, "name": EVIL}
    return {
        "run": build(write_run(root / "evil" / "run", environment=environment)),
        "comparison": compare([*first, *second], output=root / "out"),
        "long": compare([*first, *long], output=root / "long"),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        path = which("chromium") or which("google-chrome")
        started = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_a_page_draws_its_charts_and_fetches_nothing(
    pages: dict[str, Path], browser: Any, name: str, scheme: str, width: int
) -> None:
    from playwright.sync_api import expect

    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: said.append(dialog.message))
    tab.on("request", lambda request: said.append(request.url))
    tab.goto(pages[name].as_uri())
    _wait(tab, ".figure:not([data-drawn])", 0)
    assert said == [pages[name].as_uri()]
    charts, marked = tab.locator(".chart"), tab.locator(".chart svg .mark-symbol path")
    assert charts.count() >= 3
    assert tab.locator(".chart svg").count() == charts.count()
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    clipped = "[...document.querySelectorAll('.chart')].some(c => c.scrollWidth > c.clientWidth)"
    assert not tab.evaluate(clipped)
    wider = (
        "[...document.querySelectorAll('main > .scroll')].some(t => t.scrollWidth > t.clientWidth)"
    )
    assert width < 1400 or not tab.evaluate(wider)
    before, button = marked.count(), tab.locator(".legend button").first
    button.focus()
    tab.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    expect(marked).not_to_have_count(before)
    tab.locator(".numbers summary").first.click()
    expect(tab.locator(".numbers table tbody tr").nth(2)).to_be_attached()
    context.close()


def test_a_name_that_is_too_long_stays_in_its_cell_and_is_whole_on_hover(
    pages: dict[str, Path], browser: Any
) -> None:
    tab = browser.new_page(viewport={"width": 400, "height": 900})
    tab.goto(pages["long"].as_uri())
    _wait(tab, ".figure:not([data-drawn])", 0)
    titles = tab.locator(".chart svg text title")
    assert titles.count() > 0
    assert titles.first.text_content() == LONG
    for name in (".named", "td:has(> .named)"):
        cells = tab.locator(name)
        assert cells.count() > 0
        assert not any(cell.evaluate("c => c.scrollWidth > c.clientWidth") for cell in cells.all())
    tab.close()


def test_the_colours_follow_the_screen(pages: dict[str, Path], browser: Any) -> None:
    tab = browser.new_page(color_scheme="light")
    tab.goto(pages["run"].as_uri())
    figures = tab.locator(".figure").count()
    _wait(tab, ".figure[data-drawn=light]", figures)
    tab.emulate_media(color_scheme="dark")
    _wait(tab, ".figure[data-drawn=dark]", figures)
    tab.close()


def test_the_first_screen_has_figures_commands_and_the_curve(
    pages: dict[str, Path], browser: Any
) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(pages["run"].as_uri())
    _wait(tab, ".figure:not([data-drawn])", 0)
    for part in (".cards", ".commands", ".chart >> nth=0"):
        box = tab.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 900
    tab.close()


def _wait(tab: Any, selector: str, count: int) -> None:
    """Until so many elements fit; a page's policy refuses a condition in JavaScript."""
    from playwright.sync_api import expect

    expect(tab.locator(selector)).to_have_count(count, timeout=30_000)
