"""The comparison language against a naive reader of it: one head at a time, from its whole past."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnwatch.monitor.conditions import FUNCTIONS, MAX_DEPTH, Condition, parse
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.tokens import MAX_LENGTH

NAN = math.nan
NAMES = ("a", "b", "entropy_ratio", "loss")


def evaluate(condition: Condition, values: dict[str, Any]) -> Any:
    """As a rule does: with matrices, and without a word about 1 / 0."""
    with np.errstate(all="ignore"):
        return condition.evaluate({name: np.atleast_2d(np.float64(value)) for name, value in values.items()})


def truths(text: str, series: list[float], name: str = "a") -> str:
    """One letter a sample: T, F or ? of a condition over one name of one head."""
    condition = parse(text, NAMES)
    values = [evaluate(condition, {name: x}).item() for x in series]
    return "".join("?" if math.isnan(v) else "FT"[int(v)] for v in values)


# --- a slow independent reading -------------------------------------------------------------------------------------

Tree = tuple[Any, ...]
Past = list[dict[str, float]]


def written(tree: Tree) -> str:
    """The tree as text, every inner part in parentheses."""
    match tree:
        case ("number", x):
            return repr(x)
        case ("name", name):
            return str(name)
        case ("neg", x):
            return f"-({written(x)})"
        case ("not", x):
            return f"not ({written(x)})"
        case ("call", name, x, *rest):
            return f"{name}({', '.join([written(x), *(written(r) if isinstance(r, tuple) else str(r) for r in rest)])})"
        case (op, x, y):
            return f"({written(x)}) {op} ({written(y)})"
    raise AssertionError(tree)


def divided(x: float, y: float) -> float:
    if 0 < abs(y) < 1e-9:
        raise NearTieError
    if y == 0:
        return NAN if x == 0 or math.isnan(x) else math.copysign(math.inf, x) * math.copysign(1, y)
    return x / y


def number(tree: Tree, past: Past) -> float:
    """The value at the end of one head's past."""
    match tree:
        case ("number", x):
            return float(x)
        case ("name", name):
            return past[-1][name]
        case ("neg", x):
            return -number(x, past)
        case ("call", "abs", x):
            return abs(number(x, past))
        case ("call", "sqrt", x):
            v = number(x, past)
            return math.sqrt(v) if v >= 0 else NAN
        case ("call", "min" | "max" as which, x, y):
            pair = (number(x, past), number(y, past))
            return NAN if any(map(math.isnan, pair)) else {"min": min, "max": max}[which](pair)
        case ("call", name, x, *n):
            every = [number(x, past[: i + 1]) for i in range(len(past))]
            finite = [v for v in every if math.isfinite(v)]
            if name in ("start", "lowest", "highest"):
                return {"start": lambda f: f[0], "lowest": min, "highest": max}[name](finite) if finite else NAN
            window = finite[-n[0] :]
            if len(window) < n[0] or not math.isfinite(every[-1]):
                return NAN
            if name == "mean":
                return sum(window) / n[0]
            if name == "median":
                middle = sorted(window)
                return (middle[(n[0] - 1) // 2] + middle[n[0] // 2]) / 2
            pairs = [(j - i, window[j] - window[i]) for j in range(n[0]) for i in range(j)]
            return sum(t * x for t, x in pairs) / sum(t * t for t, _ in pairs)
        case ("+", x, y):
            return number(x, past) + number(y, past)
        case ("-", x, y):
            return number(x, past) - number(y, past)
        case ("*", x, y):
            return number(x, past) * number(y, past)
        case ("/", x, y):
            return divided(number(x, past), number(y, past))
    raise AssertionError(tree)


def truth(tree: Tree, past: Past) -> bool | None:
    """Three-valued: None is unknown."""
    match tree:
        case ("not", x):
            inner = truth(x, past)
            return None if inner is None else not inner
        case ("and", x, y):
            pair = (truth(x, past), truth(y, past))
            return False if False in pair else None if None in pair else True
        case ("or", x, y):
            pair = (truth(x, past), truth(y, past))
            return True if True in pair else None if None in pair else False
        case ("call", "finite", x):
            return math.isfinite(number(x, past))
        case (op, x, y):
            left, right = number(x, past), number(y, past)
            if math.isnan(left) or math.isnan(right):
                return None
            # The two readers add in different orders: what is a tie but for rounding is not asked of them.
            if math.isfinite(left - right) and left != right and abs(left - right) < 1e-9 * (1 + abs(left)):
                raise NearTieError
            return {
                "<": left < right,
                "<=": left <= right,
                ">": left > right,
                ">=": left >= right,
                "==": left == right,
                "!=": left != right,
            }[op]
    raise AssertionError(tree)


class NearTieError(Exception):
    """Two sides that differ by rounding only."""


LEAVES = st.one_of(
    st.tuples(st.just("number"), st.sampled_from([0.0, 0.5, 1.0, 2.5, 100.0])),
    st.tuples(st.just("name"), st.sampled_from(["a", "b"])),
)


def _numbers(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    call = st.just("call")
    return st.one_of(
        st.tuples(st.just("neg"), inner),
        st.tuples(st.sampled_from("+-*/"), inner, inner),
        st.tuples(call, st.sampled_from(["abs", "sqrt", "start", "lowest", "highest"]), inner),
        st.tuples(call, st.sampled_from(["min", "max"]), inner, inner),
        st.tuples(call, st.sampled_from(["mean", "median"]), inner, st.integers(1, 4)),
        st.tuples(call, st.just("slope"), inner, st.integers(2, 4)),
    )


NUMBERS = st.recursive(LEAVES, _numbers, max_leaves=5)
COMPARISONS = st.one_of(
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS, NUMBERS),
    st.tuples(st.just("call"), st.just("finite"), NUMBERS),
)
TRUTHS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    ),
    max_leaves=4,
)
VALUE = st.sampled_from([NAN, NAN, math.inf, 0.0, 0.25, 1.0, 3.0, -2.0, 7.5])


