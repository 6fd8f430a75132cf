"""The report in a real browser, led by mouse and keys; see ``tools/headless_browser.py`` for which browsers do."""

import html
import math
import random
import re

import pytest
from headless_browser import Browser, BrowserError, find_browser
from report_runs import HOSTILE, default_rows, sample

from megarl.ops.report import compare_runs, report_run
from megarl.tracking.jsonl_files import BalanceFile

pytestmark = pytest.mark.browser

READY = "document.documentElement.dataset.ready === 'charts'"
FIRST_CHART = "document.querySelector('.plot')"


@pytest.fixture(scope="module")
def shared():
    program = find_browser()
    if program is None:
        raise BrowserError("no browser: put chromium on PATH, or name one in BROWSER")
    with Browser(program) as started:
        yield started


@pytest.fixture
def browser(shared):
    """Fails a test whose page complains, or asks for anything but itself."""
    shared.console.clear()
    shared.requests.clear()
    yield shared
    shared.resize(1280, 900)
    shared.prefer("light")
    asked = [address for address in shared.requests if not address.startswith("data:")]  # Plotly draws maps as pictures
    assert shared.console == [] and asked == []


@pytest.fixture
def page(browser, make_run):
    browser.open(report_run(make_run()), READY)
    return browser


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map((found) => found.innerText.trim())")


def shown(browser, column):
    return texts(browser, f"#rows > tr:not(.detail) > td:nth-child({column})")


def drawn(browser, plot=FIRST_CHART):
    """The lines of a chart as Plotly has them."""
    return browser.evaluate(f"{plot}.data.map((trace) => ({{name: trace.name, x: [...trace.x], y: [...trace.y]}}))")


def open_answer(browser, number=1):
    browser.click(f"#rows > tr:nth-child({number}) td:nth-child(5)")
    browser.wait("document.querySelector('.answer') !== null")


def colours(browser):
    return browser.evaluate("[...document.querySelectorAll('.token')].map((token) => token.style.background)")


def test_a_report_opens_offline_and_shows_the_run(page):
    assert page.evaluate("document.title") == "exp"
    assert texts(page, "#status") == ["finished"]
    assert "Held-out accuracy rose from 0.250 (step 0) to 0.750 (step 10)." in texts(page, "#verdict")[0]
    assert (
        dict(zip(texts(page, ".card .label"), texts(page, ".card .value"), strict=True))["Held-out accuracy"] == "0.750"
    )
    assert texts(page, "#findings li")[0].startswith("problem")
    assert texts(page, "#charts h3") == ["Learning", "Optimisation", "Time", "Failures"]
    (reward,) = drawn(page)
    assert reward["x"] == list(range(1, 11)) and reward["y"] == [step / 10 for step in range(1, 11)]
    assert page.evaluate("document.querySelectorAll('.plot svg.main-svg').length") > 2


def test_the_policy_of_the_page_lets_no_script_and_no_request_through(page):
    """What would happen if something of the run did become an element."""
    page.evaluate(
        """(() => { const script = document.createElement("script"); script.textContent = "document.title = 'taken'";
            document.head.append(script); const picture = document.createElement("img");
            picture.src = "http://127.0.0.1:9/x.png"; document.body.append(picture); })()"""
    )
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'reached', () => 'refused')") == "refused"
    assert page.evaluate("document.title") == "exp"
    assert page.console and all("Content Security Policy" in text for text in page.console)
    page.console.clear()
    page.requests.clear()  # refused ones are told too


def test_hostile_answers_are_text(browser, make_run):
    answers = [sample(0, 1, HOSTILE, input=HOSTILE, gts=HOSTILE, pred=HOSTILE, data_source=HOSTILE)]
    answers.append({"output": HOSTILE, "input": "masked", "masked": [[0, 9]], "score": 1, "data_source": "<b>x</b>"})
    browser.open(report_run(make_run(samples={1: answers})), READY)
    elements = "document.querySelectorAll('script, img, b').length"
    before = browser.evaluate(elements)
    for number in (1, 3):
        browser.click(f"#rows > tr:nth-child({number}) .toggle")
    browser.wait("document.querySelectorAll('.answer').length === 2")
    shown_text = browser.evaluate("[...document.querySelectorAll('.answer')].map((box) => box.textContent)")
    assert shown_text == [HOSTILE + "▪", HOSTILE]
    assert browser.evaluate(elements) == before and browser.evaluate("document.title") == "exp"
    name = browser.evaluate("document.querySelectorAll('.plot')[1].data[0].name")
    assert html.unescape(name) == "a< script> reward mean@1" and "<" not in name, "Plotly would read tags"


