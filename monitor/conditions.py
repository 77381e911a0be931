"""The comparison language of rules: parsed once, then asked of every head of every sample; never run as Python.

    condition   = conjunction { "or" conjunction }
    conjunction = denial { "and" denial }
    denial      = "not" denial | comparison
    comparison  = sum [ ("<" | "<=" | ">" | ">=" | "==" | "!=") sum ]
    sum         = product { ("+" | "-") product }
    product     = factor { ("*" | "/") factor }
    factor      = "-" factor | number | name | function "(" condition { "," condition } ")" | "(" condition ")"

Numbers are float64 arrays `[L, H]` (layers x heads; an axis of length 1 stands for all). A comparison with NaN is
unknown. Inside, a truth is 1, 0 or 0.5 for unknown, or bool where all is known: Kleene's `and or not` are then the
minimum, the maximum and 1 - x. Arithmetic is IEEE's: 1 / 0 is infinite. Functions of a head's own past (history.py)
take in one value each time the condition is evaluated, so every part is evaluated every time, also where the outcome
is already clear.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.history import Array, Extreme, Window, first, mean, median, slope
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.state import State
from attnwatch.monitor.tokens import COMPARISONS, Token, tokenize

Values = Mapping[str, Array]
Truth = NDArray[Any]
"""bool, or float64 where anything is unknown."""

# Text comes from files that others wrote: with MAX_LENGTH this keeps the recursion below a hundred or so Python frames.
MAX_DEPTH = 20
MAX_WINDOW = 10_000

FUNCTIONS = {
    "start(x)": "the first finite value the head had",
    "lowest(x)": "the lowest finite value the head had so far",
    "highest(x)": "the highest finite value the head had so far",
    "mean(x, n)": "mean of the head's last n finite values; unknown before there are n, and while x is not finite",
    "median(x, n)": "median of them",
    "slope(x, n)": "least-squares slope of them, per sample (n >= 2)",
    "min(a, b)": "the smaller one",
    "max(a, b)": "the larger one",
    "abs(x)": "without its sign",
    "sqrt(x)": "square root, unknown below 0",
    "ln(x)": "natural logarithm, unknown below 0",
    "exp(x)": "e to the power x",
    "finite(x)": "true or false, never unknown: whether x is a finite number (a missing one is not)",
}
"""Every function as it is written, and what it gives; the documentation's table."""