@settings(max_examples=120, derandomize=True, deadline=None)
@given(
    tree=TRUTHS,
    series=st.lists(st.lists(VALUE, min_size=8, max_size=8), min_size=1, max_size=7),
    layers=st.lists(st.integers(1, 2), min_size=7, max_size=7).map(sorted),
)
def test_agrees_with_the_naive_reading(tree: Tree, series: list[list[float]], layers: list[int]) -> None:
    """Random conditions over two metrics of 2 layers x 2 heads, of which the second layer comes later."""
    condition = parse(written(tree), NAMES)
    pasts: dict[tuple[int, int], Past] = {}
    for sample, n_layers in zip(series, layers, strict=False):
        values = dict(zip("ab", np.array(sample).reshape(2, 2, 2)[:, :n_layers], strict=True))
        found = np.broadcast_to(evaluate(condition, values), (n_layers, 2))
        for place in product(range(2), range(2)):
            past = pasts.setdefault(place, [])
            if place[0] >= n_layers:
                past.append({"a": NAN, "b": NAN})  # to come later is to have been missing
                continue
            past.append({name: float(values[name][place]) for name in "ab"})
            try:
                expected = truth(tree, past)
            except NearTieError:
                continue
            assert (None if np.isnan(found[place]) else bool(found[place])) == expected


# --- values worked out by hand --------------------------------------------------------------------------------------


def test_kleene() -> None:
    """false beats unknown in `and`, true beats it in `or`; `not` leaves it."""
    value = {"T": 1.0, "F": 0.0, "?": NAN}  # a > 0.5 reads T, F, ?
    for operator, table in {
        "and": {"TT": "T", "TF": "F", "T?": "?", "FT": "F", "FF": "F", "F?": "F", "?T": "?", "?F": "F", "??": "?"},
        "or": {"TT": "T", "TF": "T", "T?": "T", "FT": "T", "FF": "F", "F?": "?", "?T": "T", "?F": "?", "??": "?"},
    }.items():
        for (left, right), expected in table.items():
            condition = parse(f"a > 0.5 {operator} b > 0.5", NAMES)
            result = evaluate(condition, {"a": value[left], "b": value[right]}).item()
            np.testing.assert_equal(result, value[expected])
    assert truths("not a > 0.5", [1.0, 0.0, NAN]) == "FT?"