def test_search_and_filters(page):
    assert texts(page, "#count") == ["6 of 6 answers"]
    assert texts(page, "#left-out") == ["The run kept answers of 2 of its 10 steps."]
    page.type("#search", '"question 2"')
    page.wait("document.querySelector('#count').innerText === '2 of 6 answers'")
    assert shown(page, 5) == ["question 2"] * 2
    page.type("#search", "no such words")
    page.wait("document.querySelector('#count').innerText === '0 of 6 answers'")
    assert texts(page, "#rows .empty") == ["Nothing matches."]
    page.click("#clear")
    page.choose("#low", "0.5")
    page.wait("document.querySelector('#count').innerText === '2 of 6 answers'")
    assert shown(page, 3) == ["1", "1"]
    page.choose("#first-step", "5")
    page.wait("document.querySelector('#count').innerText === '1 of 6 answers'")
    page.click("#clear")
    page.choose("#source", "even")
    page.wait("document.querySelector('#count').innerText === '4 of 6 answers'")
    page.choose("#longest", "4")
    page.wait("document.querySelector('#count').innerText === '2 of 6 answers'")
    assert shown(page, 4) == ["4", "4"]


def test_rows_are_sorted_by_their_headers(page):
    assert shown(page, 1) == ["10", "10", "10", "1", "1", "1"], "the latest step first"
    page.click("th[data-column=length] button")
    assert shown(page, 4) == ["4", "4", "5", "5", "6", "6"]
    page.click("th[data-column=length] button")
    assert shown(page, 4) == ["6", "6", "5", "5", "4", "4"]
    assert page.evaluate("document.querySelector('th[data-column=length]').getAttribute('aria-sort')") == "descending"


def test_smoothing_logarithm_and_time(page):
    page.choose("#smoothing", "0.5")
    raw, smoothed = drawn(page)
    assert raw["y"] == [step / 10 for step in range(1, 11)]
    # by hand, as in the test of the function: weights 1/2 and 1/4, over their sum
    assert smoothed["y"][:2] == pytest.approx([0.1, (0.5 * 0.2 + 0.25 * 0.1) / 0.75])
    page.choose("#smoothing", "0")
    assert len(drawn(page)) == 1
    page.choose("#log", "true")
    assert page.evaluate(f"{FIRST_CHART}._fullLayout.yaxis.type") == "log"
    page.choose("#axis", "time")
    (reward,) = drawn(page)
    assert reward["x"] == pytest.approx([(5 + 2 * step + 3 * (step == 10)) / 3600 for step in range(1, 11)])
    assert page.evaluate(f"{FIRST_CHART}._fullLayout.xaxis.title.text") == "hours of training"


def test_charts_are_found_by_title_and_metric(page):
    page.type("#chart-search", "grad_norm")
    page.wait("[...document.querySelectorAll('.chart:not([hidden]) h4')].length === 2")
    assert texts(page, ".group:not([hidden]) .chart:not([hidden]) h4") == ["Gradient norm", "Any metric"]
    page.click("#findings li:first-child .link")
    page.wait("document.querySelector('#any-metric').value === 'reward/failed'")
    plot = "document.querySelector('#any-metric').parentNode.querySelector('.plot')"
    page.wait(f"{plot}.data?.[0].name === 'reward/failed'")
    assert drawn(page, plot)[0]["y"] == [float(step == 4) for step in range(1, 11)]
    assert page.evaluate(f"document.activeElement === {plot}"), "a keyboard goes on from there"


