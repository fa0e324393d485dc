"""The report page in a real browser."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, binaries, started
from journals import PREDICTIONS, RAGGED, comparison, header, joint_header, joint_walk, walk
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import greedy_gnorm as gg
from greedy_gnorm.pruning.curves import curve, knee_of
from greedy_gnorm.pruning.run import sites_of
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.compression import kept_units, percent_left
from greedy_gnorm.tasks.task import measure_of
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
    made = walk(tmp_path_factory.mktemp("page") / "run", header(), latency=True, complete=True)
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


def unfold(browser, scale="run"):
    """Open what is folded, with scores on this scale."""
    browser.driver.execute_script(
        "document.querySelectorAll('details').forEach((each) => { each.open = true });"
        "const scale = document.getElementById('scale'); scale.value = arguments[0];"
        "scale.dispatchEvent(new Event('change'))",
        scale,
    )
    browser.until("document.getElementById('scores').data && document.getElementById('time').data ? true : false")


def slide(browser, number):
    browser.driver.execute_script(
        "const slider = document.getElementById('step'); slider.value = arguments[0];"
        "slider.dispatchEvent(new Event('input', {bubbles: true}))",
        number,
    )


def click_in(browser, name, across, down):
    """Click into a chart, at these shares of its width and height."""
    browser.driver.execute_script(
        f"document.getElementById('{name}').scrollIntoView({{block: 'center', behavior: 'instant'}})"
    )
    box = browser.ask(f"document.querySelector('#{name} .nsewdrag').getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + box["width"] * across, "y": box["y"] + box["height"] * down}
    mouse = {**place, "button": "left", "clickCount": 1}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {**place, "type": "mouseMoved"})
    browser.until("new Promise((done) => setTimeout(done, 100, true))")
    for kind in ("mousePressed", "mouseReleased"):
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {**mouse, "type": kind})


def is_at(browser, journal, number):
    """Whether every part of the page shows this step of the journal."""
    unfold(browser)
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
        slide(page, number)
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
    page.click("#steps summary")
    rows = page.ask(
        "[...document.querySelector('#steps table').tBodies[0].rows].map((row) => row.cells[3].textContent)"
    )
    assert rows == [f"{step.quality['accuracy']:.4f}" for step in journal.steps]
    assert "torch, batch 8, 128 tokens, 2 threads" in page.text("[aria-labelledby=speed-title]")


def test_methods_are_switched_on_and_off_everywhere(browser, compared):
    browser.open(compared)
    unfold(browser)
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
    unfold(browser)
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
    unfold(browser)
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


def test_in_the_dark_kept_heads_stand_out_and_removed_ones_recede(browser, journal):
    browser.open(journal.folder / "report.html", dark=True)
    card = luminance(browser.ask("getComputedStyle(document.querySelector('section')).backgroundColor"))
    kept, gone = (
        luminance(browser.ask(f"document.getElementById('mask').data[0].colorscale[{side}][1]")) for side in (1, 0)
    )
    assert kept - card > 0.4
    assert 0.02 < gone - card < 0.15


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
        slide(browser, number)
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
    assert browser.ask("document.getElementById('mask')") is None
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


def test_the_parts_of_the_page_are_in_the_order_of_their_use(page):
    titles = page.ask("[...document.querySelectorAll('h2')].map((title) => title.textContent)")
    assert titles == [
        "Choices", "Step by step", "On test rows", "Classes and changed predictions", "Speed", "Size and parameters",
        "For researchers", "Record",
    ]  # fmt: skip
    tops = page.ask(
        "['verdict', 'choices', 'curve', 'mask', 'step'].map("
        "(id) => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert abs(tops[2] - tops[3]) < 40, "the curve beside the mask"
    assert page.ask("[...document.querySelectorAll('details')].every((each) => !each.open)"), "folded"
    assert not page.ask("document.getElementById('scores').checkVisibility()")


def test_a_choice_shows_its_command_and_goes_to_its_step(page, journal):
    choice = journal.header["result"]["choices"][0]
    solution = journal.header["result"]["solution"]
    assert solution != choice["step"]
    assert page.text("#choice-step") == str(solution)
    page.click(f"tr[data-step='{choice['step']}'] .take")
    assert page.text("#choice-name") == choice["name"]
    assert page.text("#choice-command").startswith(f"gnorm prune --from-run {journal.folder} --at ")
    assert is_at(page, journal, choice["step"])


def test_a_click_on_a_point_of_the_curve_goes_to_its_step(page, journal):
    for name in ("curve", "parameters"):
        for number in (6, 9, 0, 12):
            places = [
                f"{axis}.d2p(plot.data[1].{letter}[{number}]) / {axis}._length"
                for letter in "xy"
                for axis in [f"plot._fullLayout.{letter}axis"]
            ]
            across, down = page.ask(f"((plot) => [{', '.join(places)}])(document.getElementById('{name}'))")
            click_in(page, name, across, down)
            page.until(f"document.body.dataset.step === '{number}'")
    assert is_at(page, journal, 12)


def test_a_click_on_a_head_goes_to_the_step_where_it_went(page, journal):
    went = {head: step.step for step in journal.steps for head in step.removed}
    for head in (Unit(2, 3), Unit(0, 1)):
        click_in(page, "mask", (head.index + 0.5) / 4, (head.site + 0.5) / 3)
        page.until(f"document.body.dataset.step === '{went[head]}'")
        assert page.text("#cell").endswith(f"removed at step {went[head]}")
    page.press(Keys.ARROW_DOWN, "#mask")
    page.press(Keys.ENTER, "#mask")
    assert page.ask("document.body.dataset.step") == str(went[Unit(1, 1)])


def test_a_head_that_stays_is_only_named(browser, tmp_path):
    journal = walk(tmp_path / "run", header(), steps=5)
    browser.open(gg.write_report([journal.folder]))
    gone = {head for step in journal.steps for head in step.removed}
    head = next(Unit(site, index) for site in range(3) for index in range(4) if Unit(site, index) not in gone)
    click_in(browser, "mask", (head.index + 0.5) / 4, (head.site + 0.5) / 3)
    browser.until("document.getElementById('cell').textContent.endsWith('never removed')")
    assert is_at(browser, journal, 5)


def test_the_measure_on_the_curve_is_switched(page, journal):
    slide(page, 12)
    for name, title in (("macro_f1", "Macro f1"), ("loss", "Loss (lower is better)")):
        page.driver.execute_script(
            "const measure = document.getElementById('measure'); measure.value = arguments[0];"
            "measure.dispatchEvent(new Event('change'))",
            name,
        )
        values = [round(step.quality[name], 6) for step in journal.steps]
        for chosen in ("curve", "parameters"):
            assert chart(page, chosen, "[1].y") == values
            assert page.text(f"#{chosen} .ytitle") == title
        assert page.text("#now-quality") == f"{values[12]:.4f}"
        assert page.text("#now-measure") == title
        assert page.text("#now-change") == f"({values[12] - values[0]:+.4f})"
        assert page.ask("document.getElementById('now-change').className") == "loss", "whichever way is worse"


def test_the_speed_follows_the_slider_and_says_how_it_is_known(page, journal):
    first, solution = journal.steps[0].cost.multiplications, journal.header["result"]["solution"]
    assert (page.text("#now-speed-name"), page.text("#now-speed")) == ("Speed (measured)", "1.25 times")
    for number in (3, 12):
        slide(page, number)
        assert number != solution
        assert page.text("#now-speed-name") == "Speed (estimated)"
        assert page.text("#now-speed") == f"{first / journal.steps[number].cost.multiplications:.2f} times"


def test_a_run_that_counted_nothing_has_no_speed(browser, tmp_path):
    journal = walk(tmp_path / "run", header())
    browser.open(gg.write_report([journal.folder]))
    assert browser.text("#now-speed") == "not measured"


def test_a_loss_has_the_colour_of_a_warning(page):
    slide(page, 12)
    colours = page.ask(
        "['#now-change', 'td.loss', 'body'].map((each) => getComputedStyle(document.querySelector(each)).color)"
    )
    assert colours[0] == colours[1] != colours[2]


def test_wide_tables_scroll_under_a_fixed_first_column_with_a_visible_edge(browser, journal, compared):
    for path, table in ((journal.folder / "report.html", "#choices .scroll"), (compared, "#compare + section .scroll")):
        browser.open(path, width=390, height=844)
        box = f"document.querySelector('{table}')"
        assert browser.ask(f"{box}.scrollWidth > {box}.clientWidth")
        assert "linear-gradient" in browser.ask(f"getComputedStyle({box}).backgroundImage")
        first = f"{box}.querySelector('tbody th').getBoundingClientRect().left"
        before = browser.ask(first)
        browser.driver.execute_script(f"{box}.scrollLeft = 200")
        assert browser.ask(f"{box}.scrollLeft") == 200
        assert browser.ask(first) == before
        covers = f"getComputedStyle({box}.querySelector('tbody th')).backgroundColor"
        assert browser.ask(covers) != "rgba(0, 0, 0, 0)"


NUMBERS_OVER_LINES = """(() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (!text.parentElement.checkVisibility() || text.parentElement.closest("code, script, .facts, svg")) continue;
    for (const match of text.data.matchAll(/[-+]?\\d[\\d,.]*/g)) {
      const range = document.createRange();
      range.setStart(text, match.index);
      range.setEnd(text, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(match[0]);
    }
  }
  return found;
})()"""


def test_no_number_breaks_over_lines_on_a_small_screen(browser, journal, compared, tmp_path):
    joint = joint_walk(tmp_path / "run", joint_header(layers=12, heads=12, neurons=3072))
    for path in (journal.folder / "report.html", compared, gg.write_report([joint.folder])):
        browser.open(path, width=390, height=844)
        assert browser.ask(NUMBERS_OVER_LINES) == []
        assert browser.ask("document.documentElement.scrollWidth") <= 390
    browser.driver.execute_script("document.getElementById('verdict').style = 'width: 3ch; word-break: break-all'")
    assert browser.ask(NUMBERS_OVER_LINES), "what such a number would be reported as"


def test_scores_are_coloured_by_rank_or_on_the_scale_of_a_step(page, journal):
    slide(page, 4)
    keys = as_matrix(journal.steps[4].scores.logs) / np.log(10)
    unfold(page, "rank")
    ranks = np.array(chart(page, "scores", "[0].z"), dtype=float)
    there = ~np.isnan(keys)
    assert sorted(ranks[there]) == list(range(1, 10)), "nine heads are left before this step"
    assert np.array_equal(np.argsort(ranks[there]), np.argsort(keys[there]))
    assert "by rank: 1 is the lowest" in page.text("#scores-caption")
    unfold(page, "step")
    assert np.allclose(chart(page, "scores", "[0].zmin"), np.nanmin(keys), rtol=1e-5)
    assert np.allclose(chart(page, "scores", "[0].zmax"), np.nanmax(keys), rtol=1e-5)
    unfold(page, "run")
    assert not np.allclose(chart(page, "scores", "[0].zmin"), np.nanmin(keys), rtol=1e-5)


@pytest.mark.parametrize("kind", ["heads", "joint"])
def test_the_curve_is_downloaded_as_csv(kind, browser, journal, tmp_path):
    made = journal if kind == "heads" else joint_walk(tmp_path / "run", joint_header())
    browser.open(gg.write_report([made.folder]))
    browser.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path / "down")}
    )
    browser.click("#csv")
    path = tmp_path / "down" / "curve.csv"
    WebDriverWait(browser.driver, 20).until(lambda _: path.exists() and path.stat().st_size)
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [int(row["step"]) for row in rows] == [step.step for step in made.steps]
    assert [float(row["macro_f1"]) for row in rows] == [round(step.quality["macro_f1"], 6) for step in made.steps]
    assert [int(row["parameters"]) for row in rows] == [step.parameters for step in made.steps]
    assert [int(row["multiplications"]) for row in rows] == [step.cost.multiplications for step in made.steps]
    if kind == "heads":
        names = [" ".join(unit_name(sites_of(made.header), head) for head in step.removed) for step in made.steps]
        assert [row["removed"] for row in rows] == names
        assert [int(row["heads_removed"]) for row in rows] == list(range(13))
    else:
        for kept in kept_units(made.header, made.steps):
            assert [int(row[f"{kept.words}_removed"]) for row in rows] == [kept.gone(step.step) for step in made.steps]
    assert browser.complaints() == []


def test_a_line_through_two_points_is_no_chart(browser, tmp_path):
    journal = walk(tmp_path / "run", header(1, 1), latency=True)
    browser.open(gg.write_report([journal.folder]))
    for name in ("curve", "parameters"):
        assert not browser.ask(f"document.getElementById('{name}').checkVisibility()")
    assert browser.ask("document.getElementById('few-points').checkVisibility()")
    assert browser.ask("document.getElementById('speed')") is None, "before and after are in a table"
    assert "torch, batch 8" in browser.text("[aria-labelledby=speed-title]")
    browser.press(Keys.HOME)
    assert browser.text("#now-heads") == "0"
    assert browser.complaints() == []


def test_changed_predictions_are_text(browser, tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    changed = [{**PREDICTIONS["changed"][0], "text": EVIL, "text_pair": EVIL, "label": EVIL}]
    classes = {"classes": [EVIL] * 3, "per_class": [{**each, "class": EVIL} for each in PREDICTIONS["per_class"]]}
    predictions = {**PREDICTIONS, **classes, "changed": changed}
    (journal.folder / "predictions.json").write_text(json.dumps(predictions))
    browser.open(gg.write_report([journal.folder]))
    assert browser.ask("document.body.dataset.hurt") is None
    assert browser.text(".examples li").count(EVIL) == 3
    assert browser.ask("document.querySelectorAll('.examples img, .examples b b').length") == 0
    assert browser.complaints() == []


def test_the_title_names_model_and_data_and_no_path(browser, tmp_path):
    journal = walk(tmp_path / "run", header(model="/models/tiny", source="/data/reviews.csv"), steps=3)
    browser.open(gg.write_report([journal.folder]))
    assert browser.ask("document.title") == "tiny on reviews · greedy-gnorm"
    assert browser.text("h1") == "tiny on reviews"


OLD = Path(__file__).parents[1] / "records" / "runs-0.1.0"


@pytest.mark.parametrize("name", ["finished", "half", "comparison"])
def test_runs_of_the_first_version_have_a_page_without_what_they_do_not_know(name, browser, tmp_path):
    browser.open(gg.write_report([OLD / name], tmp_path / "page.html"))
    titles = browser.ask("[...document.querySelectorAll('h2')].map((title) => title.textContent)")
    assert "Step by step" in titles
    assert not {"Choices", "On test rows", "Classes and changed predictions"} & set(titles)
    assert browser.text("#now-speed") in ("not measured", "1.00 times") or "measured" in browser.text("#now-speed-name")
    browser.press(Keys.HOME)
    assert browser.text("#now-number").startswith("0 of ")
    assert browser.complaints() == []