_POINTWISE: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "ln": np.log,
    "exp": np.exp,
    "min": np.minimum,
    "max": np.maximum,
}
_ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_COMPARE: dict[str, Callable[[Array, Array], NDArray[np.bool_]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": lambda a, b: (a < b) | (a > b),  # like the others false with NaN
}
_UNKNOWN = 0.5

_EXTREMES: dict[str, Callable[[Array, Array], Array]] = {"start": first, "lowest": np.fmin, "highest": np.fmax}
_WINDOWS: dict[str, Callable[[Array], Array]] = {"mean": mean, "median": median, "slope": slope}
_ARGUMENTS = {signature.split("(")[0]: signature.count(",") + 1 for signature in FUNCTIONS}


class _Node(NamedTuple):
    run: Callable[[Values], NDArray[Any]]
    is_truth: bool
    column: int


class _Comparison:
    """Remembers its two sides of the newest evaluation, from which the heads are ranked."""

    def __init__(self, symbol: str, left: _Node, right: _Node) -> None:
        self._compare = _COMPARE[symbol]
        self._left, self._right = left.run, right.run
        self.sides = (np.empty((0, 0)), np.empty((0, 0)))

    def __call__(self, values: Values) -> Truth:
        left, right = self.sides = (self._left(values), self._right(values))
        truth: Truth = self._compare(left, right)
        no_left, no_right = np.isnan(left), np.isnan(right)
        if np.count_nonzero(no_left) or np.count_nonzero(no_right):
            truth = truth + _UNKNOWN * (no_left | no_right)
        return truth


class _Past:
    """A function of the past at work. Where a condition repeats it, it takes in a value once and is read again."""

    def __init__(self, function: Extreme | Window, x: Callable[[Values], Array]) -> None:
        self.function = function
        self._x = x
        self._newest = np.empty((0, 0))

    def run(self, values: Values) -> Array:
        self._newest = self.function(self._x(values))
        return self._newest

    def again(self, values: Values) -> Array:
        return self._newest


class Condition:
    """A parsed condition together with what it remembers: one object for one stream of samples."""

    def __init__(self, root: _Node, names: tuple[str, ...], first: _Comparison | None, pasts: Sequence[_Past]) -> None:
        self.names = names
        """The names it uses, in order of appearance."""
        self._run = root.run
        self._first = first
        self._pasts = pasts

    def evaluate(self, values: Values) -> Truth:
        """Truth `[L, H]` (1, 0 or NaN; bool where all is known), an axis of length 1 where no name differs along it.

        values: at least `names`, float64, an axis of length 1 for what is the same along it. Call it once a sample, in
        order, within `np.errstate(all="ignore")`. Layers and heads may be added from call to call, at the end of their
        axis.
        """
        truth = self._run(values)
        if truth.dtype != bool:
            np.putmask(truth, truth == _UNKNOWN, np.nan)
        return truth

    def distance(self) -> Array:
        """How far the newest values are past the first comparison, `|left - right| / |right|`; 0 without one."""
        if self._first is None:
            return np.zeros((1, 1))
        left, right = self._first.sides
        with np.errstate(all="ignore"):
            return np.asarray(np.abs(left - right) / np.where(right == 0, 1.0, np.abs(right)))

    def state(self) -> list[State]:
        """What it remembers of the past."""
        return [past.function.state() for past in self._pasts]

    def restore(self, states: Sequence[State]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no state of this condition."""
        for past, state in zip(self._pasts, states, strict=True):
            past.function.restore(state)


def parse(text: str, names: Collection[str] | None) -> Condition:
    """The condition that a text says. names: those that exist (`scalar.NAME` always does); None takes any.

    Raises UsageError with the column (from 1), what was expected and what was found.
    """
    parser = _Parser(text, names)
    root = parser.truth(parser.disjunction())
    if parser.token.kind != "end":
        raise parser.expected("'and', 'or' or the end")
    return Condition(root, tuple(parser.names), parser.first, tuple(parser.pasts.values()))


class _Parser:
    """Recursive descent over the grammar at the head of this file: one method a line of it."""

    def __init__(self, text: str, names: Collection[str] | None) -> None:
        self._text, self._tokens = text, tokenize(text)
        self._exist = names
        self._depth = 0
        self.names: dict[str, None] = {}  # an ordered set
        self.first: _Comparison | None = None
        self.pasts: dict[str, _Past] = {}  # by how they are written, in order of evaluation: from left to right

    @property
    def token(self) -> Token:
        return self._tokens[0]

    def expected(self, what: str) -> UsageError:
        return UsageError(f"column {self.token.column}: expected {what}, found {self.token}")

    def truth(self, node: _Node) -> _Node:
        if not node.is_truth:
            raise UsageError(f"column {node.column}: expected a comparison such as x > 3, found a number")
        return node

    def number(self, node: _Node) -> _Node:
        if node.is_truth:
            raise UsageError(f"column {node.column}: expected a number, found a comparison")
        return node

    def _take(self, *texts: str) -> Token | None:
        if self.token.kind in ("name", "symbol") and self.token.text in texts:
            return self._tokens.pop(0)
        return None

    def _close(self, text: str) -> None:
        if not self._take(text):
            raise self.expected(repr(text))

    def _nested(self, rule: Callable[[], _Node]) -> _Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UsageError(f"column {self.token.column}: expected at most {MAX_DEPTH} levels of nesting")
        node = rule()
        self._depth -= 1
        return node

    def disjunction(self) -> _Node:
        return self._chain(self.conjunction, self.truth, {"or": np.maximum})

    def conjunction(self) -> _Node:
        return self._chain(self.denial, self.truth, {"and": np.minimum})

    def denial(self) -> _Node:
        start = self._take("not")
        if not start:
            return self.comparison()
        run = self.truth(self._nested(self.denial)).run
        return _Node(lambda values: _denied(run(values)), True, start.column)

    def comparison(self) -> _Node:
        left = self.sum()
        symbol = self._take(*COMPARISONS)
        if not symbol:
            return left
        node = _Comparison(symbol.text, self.number(left), self.number(self.sum()))
        self.first = self.first or node
        if self.token.text in COMPARISONS:
            raise self.expected("one comparison at a time (a < b and b < c)")
        return _Node(node, True, left.column)

    def sum(self) -> _Node:
        return self._chain(self.product, self.number, {s: _ARITHMETIC[s] for s in "+-"})

    def product(self) -> _Node:
        return self._chain(self.factor, self.number, {s: _ARITHMETIC[s] for s in "*/"})

    def _chain(
        self,
        part: Callable[[], _Node],
        check: Callable[[_Node], _Node],
        operators: Mapping[str, Callable[[Array, Array], Array]],
    ) -> _Node:
        """part { operator part }, from left to right in one flat loop: a long chain is no deep recursion."""
        head = part()
        tail = []
        while symbol := self._take(*operators):
            tail.append((operators[symbol.text], check(part()).run))
        if not tail:
            return head
        run = check(head).run

        def chain(values: Values) -> Array:
            result = run(values)
            for operate, right in tail:
                result = operate(result, right(values))
            return result

        return _Node(chain, head.is_truth, head.column)

    def factor(self) -> _Node:
        token = self.token
        if self._take("-"):
            run = self.number(self._nested(self.factor)).run
            return _Node(lambda values: -run(values), False, token.column)
        if self._take("("):
            node = self._nested(self.disjunction)
            self._close(")")
            return node
        if token.kind == "number":
            value = np.array([[float(token.text)]])
            if not np.isfinite(value):
                raise self.expected("a number of at most 1.7e308")
            self._tokens.pop(0)
            return _Node(lambda values: value, False, token.column)
        if token.kind != "name" or token.text in ("and", "or", "not"):
            raise self.expected("a number, a name or '('")
        return self._function() if self._tokens[1].text == "(" else self._name()

    def _name(self) -> _Node:
        token, exist = self.token, self._exist
        if token.text in _ARGUMENTS:
            raise UsageError(f"column {token.column}: expected {token.text!r} with its arguments: {token.text}(...)")
        if exist is not None and token.text not in exist and not token.text.startswith("scalar."):
            known = ", ".join(closest(token.text, exist))
            raise UsageError(f"column {token.column}: no name {token}; there are (closest first): {known}")
        name = self._tokens.pop(0).text
        self.names[name] = None
        return _Node(lambda values: values[name], False, token.column)

    def _function(self) -> _Node:
        token = self.token
        if token.text not in _ARGUMENTS:
            known = ", ".join(closest(token.text, _ARGUMENTS))
            raise UsageError(f"column {token.column}: no function {token}; there are (closest first): {known}")
        name = self._tokens.pop(0).text
        self._close("(")
        x = self.number(self._nested(self.disjunction)).run
        if name in _EXTREMES:
            return self._remember(token, Extreme(_EXTREMES[name]), x)
        if name in _WINDOWS:
            self._close(",")
            return self._remember(token, Window(_WINDOWS[name], self._length(2 if name == "slope" else 1)), x)
        if name == "finite":
            return self._call(token, x, np.isfinite)
        function = _POINTWISE[name]
        if _ARGUMENTS[name] == 1:
            return self._call(token, x, function)
        self._close(",")
        y = self.number(self._nested(self.disjunction)).run
        self._close(")")
        return _Node(lambda values: function(x(values), y(values)), False, token.column)

    def _remember(self, token: Token, function: Extreme | Window, x: Callable[[Values], Array]) -> _Node:
        self._close(")")
        written = "".join(self._text[token.column - 1 : self.token.column - 1].split())
        if written in self.pasts:
            return _Node(self.pasts[written].again, False, token.column)
        self.pasts[written] = past = _Past(function, x)
        return _Node(past.run, False, token.column)

    def _call(self, token: Token, x: Callable[[Values], Array], function: Callable[[Array], Array]) -> _Node:
        self._close(")")
        return _Node(lambda values: function(x(values)), token.text == "finite", token.column)

    def _length(self, least: int) -> int:
        what = f"a whole number from {least} to {MAX_WINDOW}"
        if self.token.kind != "number" or not re.fullmatch("[0-9]{1,5}", self.token.text):
            raise self.expected(what)
        if not least <= int(self.token.text) <= MAX_WINDOW:
            raise self.expected(what)
        return int(self._tokens.pop(0).text)


def _denied(truth: Truth) -> Truth:
    return np.asarray(~truth if truth.dtype == bool else 1.0 - truth)


def closest(name: str, names: Collection[str]) -> list[str]:
    """All the names, those most like this one first."""
    return sorted(names, key=lambda other: -SequenceMatcher(None, name, other).ratio())