@pytest.mark.parametrize(
    ("text", "series", "expected"),
    [
        ("a < 3", [2, 3, 4, NAN], "TFF?"),
        ("a <= 3", [2, 3, 4, NAN], "TTF?"),
        ("a != 3", [2, 3, NAN], "TF?"),
        ("1 + 2 * 3 == 7 and a - 1 - 1 == 1", [3, 4], "TF"),
        ("8 / 4 / 2 == a", [1, 4], "TF"),
        ("-a * 2 < -3", [1, 2], "FT"),
        ("a > 1 or a < 0 and a < -5", [2, -1, -6], "TFT"),
        ("(a > 1 or a < 0) and a < 5", [2, -1, 6], "TTF"),
        ("not a > 1 and a > 0", [0.5, -1, 2], "TFF"),
        ("not not (a > 1)", [2, 0], "TF"),
        ("1e3 < a", [1001, 999], "TF"),
        (".5 < a", [0.6, 0.4], "TF"),
        ("a > 1e3", [math.inf], "T"),
        ("1 / a > 1e300", [0.0], "T"),
        ("sqrt(a) >= 0", [4, -4], "T?"),
        ("ln(a) > 0.99 and exp(1) < 2.72", [math.e, 1, -1], "TF?"),
        ("finite(a)", [1, NAN, math.inf], "TFF"),
        ("abs(a) == 2", [-2, 2, 1], "TTF"),
        ("a < 0.5 * start(a)", [NAN, 4, 3, 1, NAN], "?FFT?"),
        ("a > lowest(a)", [NAN, 2, 1, 3, NAN, 1], "?FFT?F"),
        ("start(a) == 4", [NAN, 4, NAN, 5], "?TTT"),
        ("a < highest(a)", [2, 1, 3], "FTF"),
        ("mean(a, 2) > 2", [1, 3, 2, NAN, 9], "?FT?T"),  # means -, 2, 2.5, -, 5.5
        ("median(a, 3) == 2", [9, 1, 2, 5, 2], "??TTT"),
        ("median(a, 2) == 2", [1, 3, 1], "?TT"),
        ("slope(a, 3) == 2", [0, 2, 4, 4], "??TF"),  # then (4 - 2) / 2 = 1
        ("slope(a, 4) == 0", [0.1, 0.1, 0.1, 0.1], "???T"),
        ("a > median(a, 3)", [1, math.inf, 2, 3, 4], "???TT"),  # medians -, -, -, 2, 3: inf is not remembered
    ],
)
def test_worked_values(text: str, series: list[float], expected: str) -> None:
    """Precedence, IEEE arithmetic and each function."""
    assert truths(text, series) == expected


def test_every_function_is_in_the_table() -> None:
    """Each signature of the documented table parses as it stands, with x, a, b a metric and n a number."""
    for signature in FUNCTIONS:
        call = signature.replace("(x", "(a").replace("n)", "3)")
        parse(call if call.startswith("finite") else f"{call} > 0", NAMES)


def test_past_is_taken_in_where_the_outcome_is_clear() -> None:
    """No short circuit: the right side of a false `and` remembers all the same."""
    condition = parse("a > 0 and b > start(b)", NAMES)
    outcomes = [evaluate(condition, {"a": a, "b": b}).item() for a, b in [(0, 1), (1, 2)]]
    assert outcomes == [0.0, 1.0]


def test_layers_and_heads_that_come_later_have_no_past() -> None:
    """Rows and columns are added at the end; the old ones keep what they remember."""
    condition = parse("a > start(a) and mean(a, 2) > 0", NAMES)
    evaluate(condition, {"a": np.array([[1.0]])})
    evaluate(condition, {"a": np.array([[2.0, 5.0], [5.0, 5.0]])})
    third = evaluate(condition, {"a": np.array([[3.0, 4.0, 9.0], [6.0, 6.0, 9.0]])})
    np.testing.assert_array_equal(third, [[1, 0, 0], [1, 1, 0]])  # 9 > start 9 is false, whatever the unknown mean


def test_one_number_stands_for_all_heads() -> None:
    """A scalar and a fact of a layer spread over the heads."""
    condition = parse("a > b * loss", NAMES)
    values = {"a": np.array([[1.0, 3.0], [5.0, 7.0]]), "b": np.array([[1.0], [3.0]]), "loss": 2.0}
    np.testing.assert_array_equal(evaluate(condition, values), [[0, 1], [0, 1]])


def test_distance_is_from_the_first_comparison() -> None:
    """|left - right| over |right|, or as it is where right is 0."""
    condition = parse("a < 0.5 and b > 4", NAMES)
    evaluate(condition, {"a": np.array([[0.25, 0.0]]), "b": 100.0})
    np.testing.assert_allclose(condition.distance(), [[0.5, 1.0]])
    condition = parse("a > 0", NAMES)
    evaluate(condition, {"a": 3.0})
    assert condition.distance().item() == 3.0
    assert parse("finite(a)", NAMES).distance().item() == 0.0


