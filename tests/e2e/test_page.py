"""The page about a run of `make e2e`: whole, by itself, and true to the record."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from tests.e2e.cluster.expected import EXPECTED
from tests.e2e.cluster.history import accepted, done_steps, windows_of
from tests.e2e.cluster.judge import summarize
from tests.e2e.cluster.page import render_page
from tests.e2e.cluster.pictures import (
    Scale,
    color_class,
    lanes,
    losses,
    pod_lives,
    recoveries,
    time_spent,
    timeline,
)
from tests.e2e.cluster.record import CheckResult, Record
from tests.e2e.cluster.style import STYLE
from tests.e2e.made_record import NUM_STEPS, STRIKES, made_record

_VOID = ("meta", "br")


@pytest.fixture(scope="module")
def record() -> Record:
    return made_record()


@pytest.fixture(scope="module")
def page(record: Record) -> str:
    return render_page(record, summarize(record))


class _Tags(HTMLParser):
    """Tags that are open, and all texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.classes |= {kind for name, value in attrs if name == "class" for kind in
                         (value or "").split()}  # fmt: skip

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> _Tags:
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    return tags


def test_every_tag_is_closed_and_every_class_has_a_style(page: str) -> None:
    styled = set(re.findall(r"\.([A-Za-z][A-Za-z0-9-]*)", STYLE))
    # Phases that look like all phases, and text that looks like all text.
    assert read(page).classes - styled == {"pending", "starting", "label"}


def test_it_needs_no_other_file_and_no_network(page: str) -> None:
    assert not re.search(r"https?:|src=|href=|@import|<script|<link", page)
    assert set(re.findall(r"url\([^)]*\)", page)) == {"url(#hatch)"}


def test_it_is_made_for_light_and_dark_screens() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[a-z0-9-]+):", light))
    dark_names = set(re.findall(r"(--[a-z0-9-]+):", dark))
    assert names == dark_names
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", STYLE)) == names


def test_each_fault_stands_there_with_what_was_expected_and_seen(page: str) -> None:
    text = " ".join(read(page).texts)
    for row in EXPECTED:
        assert row.title in text
        assert text.count(row.incident) >= 2
    assert "passed" in text
    assert "Breaches" not in text


def test_a_breach_is_told_first(record: Record) -> None:
    broken = record.model_copy(update={"leftover_pods": ["<b>stamps-1"], "error": "a & b"})
    page = render_page(broken, summarize(broken))
    text = " ".join(read(page).texts)
    assert "2 breaches" in text
    assert "pods are left: <b>stamps-1" in text
    assert "<b>stamps-1" not in page
    assert page.index("Breaches</h2>") < page.index("What happened</h2>")


def test_checks_and_events_are_shown_as_they_are(record: Record) -> None:
    event = {"lastTimestamp": "2027-01-15T08:00:01Z", "reason": "NodeLost", "message": "<gone>"}
    failed = CheckResult(name=record.checks[0].name, holds=False, detail="x" * 999 + "<")
    shown = record.model_copy(
        update={"events": [{**event, "count": 3}], "checks": [failed], "facts": {"n": 2.0}}
    )
    text = unescape(" ".join(read(render_page(shown, summarize(shown))).texts))
    assert "2027-01-15 08:00:01" in text
    assert "<gone> (3 times)" in text
    assert "fails" in text
    assert "x" * 999 not in text  # a log may be long


def test_a_run_that_came_to_nothing_has_its_page(record: Record) -> None:
    bare = Record(
        job="stamps",
        began_s=record.began_s,
        ended_s=record.began_s,
        error="no node was Ready",
        num_steps=NUM_STEPS,
        injections=[],
        seen=[],
        events=[],
        steps=[],
        undisturbed=[],
        leftover_pods=[],
        checks=[],
    )
    assert "no node was Ready" in " ".join(read(render_page(bare, summarize(bare))).texts)


def test_a_pod_is_told_from_its_first_to_its_last_look(record: Record) -> None:
    lives = {life.name: life for life in pod_lives(record)}
    assert len(lives) == 6
    first = lives["stamps-1"]  # on the node that is cut off
    cut_s = record.injections[3].began_s
    assert first.node == "node-a"
    assert [stretch.pod.attempt for stretch in first.stretches] == [1, 1, 2, 2]
    assert [stretch.pod.is_leaving for stretch in first.stretches] == [False] * 3 + [True]
    assert first.end_s > cut_s
    for before, after in zip(first.stretches, first.stretches[1:], strict=False):
        assert before.end_s == after.begin_s


def test_pods_of_a_node_do_not_lie_over_each_other(record: Record) -> None:
    lives = pod_lives(record)
    found = lanes(lives)
    assert list(found) == ["node-a", "node-b", "node-c"]
    assert sum(len(row) for rows in found.values() for row in rows) == len(lives)
    for rows in found.values():
        for row in rows:
            for before, after in zip(row, row[1:], strict=False):
                assert before.end_s <= after.begin_s


def test_two_pods_at_once_on_a_node_get_two_rows(record: Record) -> None:
    lives = pod_lives(record)
    twins = [lives[0], lives[0]]
    assert [len(row) for row in lanes(twins)["node-a"]] == [1, 1]


def test_the_timeline_marks_every_fault_and_draws_every_pair(record: Record) -> None:
    results, done = summarize(record).faults, done_steps(record.steps)
    picture = timeline(record, windows_of(record), results, done)
    assert picture.count('<g class="mark">') == len(STRIKES)
    assert picture.count("<polyline") == len(record.steps)
    assert "seen after 41.0 s" in picture
    assert "trained beyond it after 70.0 s" in picture


def test_the_recoveries_have_their_stages(record: Record) -> None:
    picture = recoveries(windows_of(record), summarize(record).faults)
    # A restart in place has no stages but the last one; three faults make no restart.
    assert picture.count("stage start") == picture.count("stage schedule") == 4
    assert picture.count("stage firstStep") == picture.count('class="resumed"') == 5
    assert picture.count("stage trains-on") == 3
    assert "85.0 s, 5 steps again" in picture


def test_the_losses_show_each_step_as_often_as_it_was_done(record: Record) -> None:
    done = done_steps(record.steps)
    picture = losses(record, done, accepted(done_steps(record.undisturbed)), windows_of(record))
    assert picture.count('class="dot ') == NUM_STEPS
    assert picture.count('class="again-dot ') == len(done) - NUM_STEPS


def test_the_time_spent_is_all_the_time(record: Record) -> None:
    spent = time_spent(record, done_steps(record.steps))
    assert sum(spent.values()) == pytest.approx(record.ended_s - record.began_s)
    # Of each pair the first step is not counted: when it began, nobody wrote down.
    assert spent["steps again"] == 2.0 * (24 - 5)


def test_what_lies_outside_is_drawn_at_the_edge() -> None:
    scale = Scale(begin=10, end=20, left=100, right=200)
    assert [scale(value) for value in (0, 10, 15, 20, 99)] == [100, 100, 150, 200, 200]


def test_attempts_take_turns_with_the_colours() -> None:
    assert [color_class(attempt) for attempt in (1, 2, 6, 7)] == ["a1", "a2", "a6", "a1"]


def test_a_recovery_that_is_told_as_longer_than_it_was_is_drawn_in_full(record: Record) -> None:
    results = [*summarize(record).faults]
    results[0] = results[0].model_copy(update={"stages": {"firstStep": 400.0}})
    picture = recoveries(windows_of(record), results)
    assert ">360 s</text>" in picture