def test_hover_and_arrow_keys_tell_a_curves_values(page):
    label = "document.querySelector('.plot .hoverlayer .legend')"
    for _ in range(200):  # a chart that is still being fitted to the window takes its label away
        page.hover(".plot .nsewdrag")
        if page.evaluate(f"{label} !== null"):
            break
    assert "score" in page.evaluate(f"{label}.textContent")
    page.evaluate("document.querySelector('.plot').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.evaluate("document.querySelector('#spoken').textContent") == "2: score 0.2"
    label = page.evaluate(f"{FIRST_CHART}.getAttribute('aria-label')")
    assert label == "Reward. score: from 0.1 at step 1 to 1 at step 10, between 0.1 and 1"


def test_tokens_are_coloured_by_what_is_chosen(page):
    open_answer(page)
    assert texts(page, ".answer .token") == ["4", "", "2", "▪"]
    by_advantage = colours(page)
    sides = [re.findall(r"--(plus|minus)\) (\d+)%", colour) for colour in by_advantage]
    assert [side[0][0] if side else None for side in sides] == ["plus", "minus", "plus", None], by_advantage
    assert int(sides[0][0][1]) > int(sides[1][0][1]) > int(sides[2][0][1]), "the stronger, the more"
    assert "the weight of the token in the policy gradient" in texts(page, "#legend")[0]
    page.choose("#color", "log_prob")
    assert [bool(colour) for colour in colours(page)] == [False, True, True, True]
    assert colours(page) != by_advantage and "in nats" in texts(page, "#legend")[0]
    page.choose("#color", "mask")
    classes = page.evaluate(
        "[...document.querySelectorAll('.token')].map((token) => token.classList.contains('left-out'))"
    )
    assert classes == [False, True, False, False] and "not learned from" in texts(page, "#legend")[0]
    page.choose("#color", "")
    assert colours(page) == [""] * 4 and texts(page, "#legend") == [""]


def test_grouped_answers_are_paged_filtered_and_sorted(browser, make_run):
    """Fifteen prompts with four answers each: groups of one prompt have a heading between the rows."""
    answers = [sample(number // 4, 1, f"answer {number}", score=number % 4) for number in range(60)]
    browser.open(report_run(make_run(samples={1: answers})), READY)
    assert browser.evaluate("document.querySelector('#grouped').checked")
    seen = set()
    for number in (1, 2, 3):
        assert texts(browser, "#page") == [f"page {number} of 3"]
        seen |= set(texts(browser, "#rows > tr:not(.group-row) td[data-label=Answer]"))
        assert texts(browser, "#rows .group-row")
        if number < 3:
            browser.click("#next")
    assert seen == {f"answer {number}" for number in range(60)}
    browser.click("#table th[data-column=score] button")
    assert texts(browser, "#page") == ["page 1 of 3"]
    browser.type("#search", "answer 59")
    browser.wait("document.querySelector('#count').innerText === '1 of 60 answers'")
    assert texts(browser, "#rows td[data-label=Answer]") == ["answer 59"]


def test_a_tokens_numbers_by_mouse_and_by_keys(page):
    open_answer(page)
    page.hover(".answer .token:nth-child(3)")
    page.wait("!document.querySelector('#tip').hidden")
    tip = texts(page, "#tip")[0].split("\n")
    assert tip[0] == 'token 3: "2"'
    told = {name.strip(): value.strip() for name, value in zip(tip[1::2], tip[2::2], strict=True)}
    assert told == {"advantage": "0.25", "log-prob": "-0.5", "mask": "1"}
    page.evaluate("document.querySelector('.answer').focus()")
    page.press("ArrowRight")
    assert "token 4: writes nothing" in texts(page, "#tip")[0]
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('#spoken').textContent").startswith('token 2: " "')
    page.press("Escape")
    page.wait("document.querySelector('#tip').hidden")


def test_everything_can_be_done_with_keys(page):
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.evaluate("document.querySelector('#rows .toggle').focus()")
    page.press("Enter")
    page.wait("document.querySelector('.answer') !== null")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "answer"


def test_everything_that_can_be_used_has_a_name(page):
    open_answer(page)
    used = {"button", "checkbox", "combobox", "image", "img", "link", "searchbox", "slider", "spinbutton", "textbox"}
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in used]
    assert len(found) > 30
    nameless = [node["backendDOMNodeId"] for node in found if not node.get("name", {}).get("value", "").strip()]
    described = [page.send("DOM.describeNode", backendNodeId=number)["node"] for number in nameless]
    assert [(node["nodeName"], node.get("attributes")) for node in described] == []


def test_config_tells_what_differs(page):
    assert texts(page, "#config-rows tr")[0].split("\t") == ["optim.lr", "1e-06", "0.001", "command line"]
    assert texts(page, "#config-count") == ["1 of 4 keys"]
    page.choose("#config-kind", "all")
    assert texts(page, "#config-count") == ["4 of 4 keys"]
    page.type("#config-search", "steps")
    page.wait("document.querySelector('#config-count').innerText === '1 of 4 keys'")
    assert "abc123" in texts(page, "#environment-rows")[0]


def test_runs_are_compared(browser, make_run, tmp_path):
    for number, lr in enumerate((1e-6, 1e-5, 1e-4)):
        rows = [{name: value * (number + 1) for name, value in row.items()} for row in default_rows()]
        for row in rows:
            row["step"] /= number + 1
        answers = {10: [sample(1, 10, f"answer {number}", score=number / 2)]}
        make_run(f"sweep/{number}", rows, answers, lr=lr)
    browser.open(compare_runs([tmp_path / "sweep"]), READY)
    names = ["lr=1e-06", "lr=1e-05", "lr=0.0001"]
    assert [line["name"] for line in drawn(browser)] == names
    table = {row.split("\t")[0]: row.split("\t")[1:] for row in texts(browser, "#finals tbody tr")}
    assert table["held-out accuracy, after"] == ["0.75", "1.5", "2.25"]
    assert texts(browser, "#finals .best")[0] == "2.25"
    browser.click("#finals th:nth-child(3) input")
    assert [line["name"] for line in drawn(browser)] == [names[0], names[2]]
    assert texts(browser, "#config-rows td") == ["optim.lr", "1e-06", "1e-05", "0.0001", "0.001"]
    assert texts(browser, "#side-prompt") == ["question 1"]
    assert texts(browser, "#side-answers .plain") == ["answer 0", "answer 1", "answer 2"]
    assert texts(browser, "#side-answers b") == ["0", "0.5", "1"]
    browser.choose("#run", "2")
    browser.wait("document.querySelector('#count').innerText === '1 of 3 answers'")
    stack = "[...document.querySelectorAll('.plot')].find((plot) => plot.closest('.wide'))"
    browser.evaluate(f"{stack}.scrollIntoView({{behavior: 'instant'}})")
    browser.wait(f"{stack}.data !== undefined")
    # ten steps, each of one second of gen; a validation of eight seconds in all
    first = {line["name"]: line["x"][0] for line in drawn(browser, stack)}
    assert first == {"gen": pytest.approx(1.0), "testing": pytest.approx(0.8)}


def test_a_long_run_is_drawn_with_its_extremes(browser, make_run):
    noise = random.Random(0)
    rows = [{"step": step, "critic/score/mean": noise.gauss(0, 1), "timing_s/step": 1.0} for step in range(1, 5001)]
    rows[1234]["critic/score/mean"] = 99.0
    browser.open(report_run(make_run(rows=rows)), READY)
    low, high, mean = drawn(browser)
    assert max(high["y"]) == 99.0 and len(mean["y"]) == 600 and min(low["y"]) < -3
    browser.choose("#smoothing", "0.9")
    _, _, smoothed = drawn(browser)
    assert max(map(abs, smoothed["y"][50:])) < max(map(abs, mean["y"][50:]))
    assert all(math.isfinite(value) for value in smoothed["y"])


@pytest.mark.parametrize("width", [360, 390])
def test_answers_and_config_stack_on_a_phone(page, width):
    """No table is wider than the window, and a cell begins below the one before it."""
    page.resize(width, 844)
    for table in ("#table", "#config table"):
        assert page.evaluate(f"document.querySelector('{table}').scrollWidth <= window.innerWidth"), table
    for row in ("#rows > tr", "#config-rows > tr"):
        tops = page.evaluate(f"[...document.querySelector('{row}').cells].map((cell) => cell.offsetTop)")
        assert tops == sorted(set(tops)) and len(tops) > 1, row
    page.resize(1280, 900)


def test_dark_narrow_and_printed(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.prefer("dark")
    page.wait(f"{background} !== {light!r}")
    for wanted in ("light", "dark", "auto"):
        page.click("#theme")
        assert page.evaluate("document.querySelector('#theme').innerText") == f"theme: {wanted}"
        assert (page.evaluate(background) == light) == (wanted == "light")
    page.resize(360, 740)
    open_answer(page)
    page.wait("document.documentElement.scrollWidth <= 360")  # nothing sticks out
    page.resize(1280, 900)
    printed = page.printed()
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
    assert page.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))")


def test_an_empty_run_and_an_old_browser(browser, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    path = report_run(tmp_path)
    browser.open(path, READY)
    assert "No metrics were logged." in texts(browser, "#charts")[0]
    assert texts(browser, "#rows") == ["No answers were kept."]
    script = browser.send("Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream")
    browser.open(path, "!document.querySelector('#notice').hidden")
    assert "DecompressionStream" in texts(browser, "#notice")[0]
    browser.send("Page.removeScriptToEvaluateOnNewDocument", **script)
    browser.wait("true")
    assert len(browser.console) == 1
    browser.console.clear()


def test_ranks_are_a_map_that_mouse_and_keys_read(browser, make_run):
    folder = make_run()
    file = BalanceFile(folder / "balance.jsonl")
    for step in range(1, 4):
        file.add(step, {"actor/tokens": [100, 100, 100 + 150 * (step == 2)]})
    browser.open(report_run(folder), READY)
    plot = "[...document.querySelectorAll('.plot')].find((one) => one.ariaLabel.startsWith('Ranks of actor: tokens'))"
    browser.evaluate(f"{plot}.scrollIntoView()")
    browser.wait(f"{plot}.data !== undefined")
    (trace,) = browser.evaluate(f"{plot}.data.map((one) => ({{type: one.type, x: one.x, y: one.y, z: one.z}}))")
    assert (trace["type"], trace["x"], trace["y"]) == ("heatmap", [1, 2, 3], [0, 1, 2])
    assert trace["z"] == [[1, round(100 / 150, 4), 1]] * 2 + [[1, round(250 / 150, 4), 1]]
    told = "step 2, rank 2: 250, 1.667 of the mean"
    assert browser.evaluate(f"{plot}.ariaLabel") == f"Ranks of actor: tokens. Most at {told}"
    browser.evaluate(f"{plot}.focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert texts(browser, "#spoken") == [told]
