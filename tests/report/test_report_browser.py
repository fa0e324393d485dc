"""The report page in a real browser."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from browser import Browser, binaries, started
from journals import RAGGED, comparison, header, joint_header, joint_walk, walk
from selenium.webdriver.common.keys import Keys

import greedy_gnorm as gg
from greedy_gnorm.pruning.curves import curve, knee_of
from greedy_gnorm.pruning.run import measure_of, sites_of
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.compression import kept_units, percent_left
from greedy_gnorm.units import Unit, as_matrix, unit_name

if binaries() is None and "CI" not in os.environ:
    pytest.skip("needs a browser: install chromium and chromium-driver", allow_module_level=True)

EVIL = '<img src=x onerror="document.body.dataset.hurt=1"><b>bold</b></script>'


@pytest.fixture(scope="module")
def browser():
    with started() as running:
        yield running


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    made = walk(tmp_path_factory.mktemp("page") / "run", header(), latency=True)
    gg.write_report([made.folder])
    return made


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = comparison(
        tmp_path_factory.mktemp("page") / "c", {"greedy-gnorm": 2, "inverse-gnorm": 2, "ae": 2, "random": 6}
    )
    return gg.write_report([folder])


@pytest.fixture
def page(browser: Browser, journal):
    browser.open(journal.folder / "report.html")
    yield browser
    assert browser.complaints() == []


def chart(browser, name, what):
    return browser.ask(f"document.getElementById('{name}').data{what}")


def is_at(browser, journal, number):
    """Whether every part of the page shows this step of the journal."""
    step = journal.steps[number]
    sites, quality = sites_of(journal.header), step.quality[journal.header["quality"]]
    gone = {head for each in journal.steps[: number + 1] for head in each.removed}
    mask = np.array(chart(browser, "mask", "[0].z"), dtype=float)
    assert [int((~np.isnan(row)).sum()) for row in mask] == [site.units for site in sites]
    assert {Unit(*place) for place in np.argwhere(mask == 0).tolist()} == gone
    marks = list(zip(chart(browser, "mask", "[1].x"), chart(browser, "mask", "[1].y"), strict=True))
    assert marks == [(head.index, head.site + 0.5) for head in step.removed]
    for name, across in (("curve", len(gone)), ("parameters", step.parameters)):
        assert (chart(browser, name, "[4].x"), chart(browser, name, "[4].y")) == ([across], [quality])
    scores = as_matrix(journal.steps[max(number, 1)].scores.logs) / np.log(10)
    shown = np.array(chart(browser, "scores", "[0].z"), dtype=float)
    assert np.allclose(shown, scores, rtol=1e-6, equal_nan=True)
    assert browser.text("#now-step").startswith(f"{number} of {len(journal.steps) - 1}")
    assert browser.text("#now-heads") == str(len(gone))
    assert browser.text("#now-quality") == f"{quality:.4f}"
    assert browser.text("#now-parameters") == f"{step.parameters:,}"
    assert browser.text("#now-size") == f"{step.bytes / 2**20:.2f}"
    assert browser.text("#now-removed") == (", ".join(unit_name(sites, head) for head in step.removed) or "nothing")
    assert f"--from-run {journal.folder} --at-step {number} --out {journal.folder}-step-{number}" in browser.text(
        "#take"
    )
    return True


def test_it_opens_from_disk_and_asks_for_nothing(page, journal):
    own = (journal.folder / "report.html").as_uri()
    asked = [address for address in page.requests() if not address.startswith("data:")]
    assert {address.partition("#")[0] for address in asked} <= {own, "about:blank"}
    assert own in asked


def test_it_starts_at_the_solution(page, journal):
    assert is_at(page, journal, journal.header["result"]["solution"])
    assert "the solution" in page.text("#now-step")


def test_the_slider_moves_everything(page, journal):
    for number in (0, 3, 7, 12):
        page.driver.execute_script(
            "const slider = document.getElementById('step'); slider.value = arguments[0];"
            "slider.dispatchEvent(new Event('input', {bubbles: true}))",
            number,
        )
        assert is_at(page, journal, number)


def test_arrow_keys_and_buttons(page, journal):
    page.press(Keys.HOME)
    assert is_at(page, journal, 0)
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT)
    assert is_at(page, journal, 2)
    page.press(Keys.ARROW_LEFT)
    assert is_at(page, journal, 1)
    page.press(Keys.ARROW_RIGHT, "#step")
    assert is_at(page, journal, 2)
    page.press(Keys.END)
    page.press(Keys.ARROW_RIGHT)
    assert is_at(page, journal, 12)
    page.click("#back")
    assert is_at(page, journal, 11)
    page.click("#on")
    assert is_at(page, journal, 12)
    page.click("#to-knee")
    assert is_at(page, journal, knee_of(journal.steps, measure_of(journal.header)))


def test_play_runs_to_the_end_and_can_be_paused(page, journal):
    page.press(Keys.END)
    page.click("#play")
    assert page.ask("document.getElementById('play').getAttribute('aria-pressed')") == "true"
    page.until("Number(document.body.dataset.step) >= 2")
    page.click("#play")
    number = page.ask("document.body.dataset.step")
    assert page.text("#play") == "Play"
    page.until("new Promise((done) => setTimeout(done, 1300, true))")
    assert page.ask("document.body.dataset.step") == number
    page.click("#play")
    page.until("document.body.dataset.step === '12' && document.getElementById('play').textContent === 'Play'")
    assert is_at(page, journal, 12)


def test_knee_and_solution_are_marked(page, journal):
    points = curve(journal.steps, measure_of(journal.header))
    for trace, number in (
        ("[2]", knee_of(journal.steps, measure_of(journal.header))),
        ("[3]", journal.header["result"]["solution"]),
    ):
        assert (chart(page, "curve", trace + ".x"), chart(page, "curve", trace + ".y")) == (
            [points[number][0]],
            [points[number][1]],
        )


def test_a_cell_says_its_head_its_score_and_when_it_went(page, journal):
    page.press(Keys.HOME)
    went = {head: step.step for step in journal.steps for head in step.removed}
    first = journal.steps[1].scores.values
    for _ in range(2):
        page.press(Keys.ARROW_RIGHT, "#mask")
    assert page.text("#cell") == f"L0·H1 · score {first[0, 1]:#.4g} · will be removed at step {went[Unit(0, 1)]}"
    page.press(Keys.ARROW_DOWN, "#mask")
    assert page.text("#cell").startswith("L1·H1 · score ")
    assert is_at(page, journal, 0)
    page.press(Keys.END)
    assert page.text("#cell").endswith(f"removed at step {went[Unit(1, 1)]}")
    page.press(Keys.HOME)
    box = page.ask("document.querySelector('#mask .nsewdrag').getBoundingClientRect().toJSON()")
    page.driver.execute_script("document.getElementById('mask').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = page.ask("document.querySelector('#mask .nsewdrag').getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + box["width"] * 0.87, "y": box["y"] + box["height"] * 0.83, "type": "mouseMoved"}
    page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", place)
    page.until("document.getElementById('cell').textContent.startsWith('L2·H3')")


def test_a_step_can_be_linked_to(browser, journal):
    browser.open(journal.folder / "report.html", part="#step=4")
    assert is_at(browser, journal, 4)
    browser.press(Keys.ARROW_RIGHT)
    assert browser.ask("location.hash") == "#step=5"


def test_steps_and_speed_are_in_tables(page, journal):
    page.click("details summary")
    rows = page.ask(
        "[...document.querySelector('details table').tBodies[0].rows].map((row) => row.cells[3].textContent)"
    )
    assert rows == [f"{step.quality['accuracy']:.4f}" for step in journal.steps]
    assert chart(page, "latency", "[0].x") == [200, 160]


def test_methods_are_switched_on_and_off_everywhere(browser, compared):
    browser.open(compared)
    shown = "data.filter((trace) => trace.visible !== false).map((trace) => trace.meta)"
    both = [f"document.getElementById('{name}').{shown}" for name in ("comparison", "comparison-parameters", "drift")]
    assert all("greedy-gnorm" in browser.ask(each) for each in both)
    browser.click(".methods input[value=greedy-gnorm]")
    assert all("greedy-gnorm" not in browser.ask(each) for each in both)
    assert all("inverse-gnorm" in browser.ask(each) for each in both)
    browser.press(Keys.SPACE, ".methods input[value=random]")
    assert "random" not in browser.ask(both[0])
    browser.click(".methods input[value=greedy-gnorm]")
    assert all("greedy-gnorm" in browser.ask(each) for each in both)
    assert browser.complaints() == []


def test_tables_are_sorted_by_a_click(browser, compared):
    browser.open(compared)
    column = "[...document.querySelector('table').tBodies[0].rows].map((row) => row.cells[{}].textContent)"
    button = "thead th:nth-child({}) button"
    browser.click(button.format(8))
    values = [float(text.split()[0].rstrip("*")) for text in browser.ask(column.format(7))]
    assert values == sorted(values, reverse=True)
    assert browser.ask("document.querySelector('thead th:nth-child(8)').ariaSort") == "descending"
    browser.press(Keys.ENTER, button.format(8))
    assert [float(text.split()[0].rstrip("*")) for text in browser.ask(column.format(7))] == values[::-1]
    browser.click(button.format(1))
    assert browser.ask(column.format(0)) == ["ae", "greedy-gnorm", "inverse-gnorm", "random"]


def test_any_run_of_a_comparison_can_be_walked(browser, compared):
    browser.open(compared)
    journal = Journal.read(compared.parent / "parts" / "ae-1")
    browser.driver.execute_script(
        "const select = document.getElementById('walk'); select.selectedIndex = 5;"
        "select.dispatchEvent(new Event('change'))"
    )
    assert browser.ask("document.getElementById('walk').selectedOptions[0].textContent") == "ae, run 2"
    browser.press(Keys.ARROW_RIGHT, "#on")
    number = int(browser.ask("document.body.dataset.step"))
    assert is_at(browser, journal, number)


def test_mark_up_in_names_is_text_everywhere(browser, tmp_path):
    folders = [
        walk(tmp_path / name, header(model=EVIL, source=EVIL, method=method)).folder
        for name, method in (("a", EVIL), ("b<i>x", "ae"))
    ]
    browser.open(gg.write_report(folders, tmp_path / "page.html"))
    assert browser.ask("document.body.dataset.hurt") is None
    assert browser.ask("document.querySelectorAll('img, b b, i').length") == 0
    assert EVIL in browser.text(".methods")
    browser.driver.execute_script("Plotly.Fx.hover('comparison', [{curveNumber: 0, pointNumber: 1}])")
    browser.until("document.querySelector('#comparison .hoverlayer text') !== null")
    assert "<b>bold</b>" in browser.text("#comparison .hoverlayer")
    assert "<img" in browser.text("#time .yaxislayer-above")
    assert browser.complaints() == []


def test_tied_heads_are_one_block_over_their_layers(browser, tmp_path):
    journal = walk(tmp_path / "albert", header(1, 8, layers=12))
    browser.open(gg.write_report([journal.folder]))
    assert chart(browser, "mask", "[0].y") == [0, 12]
    assert np.array(chart(browser, "mask", "[0].z")).shape == (1, 8)
    assert "A block over several layers is one head that they share" in browser.text("#tied")
    browser.press(Keys.ARROW_RIGHT, "#mask")
    assert browser.text("#cell").startswith("L0·H0, shared by 12 layers")


def test_layers_of_any_shape_and_a_measure_where_lower_is_better(browser, tmp_path):
    """Layers of 4 and 6 heads, two attention modules in one of them, perplexity."""
    about = header(layout=RAGGED, dtype="bfloat16", quality="perplexity", higher_is_better=False)
    journal = walk(tmp_path / "run", about)
    browser.open(gg.write_report([journal.folder]))
    solution = knee_of(journal.steps, measure_of(journal.header))
    assert 0 < solution < 20
    assert is_at(browser, journal, solution)
    for number in (0, 7, 20):
        browser.open(journal.folder / "report.html", part=f"#step={number}")
        assert is_at(browser, journal, number)
    for name in ("mask", "scores"):
        ticks = browser.ask(f"[...document.querySelectorAll('#{name} .ytick text')].map((tick) => tick.textContent)")
        assert ticks == ["0", "1a", "1b", "2"]
    assert browser.text("#now-size-name") == "MB (bfloat16)"
    assert browser.text("#curve .ytitle") == "Perplexity (lower is better)"
    assert browser.complaints() == []


def test_the_keyboard_reaches_every_head_of_layers_of_any_shape(browser, tmp_path):
    journal = walk(tmp_path / "run", header(layout=RAGGED))
    browser.open(gg.write_report([journal.folder]), part="#step=19")
    went = {head: step.step for step in journal.steps for head in step.removed}
    path = [Unit(0, 0), *(Unit(0, n) for n in (1, 2, 3, 3)), Unit(1, 3), Unit(2, 3), Unit(2, 4), Unit(2, 5), Unit(1, 3)]
    keys = [Keys.ARROW_RIGHT] * 5 + [Keys.ARROW_DOWN] * 2 + [Keys.ARROW_RIGHT] * 2 + [Keys.ARROW_UP]
    for key, head in zip(keys, path, strict=True):
        browser.press(key, "#mask")
        assert browser.text("#cell").startswith(f"{unit_name(sites_of(journal.header), head)} · ")
        assert browser.text("#cell").endswith(f"removed at step {went[head]}")
        assert (chart(browser, "mask", "[2].x"), chart(browser, "mask", "[2].y")) == ([head.index], [head.site + 0.5])


def test_heads_that_were_gone_before_are_shown(browser, tmp_path):
    journal = walk(tmp_path / "again", header(removed=(Unit(0, 0),)))
    browser.open(gg.write_report([journal.folder]), part="#step=0")
    assert chart(browser, "mask", "[0].z")[0][0] == 0
    browser.press(Keys.ARROW_RIGHT, "#mask")
    assert browser.text("#cell") == "L0·H0 · removed before this run"


def test_an_unfinished_run_opens_at_its_last_step(browser, tmp_path):
    journal = walk(tmp_path / "run", header(), steps=5)
    browser.open(gg.write_report([journal.folder]))
    assert is_at(browser, journal, 5)
    assert browser.ask("document.getElementById('to-solution').disabled") is True
    only_start = walk(tmp_path / "start", header(), steps=0)
    browser.open(gg.write_report([only_start.folder]))
    assert browser.text("#scores-caption") == "This run has no scores yet."
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [360, 390])
def test_a_small_screen_needs_no_sideways_scrolling(browser, journal, compared, width):
    for path in (journal.folder / "report.html", compared):
        browser.open(path, width=width, height=844)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask("document.querySelector('#mask svg').getBoundingClientRect().width") <= width


def luminance(colour: str) -> float:
    parts = re.findall(r"[\d.]+", colour)[:3]
    if colour.startswith("#"):
        parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return float(np.dot([float(part) for part in parts], [0.2126, 0.7152, 0.0722]) / 255)


def test_dark_and_back(browser, journal):
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('curve').layout.font.color"
    tick = "getComputedStyle(document.querySelector('#curve .xtick text')).fill"
    browser.open(journal.folder / "report.html", dark=True)
    assert luminance(browser.ask(background)) < 0.2 < 0.8 < luminance(browser.ask(ink))
    assert luminance(browser.ask(tick)) > 0.5
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    browser.until(f"{ink} === '#16202a'")
    assert luminance(browser.ask(background)) > 0.8
    kept, gone = (
        luminance(browser.ask(f"document.getElementById('mask').data[0].colorscale[{side}][1]")) for side in (1, 0)
    )
    assert gone > kept, "light is removed"


def test_printed_it_is_light_and_without_controls(browser, journal):
    browser.open(journal.folder / "report.html", dark=True)
    ink = "document.getElementById('curve').layout.font.color"
    browser.driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert luminance(browser.ask("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert luminance(browser.ask(ink)) < 0.1
    assert browser.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"
    browser.driver.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.ask("document.documentElement.className") == ""


def test_every_chart_has_words_and_every_control_a_name(page):
    assert page.ask("[...document.querySelectorAll('.plot')].every((plot) => plot.ariaLabel)") is True
    named = "each.ariaLabel || each.textContent || each.labels?.[0]?.textContent || ''"
    names = page.ask(f"[...document.querySelectorAll('button, input, select')].map((each) => {named})")
    assert all(name.strip() for name in names)
    assert page.ask("document.getElementById('step').getAttribute('aria-valuetext')").startswith("step ")


def test_a_run_of_the_size_of_roberta_large_opens_at_once(browser, tmp_path):
    journal = walk(tmp_path / "large", header(24, 16))
    browser.open(gg.write_report([journal.folder]))  # once to compile plotly, whose time is the machine's
    browser.open(journal.folder / "report.html")
    assert browser.ask("Number(document.body.dataset.ready)") < 2000
    assert is_at(browser, journal, journal.header["result"]["solution"])
    before = browser.ask("performance.now()")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.ask("performance.now()") - before < 1000


def test_the_bars_of_a_compression_follow_the_slider(browser, tmp_path):
    journal = joint_walk(tmp_path / "run", joint_header())
    browser.open(gg.write_report([journal.folder]))
    kinds, work = kept_units(journal.header, journal.steps), percent_left(journal.steps, "multiplications")
    assert browser.text("#now-step") == "4 of 4 (the solution)"
    for number in (4, 0, 2):
        browser.driver.execute_script(
            "const slider = document.getElementById('step'); slider.value = arguments[0];"
            "slider.dispatchEvent(new Event('input', {bubbles: true}))",
            number,
        )
        for kept in kinds:
            assert chart(browser, f"kept-{kept.words}", "[0].x") == kept.left[number]
            gone = [total - left for total, left in zip(kept.totals, kept.left[number], strict=True)]
            assert chart(browser, f"kept-{kept.words}", "[1].x") == gone
            assert browser.text(f"#now-{kept.words}") == f"{kept.gone(number)} of {kept.total}"
        assert chart(browser, "curve", "[4].x") == [round(work[number], 3)]
        assert browser.text("#now-work") == f"{work[number]:.1f} %"
        mask = np.array(chart(browser, "mask", "[0].z"))
        assert mask.sum(1).tolist() == kinds[0].left[number]
    assert not browser.ask("document.getElementById('to-knee').offsetParent")
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_a_compression_of_neurons_alone_has_no_mask(width, browser, tmp_path):
    journal = joint_walk(tmp_path / "run", joint_header(units="ffn"))
    browser.open(gg.write_report([journal.folder]), width=width)
    assert not browser.ask("document.getElementById('mask').offsetParent")
    assert browser.ask("document.getElementById('kept-neurons').offsetParent !== null")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    browser.press(Keys.HOME)
    assert browser.text("#now-neurons") == "0 of 60"
    assert browser.complaints() == []


def test_runs_of_all_kinds_can_be_chosen_on_one_page(browser, tmp_path):
    journals = [
        joint_walk(tmp_path / "ffn", joint_header(units="ffn", method="joint-rounds")),
        walk(tmp_path / "heads", header()),
    ]
    browser.open(gg.write_report([journal.folder for journal in journals], tmp_path / "page.html"), part="#run=0")
    assert not browser.ask("document.getElementById('mask').offsetParent")
    browser.driver.execute_script(
        "const runs = document.getElementById('walk'); runs.value = 1; runs.dispatchEvent(new Event('change'))"
    )
    assert browser.ask("document.getElementById('mask').offsetParent !== null")
    assert np.array(chart(browser, "mask", "[0].z")).shape == (3, 4)
    assert not browser.ask("document.getElementById('kept-neurons').offsetParent")
    assert browser.text("#now-neurons") == "-"
    assert browser.complaints() == []
