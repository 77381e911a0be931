"""The alert's life, told as short strings, and its words."""

from __future__ import annotations

import pytest

from attnwatch.monitor.alerts import Alert, Life, Wording, advance
from attnwatch.monitor.sample import UsageError


def seen(step: int, pending_step: int) -> Alert:
    """What a sample of this step shows; the share says which sample the record was made from."""
    return Alert("r", "warning", "pending", "model", pending_step, None, None, float(step), (), {}, "", "")


def lives(series: str, hold: int, keep: int) -> list[Life | None]:
    """The life after each sample. x: met, .: quiet, ?: unknown, !: met and fires at once. Steps are 0, 1, 2, ..."""
    life, told = None, []
    for step, letter in enumerate(series):
        verdict = {"x": True, "!": True, ".": False, "?": None}[letter]
        see = lambda pending_step, step=step: seen(step, pending_step)  # noqa: E731
        life = advance(life, verdict, step, hold=1 if letter == "!" else hold, keep=keep, see=see)
        told.append(life)
    return told


def states(series: str, hold: int, keep: int) -> str:
    """One letter a sample: p pending, F firing, r resolved, d disappeared without having fired, - nothing."""
    letters = []
    for life in lives(series, hold, keep):
        if life is None:
            letters.append("-")
        elif life.alert.state == "resolved":
            letters.append("d" if life.alert.fired_step is None else "r")
        else:
            letters.append({"pending": "p", "firing": "F"}[life.alert.state])
    return "".join(letters)


@pytest.mark.parametrize(
    ("series", "hold", "keep", "expected"),
    [
        ("....", 1, 1, "----"),
        ("xx..", 1, 2, "FFFr"),
        ("x.x.", 1, 1, "FrFr"),
        ("xxx..x", 3, 2, "ppFFrp"),
        ("xx.xxx", 3, 1, "ppdppF"),
        ("xx.x?x", 2, 2, "pFFFFF"),
        ("x?x?x", 3, 1, "p?p?F".replace("?", "p")),
        ("x?.", 2, 1, "ppd"),
        ("xx.?.?.", 2, 3, "pFFFFFr"),
        ("xx..x..", 2, 3, "pFFFFFF"),
        ("????", 1, 1, "----"),
        (".x!.", 5, 1, "-pFr"),
        ("!x..", 5, 2, "FFFr"),
        ("x" * 41 + "." * 40, 40, 40, "p" * 39 + "F" * 41 + "r"),
    ],
)
def test_life(series: str, hold: int, keep: int, expected: str) -> None:
    """hold met samples in a row fire, keep quiet ones resolve, a gap restarts either, unknown moves nothing."""
    assert states(series, hold, keep) == expected


def test_steps_of_a_life() -> None:
    """pending_step is the first met step of the streak, fired_step and resolved_step the steps that changed it."""
    life = lives("x.xxx.x..", hold=3, keep=2)[-1]
    assert life is not None
    alert = life.alert
    assert (alert.pending_step, alert.fired_step, alert.resolved_step) == (2, 4, 8)


def test_evidence_is_that_of_the_moment_it_fired() -> None:
    """What comes after does not rewrite the record, not even its end."""
    told = lives("xxxx.", hold=2, keep=1)
    assert [life.alert.share for life in told if life] == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_new_streak_is_a_new_alert() -> None:
    """After it resolved, the next met sample starts over, with its own steps."""
    told = lives("xx.xx", hold=2, keep=1)
    last = told[-1]
    assert last is not None
    assert (last.alert.pending_step, last.alert.fired_step, last.alert.resolved_step) == (3, 4, None)


FIELDS = {"place": "", "share": 0.0, "count": 0, "scalar.tokens": 0.0}


def test_wording_fills_names_and_formats() -> None:
    """Percent, fixed point, a dotted scalar name, and braces that are meant."""
    text = "{share:.0%} of {count} in {place}, {scalar.tokens:g} {{so}}"
    words = {"place": "a{b}.0", "share": 0.256, "count": 3, "scalar.tokens": 2.0}
    assert Wording(text, FIELDS).fill(words) == "26% of 3 in a{b}.0, 2 {so}"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("{nothing}", ["no field 'nothing'", "place, share, count"]),
        ("{}", ["no field ''", "place"]),
        ("{0}", ["no field '0'"]),
        ("{share.real}", ["no field 'share.real'"]),
        ("{place.__class__}", ["no field 'place.__class__'"]),
        ("{share[0]}", ["no field 'share[0]'"]),
        ("{share!r}", ["{share:.2f}", "'!r'"]),
        ("{share:{count}}", ["{share:.2f}", "'{count}'"]),
        ("{share:999999999f}", ["{share:.2f}", "'999999999f'"]),
        ("{share:.999f}", ["{share:.2f}"]),
        ("{place:.2f}", ["'place'", "'.2f'"]),
        ("{share", ["{field}", "found"]),
        ("share}", ["{field}", "found"]),
    ],
)
def test_wording_refuses(text: str, pieces: list[str]) -> None:
    """A field that does not exist, a look inside one, or a format that is not a small number format."""
    with pytest.raises(UsageError) as raised:
        Wording(text, FIELDS)
    message = str(raised.value)
    assert "\n" not in message
    for piece in pieces:
        assert piece in message
