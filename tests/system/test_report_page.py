"""The report in a real browser: what is clicked is what is shown, and nothing is fetched."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from merge.run_folder import RunFolder, process_of, whole_run
from merge.synthetic_run import SyntheticRun
from merge.wide_result import FAR_LAYER, FAR_RANK, wide_result
from torchinstruments.cli.main import main
from torchinstruments.merge.engine import merge_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

HOSTILE = (
    '</script><script>document.title = "taken"</script><img src=x onerror="document.title=1"><b>bold</b>'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """A headless Chromium of this machine."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


def opened(browser: webdriver.Chrome, folder: RunFolder) -> webdriver.Chrome:
    """Writes the report of a merged run and opens it."""
    assert main(["report", folder.url]) in {0, 1}
    browser.get((folder.root / "merged" / "report.html").as_uri())
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    return browser


def wait(browser: webdriver.Chrome, script: str) -> None:
    """Waits until a script returns something true."""
    WebDriverWait(browser, 60).until(lambda one: one.execute_script(script))


def heat(browser: webdriver.Chrome) -> dict[str, list[object]]:
    """Returns what the heat map shows: labels of layers and of ranks, and values."""
    return browser.execute_script(
        "const one = document.getElementById('heat'); return {layers: one.layout.yaxis.ticktext,"
        " ranks: one.layout.xaxis.ticktext, z: one.data.length ? one.data[0].z : []}"
    )


def series_names(browser: webdriver.Chrome) -> list[str]:
    """Returns the names of the lines that are drawn."""
    return browser.execute_script(
        "return document.getElementById('series').data.map((one) => one.name).filter(Boolean)"
    )


def caption(browser: webdriver.Chrome) -> str:
    """Returns what is said below the series."""
    return browser.find_element(By.ID, "series-caption").text


def complaints(browser: webdriver.Chrome) -> list[object]:
    """Returns what the browser logged since it was asked last."""
    return browser.get_log("browser")