def test_names_in_order() -> None:
    """Each name once, in order of appearance; scalar.NAME needs no declaration."""
    assert parse("b < 1 and scalar.z_1 > a or b > 2", NAMES).names == ("b", "scalar.z_1", "a")


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "pieces"),
    [
        ("entropy_ration < 0.3", 1, ["'entropy_ration'", "entropy_ratio, ", "loss"]),
        ("a < 1 and los > 2", 11, ["'los'", "(closest first): loss"]),
        ("a < medain(a, 3)", 5, ["'medain'", "(closest first): median"]),
        ("", 1, ["a number, a name or '('", "found the end"]),
        ("a <", 4, ["a number, a name or '('", "found the end"]),
        ("a", 1, ["a comparison", "found a number"]),
        ("a + 1", 1, ["a comparison", "found a number"]),
        ("not a", 5, ["a comparison", "found a number"]),
        ("a > 1 or b", 10, ["a comparison", "found a number"]),
        ("(a > 1) + 2 > 3", 2, ["a number", "found a comparison"]),
        ("finite(a) > 0", 1, ["a number", "found a comparison"]),
        ("0 < a < 1", 7, ["one comparison at a time", "'<'"]),
        ("(a < 1", 7, ["')'", "found the end"]),
        ("a < 1)", 6, ["'and', 'or' or the end", "')'"]),
        ("a < 1 b", 7, ["'and', 'or' or the end", "'b'"]),
        ("a = 1", 3, ["an operator", "'='"]),
        ("a < 1 && b < 1", 7, ["an operator", "'&'"]),
        ("a ** 2 < 1", 4, ["a number, a name or '('", "'*'"]),
        ("a.real < 1", 2, ["'.'"]),
        ("scalar. < 1", 7, ["'.'"]),
        ("mean(a) < 1", 7, ["','", "')'"]),
        ("mean(a, b) < 1", 9, ["a whole number from 1 to 10000", "'b'"]),
        ("mean(a, 0) < 1", 9, ["a whole number from 1 to 10000", "'0'"]),
        ("mean(a, 2.5) < 1", 9, ["a whole number from 1 to 10000", "'2.5'"]),
        ("mean(a, 10001) < 1", 9, ["a whole number from 1 to 10000", "'10001'"]),
        ("slope(a, 1) < 1", 10, ["a whole number from 2 to 10000", "'1'"]),
        ("abs(a, b) < 1", 6, ["')'", "','"]),
        ("min(a) < 1", 6, ["','", "')'"]),
        ("mean < 1", 1, ["'mean' with its arguments"]),
        ("a < 1e999", 5, ["1.7e308", "'1e999'"]),
        ("and < 1", 1, ["a number, a name or '('", "'and'"]),
        ("a\n<\n#", 5, ["'#'"]),
        ("a < '\n'", 5, ['"\'"']),
    ],
)
def test_errors(text: str, column: int, pieces: list[str]) -> None:
    """One line with the column, what was expected and what was found; for a name, those that exist."""
    with pytest.raises(UsageError) as raised:
        parse(text, NAMES)
    message = str(raised.value)
    assert message.startswith(f"column {column}: ")
    assert "\n" not in message
    for piece in pieces:
        assert piece in message


@pytest.mark.parametrize(
    "text",
    [
        "(" * (MAX_DEPTH + 1) + "a < 1" + ")" * (MAX_DEPTH + 1),
        "not " * 900 + "a < 1",
        "-" * 3000 + "a < 1",
        "abs(" * 900 + "a",
        "a < 1" + " " * MAX_LENGTH,
    ],
)
def test_hostile_depth_and_length(text: str) -> None:
    """Nesting and length have a limit, and the message names it."""
    with pytest.raises(UsageError, match=rf"column \d+: expected at most ({MAX_DEPTH} levels|{MAX_LENGTH} characters)"):
        parse(text, NAMES)


def test_long_and_deep_within_the_limits() -> None:
    """A chain of a thousand terms, and the deepest nesting allowed, evaluate."""
    assert evaluate(parse("+".join("a" * 1000) + " == 1000", NAMES), {"a": 1.0}).item() == 1.0
    nested = "(" * MAX_DEPTH + "a < 1" + ")" * MAX_DEPTH
    assert evaluate(parse(nested, NAMES), {"a": 0.0}).item() == 1.0


WORDS = st.sampled_from(
    ["a", "b", "1", "2.5", "<", ">=", "and", "or", "not", "(", ")", ",", "-", "*", "mean(", "finite(", "scalar.x", "1e"]
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=14).map(" ".join)))
def test_no_text_does_anything_else(text: str) -> None:
    """Whatever the text, it is a condition that can be evaluated, or a UsageError of one line."""
    try:
        condition = parse(text, NAMES)
    except UsageError as error:
        message = str(error)
    else:
        message = "column "
        result = evaluate(condition, dict.fromkeys(condition.names, 1.0)).item()
        assert result in (0.0, 1.0) or math.isnan(result)
    assert message.startswith("column ")
    assert len(message.splitlines()) == 1
