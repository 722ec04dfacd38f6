"""`lockstep report`: its page in a real browser, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.state.files.lock import DirectoryLock, LockOwner
from lockstep.tools.report import page
from tests import browser
from tests.browser import Browser
from tests.conftest import Lockstep
from tests.recorded import Run

pytestmark = pytest.mark.forked

SCRIPT = """
import torch
import lockstep

with lockstep.Run("small", replicas=2) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader([torch.full((4,), i / 40) for i in range(40)], batch_size=4, shuffle=True)
    for _ in run.epochs(3):
        for x in loader:
            loss = (model(x) - 1).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.log(accuracy=0.5)
        run.save()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests here: its start takes a second."""
    if browser.PROGRAM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def overflows(chromium: Browser) -> list[str]:
    """Return what is wider than the window, apart from what scrolls by itself."""
    found: list[str] = chromium.ask(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.table') && !e.closest('.chart')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    return found


def on_the_buttons(chromium: Browser) -> list[str]:
    """Return texts that lie where a chart's buttons are, and buttons that something lies on."""
    found: list[str] = chromium.ask(
        """
        [...document.querySelectorAll('.modebar-btn')].flatMap(button => {
          button.scrollIntoView({ block: 'center' });
          const box = button.getBoundingClientRect();
          const meets = other => other.left < box.right && box.left < other.right
            && other.top < box.bottom && box.top < other.bottom;
          const texts = [...button.closest('figure').querySelectorAll('.legend, h3, p, label')];
          const under = texts.filter(e => {
            const range = document.createRange();
            range.selectNodeContents(e);
            return meets(e.matches('.legend') ? e.getBoundingClientRect() : range.getBoundingClientRect());
          });
          const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
          return [...under, ...(button.contains(top) ? [] : [button])].map(e => e.outerHTML.slice(0, 80));
        })
        """
    )
    return found


def shown(chromium: Browser) -> list[str]:
    """Return the titles of the charts that are drawn, with something in them."""
    found: list[str] = chromium.ask(
        "[...document.querySelectorAll('figure')].filter(e => e.querySelector('svg .trace'))"
        ".map(e => e.querySelector('h3').textContent)"
    )
    return found


@pytest.mark.ranks(2)
def test_a_real_run_with_kills(lockstep: Lockstep, chromium: Browser) -> None:
    lockstep.script(SCRIPT)
    faults = {"LOCKSTEP_FAULTS": "kill@8,kill@22"}
    done = lockstep("run", "-n", "2", "--run-dir", "run", "train.py", env=faults)
    assert done.code == 0, done.err
    done = lockstep("report", "run")
    assert (done.code, done.out) == (0, "run/report.html: run (finished)\n"), done.err
    opened = chromium.open(lockstep.directory / "run" / "report.html")
    text = chromium.ask("document.body.innerText")
    assert text.count("was killed by signal 9 (SIGKILL)") == 2
    digest = json.loads((lockstep.directory / "run" / "run.json").read_text())["digest"]
    assert digest in text
    assert {"loss", "accuracy", "Samples per second", "Timeline"} <= set(shown(chromium))
    curve = chromium.ask("document.querySelector('.chart').data.map(t => [...t.x])")
    assert curve == [list(range(1, 31))], "each step once, though some were computed again"
    assert opened.errors == []


def test_the_page_in_a_browser(tmp_path: Path, lockstep: Lockstep, chromium: Browser) -> None:
    Run(tmp_path / "one", kills=[20, 40]).write()
    other = {"name": "<img src=x onerror=alert(1)>", "seed": 1}
    Run(tmp_path / "two", ranks=4, gpu=True, status="failed", identity=other).write()
    assert lockstep("report", "one", "two", "-o", "both.html").code == 0
    for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
        opened = chromium.open(tmp_path / "both.html", width=width, dark=dark)
        assert len(shown(chromium)) == 14
        text = "The identities differ in: name, seed. Only finished runs have a digest."
        assert text in chromium.ask("document.body.innerText")
        assert chromium.ask("document.querySelectorAll('img').length") == 0
        assert overflows(chromium) == []
        assert opened.errors == []
        outside = [
            url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))
        ]
        assert outside == []
        background = chromium.ask("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")


def test_a_chart_with_many_lines_has_its_legend_beside_its_buttons(
    tmp_path: Path, chromium: Browser
) -> None:
    pytest.importorskip("plotly")
    figure = page.graph_objects().Figure()
    for number in range(7):
        figure.add_scatter(x=[0, 1], y=[0, number], name=f"a line with a long name {number}")
    chart = page.Chart(figure, "A title", "A note " * 20, log=True)
    page.write(tmp_path / "page.html", "Lines", [page.Section("One", [chart, chart])])
    for width in (1280, 920, 700):
        chromium.open(tmp_path / "page.html", width=width)
        assert chromium.ask("document.querySelectorAll('.modebar-btn').length") == 8
        assert on_the_buttons(chromium) == []
        assert overflows(chromium) == []
    chromium.open(tmp_path / "page.html", width=390)
    assert chromium.ask("document.querySelectorAll('.modebar-btn').length") == 0