def test_two_ranks_by_clicking(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Signal, metric, layer, rank, forward, search, a logarithmic axis and dark mode do what they say."""
    run = SyntheticRun(RunFolder(tmp_path / "run", world_size=2), 8, 12).write()
    for rank in range(2):
        rows = [
            {
                "attempt": one,
                "optimizer_attempt": one,
                "scale_before": 8.0,
                "outcome": "skipped" if one == 3 else "applied",
            }
            for one in range(12)
        ]
        run.folder.steps(rank, rows, process_of(rank))
    merge_run(run.folder.url)
    page = opened(browser, run.folder)
    assert heat(page)["layers"] == [f"layers.{one:03d}" for one in range(12)]
    assert heat(page)["ranks"] == ["0", "1"]
    assert series_names(page) == ["lowest to highest rank", "rank 0", "rank 1", "median_of_ranks"]
    assert ", std, measured by ranks 0-1" in caption(page)
    Select(page.find_element(By.ID, "choice")).select_by_visible_text("output")
    forward = page.find_element(By.ID, "forward")
    forward.send_keys(Keys.END)

    before = heat(page)["z"]
    Select(page.find_element(By.ID, "choice")).select_by_visible_text("output_gradient")
    Select(page.find_element(By.ID, "metric")).select_by_visible_text("max")
    assert ", output_gradient, max" in caption(page)
    assert heat(page)["z"] != before
    Select(page.find_element(By.ID, "column")).select_by_visible_text("layers.007")
    assert "layers.007, output_gradient, max" in caption(page)
    Select(page.find_element(By.ID, "rank")).select_by_visible_text("rank 1")
    opacity = (
        "return document.getElementById('series').data.filter((one) => one.name === 'rank 0')[0].opacity"
    )
    assert page.execute_script(opacity) < 1

    page.find_element(By.ID, "search").send_keys("S.01")
    assert heat(page)["layers"] == ["layers.010", "layers.011"]
    assert "layers.010" in caption(page)
    page.find_element(By.ID, "search").send_keys(Keys.BACKSPACE * 4)
    assert len(heat(page)["layers"]) == 12

    assert page.find_element(By.ID, "forward-label").text == "attempt 7"
    before = heat(page)["z"]
    forward.send_keys(Keys.ARROW_LEFT)
    assert page.find_element(By.ID, "forward-label").text == "attempt 6"
    assert heat(page)["z"] != before
    page.find_element(By.ID, "log").click()
    assert page.execute_script("return document.getElementById('series').layout.yaxis.type") == "log"

    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(colour)
    page.find_element(By.ID, "theme").click()
    assert page.execute_script(colour) != light
    text = "return document.getElementById('picture-loss_scale').layout.font.color"
    assert page.execute_script(text) == page.execute_script("return theme.color('text')")
    assert complaints(page) == []


def test_it_opens_where_ranks_differ(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Not on the last forward, the first layer or what one rank alone has; small distances stay pale."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        rows = [
            {"sample_id": one, "attempt": one, "metric": "std", "layer": layer}
            | {"mode": "eval" if (rank, one) == (0, 3) else "train"}
            | {"value": 1.1 if (rank, layer, one) == (1, "body", 1) else 1.0}
            for one in range(4)
            for layer in ("a", "body", "head")
        ]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    page = opened(browser, run)
    assert page.find_element(By.ID, "forward-label").text == "attempt 1"
    assert caption(page).startswith("body, output, std, measured by ranks 0-1")
    scale = "const one = document.getElementById('heat').data[0]; return [one.zmin, one.zmax]"
    assert page.execute_script(scale) == [-0.5, 0.5]
    said = page.find_element(By.ID, "heat-caption").text
    assert "Colours end at 0.5 (never below 0.5 or above 1); the largest distance is 0.0909" in said

    Select(page.find_element(By.ID, "choice")).select_by_visible_text("output, eval")
    assert "measured by rank 0 alone" in caption(page)
    assert series_names(page) == ["rank 0"]
    assert page.execute_script("return document.querySelector('#series .legend').textContent") == "rank 0"

    page.find_elements(By.CSS_SELECTOR, ".rows tbody tr")[0].click()
    assert caption(page).startswith("body, output, std, measured by ranks 0-1")
    assert complaints(page) == []


def test_a_thousand_ranks_by_clicking(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A click on the cell that stands out shows the rank and the layer; any rank can be chosen."""
    page = opened(browser, wide_result(tmp_path / "run"))
    shown = heat(page)
    assert len(shown["z"]) == 100
    assert {len(row) for row in shown["z"]} == {64}  # type: ignore[arg-type]
    size = [[0 if one is None else abs(one) for one in row] for row in shown["z"]]  # type: ignore[attr-defined]
    furthest = max(itertools.product(range(100), range(64)), key=lambda place: size[place[0]][place[1]])
    assert furthest == (FAR_LAYER, FAR_RANK // 16)

    # Where plotly drew that cell, as a person would click on it.
    place = page.execute_script(
        "const one = document.getElementById('heat'); one.scrollIntoView({block: 'center'});"
        "const box = one.querySelector('.nsewdrag').getBoundingClientRect(), layout = one._fullLayout;"
        f"return [box.left + layout.xaxis.c2p({furthest[1]}), box.top + layout.yaxis.c2p({furthest[0]})]"
    )
    actions = webdriver.ActionChains(page)
    actions.w3c_actions.pointer_action.move_to_location(round(place[0]), round(place[1]))
    actions.w3c_actions.pointer_action.click()
    actions.perform()
    wait(
        page,
        f"return document.getElementById('series-caption').textContent.includes('layers.{FAR_LAYER:03d}')",
    )
    assert page.find_element(By.ID, "rank").get_attribute("value") == str(FAR_RANK)
    assert f"rank {FAR_RANK}" in series_names(page)

    ranks = Select(page.find_element(By.ID, "rank"))
    assert len(ranks.options) == 1 + 1024
    ranks.select_by_visible_text("rank 3")
    assert "Rank 3 " in caption(page)
    assert complaints(page) == []


def test_names_of_a_run_do_nothing(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Markup in the name of a layer is text, in the page and in its pictures, and no request was made."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        rows = [{"sample_id": one, "attempt": one, "value": one + rank, "layer": HOSTILE} for one in range(4)]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    page = opened(browser, run)
    assert page.title.startswith("torchinstruments: run")
    assert page.find_elements(By.TAG_NAME, "img") == []
    assert page.find_elements(By.CSS_SELECTOR, "main b, svg b") == []
    assert HOSTILE[:40] in Select(page.find_element(By.ID, "column")).first_selected_option.text
    assert "<b>bold</b>" in caption(page)
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(page) == []
