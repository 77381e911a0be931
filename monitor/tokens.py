"""The words of the condition language (conditions.py), and the numbers in it that others may want to vary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from attnwatch.monitor.sample import UsageError

MAX_LENGTH = 4000
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Token(NamedTuple):
    kind: str  # number, name, symbol, end
    text: str
    column: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text if len(self.text) < 40 else self.text[:37] + "...")


_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>scalar\.[A-Za-z_][A-Za-z0-9_]*|[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<symbol><=|>=|==|!=|[-+*/<>(),])"
)


def tokenize(text: str) -> list[Token]:
    """Raises UsageError with the column (from 1) of what is no part of the language."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"column {MAX_LENGTH + 1}: expected at most {MAX_LENGTH} characters, found {len(text)}")
    tokens, at = [], 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise UsageError(f"column {at + 1}: expected a number, a name, an operator or '(', found {text[at]!r}")
        tokens.append(Token(match.lastgroup, match.group(), at + 1))
        at = match.end()
    return [*tokens, Token("end", "", len(text) + 1)]


class _Threshold(NamedTuple):
    """A name compared with a number and nothing else, and where in the text that number stands, with its sign."""

    name: str
    begin: int
    end: int


def compared(text: str) -> set[str]:
    """The names that a condition compares with a number and nothing else, as in `x < 3`. Raises UsageError."""
    return {threshold.name for threshold in _thresholds(text)}


def with_threshold(text: str, name: str, value: float) -> str:
    """The condition with another number wherever it compares this name with a number and nothing else."""
    for threshold in reversed(list(_thresholds(text))):
        if threshold.name == name:
            text = f"{text[: threshold.begin]}{value:.9g}{text[threshold.end :]}"
    return text


def _thresholds(text: str) -> Iterator[_Threshold]:
    """Those that stand between `and`, `or`, `not`, parentheses and the ends: in `2 * x < 3` nothing is."""
    tokens = tokenize(text)
    for at in range(len(tokens) - 3):
        sign = tokens[at + 2]
        number = at + 2 + (sign.text == "-")
        if (
            (at == 0 or tokens[at - 1].text in ("(", "and", "or", "not"))
            and tokens[at].kind == "name"
            and tokens[at + 1].text in COMPARISONS
            and tokens[number].kind == "number"
            and tokens[number + 1].text in (")", "and", "or", "")
        ):
            end = tokens[number].column - 1 + len(tokens[number].text)
            yield _Threshold(tokens[at].text, sign.column - 1, end)