def test_a_page_that_is_used(tmp_path: Path, lockstep: Lockstep, chromium: Browser) -> None:
    """Its reader switches to the dark theme, and to a logarithmic axis."""
    Run(tmp_path / "one").write()
    assert lockstep("report", "one").code == 0
    opened = chromium.open(tmp_path / "one" / "report.html")
    colour = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    light = chromium.ask(colour)
    chromium.theme(dark=True)
    chromium.until(f"{colour} !== '{light}'")
    assert (light, chromium.ask(colour)) == ("rgb(28, 32, 36)", "rgb(232, 234, 237)")
    chromium.ask("document.querySelector('figure input').click()")
    assert chromium.ask("document.querySelector('.chart').layout.yaxis.type") == "log"
    assert chromium.ask(colour) == "rgb(232, 234, 237)"
    assert opened.errors == []


@pytest.mark.wide
def test_a_long_run_is_a_small_page(tmp_path: Path, lockstep: Lockstep) -> None:
    Run(tmp_path / "long", steps=6000, kills=[3000]).write()
    assert lockstep("report", "long").code == 0
    assert (tmp_path / "long" / "report.html").stat().st_size < 6_000_000


def test_a_run_that_goes_on(tmp_path: Path, lockstep: Lockstep) -> None:
    directory = Run(tmp_path / "run", status="running").write()
    with (directory / "events" / "rank-0.jsonl").open("a") as file:
        file.write('{"time": 1795000061.0, "kind": "lo')
    lock = DirectoryLock(directory, LockOwner.of("single", {}, "one"))
    done = lockstep("report", "run")
    assert (done.code, done.out) == (0, "run/report.html: run (running)\n"), done.err
    lock.release(ends=True)
    done = lockstep("report", "run")
    assert (done.code, done.out) == (0, "run/report.html: run (dead)\n"), done.err


def test_what_cannot_be_reported(tmp_path: Path, lockstep: Lockstep) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("newer", "without"):
        Run(tmp_path / name).write()
    content = json.loads((tmp_path / "newer" / "run.json").read_text())
    (tmp_path / "newer" / "run.json").write_text(json.dumps(content | {"format": 99}))
    for file in (tmp_path / "without" / "events").iterdir():
        file.unlink()
    cases = {
        ("none",): (2, "there is no directory none; expected that of a run"),
        ("empty",): (2, "run.json"),
        ("newer",): (1, "has format 99; expected 1 at most"),
        ("without",): (1, "holds no events of a rank"),
        ("newer", "none"): (2, "there is no directory none"),
        (): (2, "RUN_DIR"),
    }
    for words, (code, message) in cases.items():
        done = lockstep("report", *words)
        assert done.code == code, (words, done)
        assert message in done.err.splitlines()[0]
        assert "Traceback" not in done.err


def test_the_file_that_is_written(tmp_path: Path, lockstep: Lockstep) -> None:
    Run(tmp_path / "run").write()
    (tmp_path / "page.html").write_text("what was there")
    assert lockstep("report", "run", "-o", "page.html").code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    done = lockstep("report", "run", "-o", os.path.join("missing", "page.html"))  # noqa: PTH118
    assert done.code == 1
    assert done.err.startswith("lockstep: error: the page missing/page.html cannot be written")


def test_no_browser_is_needed_and_none_is_opened(tmp_path: Path, lockstep: Lockstep) -> None:
    pytest.importorskip("plotly")
    Run(tmp_path / "run").write()
    for name in ("xdg-open", "x-www-browser", "www-browser", "firefox", "chromium"):
        program = lockstep.script('#!/bin/sh\n: > "$OPENED"\n', f"bin/{name}")
        (tmp_path / program).chmod(0o700)
    opened = tmp_path / "opened"
    programs = str(tmp_path / "bin")
    there = {"PATH": programs, "BROWSER": "firefox", "DISPLAY": ":0", "OPENED": str(opened)}
    for env in (there, {"PATH": "", "BROWSER": "", "DISPLAY": ""}):
        done = lockstep("report", "run", env=env)
        assert (done.code, done.out, done.err) == (0, "run/report.html: run (finished)\n", "")
        assert not opened.exists()


def test_help_needs_no_plotly(lockstep: Lockstep) -> None:
    done = lockstep("report", "--help")
    assert done.code == 0
    assert "RUN_DIR" in done.out
