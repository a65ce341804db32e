"""Filters against a plain oracle, their cache, and filters that mean nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import Collection, FilterRefused
from bbnode.components.indexes.filters import conditions, packed, unpacked
from bbnode.ir.values import Metadata

NAMES = st.sampled_from(["a", "b", "first name"])
SCALARS = st.one_of(
    st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, -0.0, 1.0, 2.5, math.nan, math.inf]),
    st.sampled_from([2**53, 2**53 + 1, float(2**53), "", "a", "b", "ä", "1", b"", b"a"]),
)  # fmt: skip
JSON = st.lists(
    st.one_of(st.booleans(), st.integers(-3, 3), st.sampled_from([2.5, "a", "b", "1"])), max_size=4
)


def entries():
    plain = st.tuples(NAMES, st.sampled_from(["", " ==", " !="]), SCALARS)
    orders = st.tuples(
        NAMES,
        st.sampled_from([" <", " <=", " >", " >="]),
        SCALARS.filter(lambda v: not isinstance(v, bool)),
    )
    lists = st.tuples(NAMES, st.sampled_from([" in", " not in"]), JSON.map(json.dumps))
    entry = st.one_of(plain, orders, lists).map(lambda e: (e[0] + e[1], e[2]))
    return st.lists(entry, max_size=3).map(dict)


def number(value) -> bool:
    return type(value) in (int, float)


def equal(one, other) -> bool:
    return (type(one) is type(other) or (number(one) and number(other))) and one == other


def holds(item, given_name, wanted) -> bool:
    """What the docs say of one entry, without any table."""
    for sign in (" not in", " in", " ==", " !=", " <=", " >=", " <", " >"):
        if given_name.endswith(sign):
            name, sign = given_name[: -len(sign)], sign.strip()
            break
    else:
        name, sign = given_name, "=="
    if name not in item:
        return sign in ("!=", "not in")
    value = item[name]
    if sign in ("in", "not in"):
        return any(equal(value, each) for each in json.loads(wanted)) == (sign == "in")
    if sign in ("==", "!="):
        return equal(value, wanted) == (sign == "==")
    if not (type(value) is type(wanted) or (number(value) and number(wanted))):
        return False
    if type(value) is bool:
        return False
    return {"<": value < wanted, "<=": value <= wanted, ">": value > wanted, ">=": value >= wanted}[
        sign
    ]


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.dictionaries(NAMES, SCALARS, max_size=3), min_size=1, max_size=8),
    more=st.lists(st.dictionaries(NAMES, SCALARS, max_size=3), min_size=1, max_size=3),
    wheres=st.lists(entries(), min_size=1, max_size=4),
)
def test_a_filter_is_what_the_oracle_says(items, more, wheres) -> None:
    held = Collection(dimensions=1)
    everything = []
    for batch in (items, more):
        held.add(np.ones((len(batch), 1)), batch)
        everything += batch
        for where in [*wheres, *wheres]:  # the second time from the cache
            wanted = [all(holds(item, n, v) for n, v in where.items()) for item in everything]
            assert held.matching(where).tolist() == wanted, where
    held.remove([0])
    assert not held.matching(wheres[0])[0]


def test_true_is_not_one_even_where_the_other_was_asked_before() -> None:
    held = Collection(dimensions=1)
    held.add(np.ones((3, 1)), [{"a": 1}, {"a": True}, {"a": 1.0}])
    assert held.matching({"a": 1}).tolist() == [True, False, True]
    assert held.matching({"a": True}).tolist() == [False, True, False]
    assert held.matching({"a in": "[true]"}).tolist() == [False, True, False]
    assert held.matching({"a in": "[1]"}).tolist() == [True, False, True]


def test_names_may_have_spaces_and_the_operator_is_the_last_word() -> None:
    held = Collection(dimensions=1)
    held.add(np.ones((2, 1)), [{"log in": 1}, {"log": 1}])
    assert held.matching({"log in ==": 1}).tolist() == [True, False]
    assert held.matching({"log in in": "[1]"}).tolist() == [True, False]
    assert held.matching({"log in": "[1]"}).tolist() == [False, True]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"year =>": 1}, "'=>', which is no operator; there are ==, !="),
        ({"year =": 1}, "no operator"),
        ({"year ~": "x"}, "no operator"),
        ({" ==": 1}, "names no entry"),
        ({"": 1}, "names no entry"),
        ({"not in": "[1]"}, "names no entry|no operator"),
        ({"a <": True}, "orders by a bool"),
        ({"a in": "a, b"}, "takes a JSON list"),
        ({"a in": 3}, "takes a JSON list"),
        ({"a in": '{"a": 1}'}, "takes a JSON list"),
        ({"a in": "[[1]]"}, "takes a JSON list"),
        ({"a in": "[null]"}, "takes a JSON list"),
        ({"a in": "[NaN]"}, "takes a JSON list"),
        ({"a in": "[" * 100_000}, "takes a JSON list"),
        ({"a in": json.dumps(list(range(10_001)))}, "lists 10001"),
    ],
)
def test_a_filter_that_means_nothing_is_refused_by_name(where, told) -> None:
    if where == {"not in": "[1]"}:  # an entry called "not", in a list
        assert conditions(where)[0].name == "not"
        return
    with pytest.raises(FilterRefused, match=told):
        conditions(where)


def test_many_filters_and_names_leave_no_more_than_their_bound() -> None:
    held = Collection(dimensions=1)
    held.add(np.ones((5, 1)), [{f"n{i}": i for i in range(100)}] * 5)
    for i in range(100):
        assert held.matching({f"n{i}": i}).all()
    assert len(held._filters._columns) <= 32
    assert len(held._filters._masks) <= 16
    assert held.matching({f"n{i}": i for i in range(100)}).all()


@given(st.dictionaries(st.text(max_size=4), SCALARS, max_size=4))
def test_metadata_are_kept_as_they_are(entries) -> None:
    again = unpacked(packed(entries))
    assert repr(again) == repr(Metadata(entries))
