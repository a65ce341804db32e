"""The crossings that peers tell each other: their encoding, and what two versions disagree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir.address import site_suffix
from bbnode.ir.caps import MAX_CROSSING_TEXT_BYTES, MAX_CROSSINGS, MAX_CROSSINGS_BYTES
from bbnode.ir.crossing import (
    KINDS,
    Crossing,
    decode_crossings,
    disagreements,
    encode_crossings,
    not_taken,
    shapes_fit,
    unfit,
)
from bbnode.ir.errors import DecodeError
from tests.sim.versions import version_crossings

TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)
CROSSINGS = st.lists(
    st.builds(
        lambda site, roles, kind, port, receiver, type_: Crossing(
            site=site, sends=bool(roles & 1), takes=bool(roles & 2), kind=kind, port=port,
            receiver=receiver, type=type_,
        ),
        *(st.integers(0, 2**64 - 1), st.integers(1, 3), st.sampled_from(KINDS)),
        *(TEXTS, TEXTS, TEXTS),
    ),
    max_size=20, unique_by=lambda each: each.site,
).map(lambda found: tuple(sorted(found, key=lambda each: each.site)))  # fmt: skip


def made(site: int, **fields: object) -> Crossing:
    plain = Crossing(
        site=site, sends=True, takes=False, kind="send", port="p", receiver="r", type="T"
    )
    return replace(plain, **fields)


@given(CROSSINGS)
def test_round_trip(crossings: tuple[Crossing, ...]) -> None:
    assert decode_crossings(encode_crossings(crossings)) == crossings


def test_who_tells_nothing_is_not_who_has_nothing() -> None:
    assert decode_crossings(b"") is None
    assert decode_crossings(encode_crossings(())) == ()


def test_what_does_not_fit_goes_without_texts_and_then_not_at_all() -> None:
    many = tuple(made(i, port=f"port_{i}", type="Composite" * 9) for i in range(MAX_CROSSINGS))
    raw = encode_crossings(many)
    assert len(raw) <= MAX_CROSSINGS_BYTES
    assert decode_crossings(raw) == tuple(
        replace(each, port="", receiver="", type="") for each in many
    )
    wide = tuple(made(2**64 - 1 - i) for i in reversed(range(MAX_CROSSINGS)))
    assert decode_crossings(encode_crossings(wide)) is not None
    assert encode_crossings((*many, made(MAX_CROSSINGS))) == b""


def test_long_and_odd_texts_are_cut_and_cleaned() -> None:
    (found,) = decode_crossings(encode_crossings((made(1, port="é\x1b[31m" * 300),))) or ()
    assert found.port.isprintable()
    assert found.port.endswith("…")
    assert len(found.port.encode()) <= MAX_CROSSING_TEXT_BYTES


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_is_a_list(raw: bytes) -> None:
    try:
        found = decode_crossings(raw)
    except DecodeError:
        return
    assert found is None or all(isinstance(each, Crossing) for each in found)


ROW = [5, 1, 0, "port", "class", "type"]


@pytest.mark.parametrize(
    "rows",
    [
        {},
        1,
        [1],
        [ROW[:5]],
        [[*ROW, 1]],
        [[-1, *ROW[1:]]],
        [[True, *ROW[1:]]],
        [["5", *ROW[1:]]],
        [[5, 0, *ROW[2:]]],
        [[5, 4, *ROW[2:]]],
        [[5, 1, 3, *ROW[3:]]],
        [[*ROW[:3], b"port", *ROW[4:]]],
        [[*ROW[:5], "x" * (MAX_CROSSING_TEXT_BYTES + 1)]],
        [[*ROW[:5], "\x1b[31m"]],
        [ROW, ROW],
        [ROW, [4, *ROW[1:]]],
        [[number, *ROW[1:3], "", "", ""] for number in range(MAX_CROSSINGS + 1)],
        [[[[ROW]]]],
    ],
)
def test_each_malformed_list_is_refused(rows: object) -> None:
    with pytest.raises(DecodeError):
        decode_crossings(msgpack.packb(rows))
    with pytest.raises(DecodeError):
        decode_crossings(b"\xc0" * (MAX_CROSSINGS_BYTES + 1))


# --- versions ---------------------------------------------------------------------------------


def between(*edits: str) -> tuple[list[str], tuple[bytes, ...], tuple[bytes, ...]]:
    """Lines of a server of the plain version about a client of another, and who sends not what."""
    server, client = version_crossings("server"), version_crossings("client", *edits)
    lines = [str(each) for each in disagreements(server, ["server"], client, ["client"])]
    return (
        lines,
        not_taken(server, client, ["client"]),
        not_taken(client, server, ["server"]),
    )


def test_versions_that_agree_say_nothing() -> None:
    assert between() == ([], (), ())
    assert between("client_body", "server_body") == ([], (), ())


@pytest.mark.parametrize(
    ("edit", "lines"),
    [
        (
            "renamed_port",
            ["port 'tell' of class 'client': we send Tensor.FLOAT, it takes nothing there"],
        ),
        (
            "changed_type",
            ["port 'update' of class 'server': it sends Tensor.DOUBLE, we take Tensor.FLOAT"],
        ),
        (
            "bundled",
            [
                "port 'update' of class 'server': it sends {}, we take Tensor.FLOAT".format(
                    "Composite[Tensor.FLOAT,Tensor.FLOAT]"
                )
            ],
        ),
        (
            "other_answer",
            ["response port 'ask' of class 'server': it sends Tensor.DOUBLE, we take Tensor.FLOAT"],
        ),
    ],
)
def test_what_differs_is_named(edit: str, lines: list[str]) -> None:
    said, from_server, from_client = between(edit)
    assert said == lines
    assert len(from_server) == (edit in ("renamed_port", "other_answer"))
    assert len(from_client) == (edit not in ("renamed_port",))


def test_declared_sizes_are_compared_and_stop_nothing() -> None:
    """A round fails on them where they arrive; before, both sides' shapes are said."""
    server, client = version_crossings("server", "sized"), version_crossings("client", "resized")
    theirs = decode_crossings(encode_crossings(client))
    assert theirs == client
    found = disagreements(server, ["server"], theirs, ["client"])
    assert all(each.sized for each in found)
    differ = "it sends Tensor.FLOAT of [5], we take Tensor.FLOAT of [4]"
    assert [str(each) for each in found] == [
        f"response port 'ask' of class 'server': {differ}",
        f"port 'update' of class 'server': {differ}",
    ]
    mirrored = disagreements(client, ["client"], server, ["server"])
    assert "we send Tensor.FLOAT of [5], it takes Tensor.FLOAT of [4]" in str(mirrored[0])
    assert not_taken(client, server, ["server"]) == ()
    # Who declares nothing agrees with everybody.
    for other in ((), ("sized",)):
        assert (
            disagreements(server, ["server"], version_crossings("client", *other), ["client"]) == ()
        )


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("", "[4]", True),
        ("[4]", "[4]", True),
        ("[4]", "[5]", False),
        ("[4]", "[4, 1]", False),
        ("[]", "[1]", False),
        ("[n, 4]", "[7, 4]", True),
        ("[?, 4]", "[n, 5]", False),
        ("[4], ?", "[5], [1]", False),
        ("[4], ?", "[4], [1]", True),
        ("[4], [2]", "[4]", True),
    ],
)
def test_shapes_fit_unless_two_lengths_differ(one: str, other: str, fits: bool) -> None:
    assert shapes_fit(one, other) is shapes_fit(other, one) is fits


def test_a_shape_goes_before_a_type_is_cut_and_what_is_none_is_text() -> None:
    long = "T" * (MAX_CROSSING_TEXT_BYTES - 4)
    (found,) = decode_crossings(encode_crossings((made(1, type=long, shape="[4, 4]"),))) or ()
    assert (found.type, found.shape) == (long, "")
    (odd,) = decode_crossings(msgpack.packb([[5, 1, 0, "p", "c", "T of [4"]])) or ()
    assert (odd.type, odd.shape) == ("T of [4", "")


def test_a_peer_that_does_not_tell_or_plays_no_class_is_not_judged() -> None:
    server = version_crossings("server")
    assert disagreements(server, ["server"], None, ["client"]) == ()
    assert not_taken(server, None, ["client"]) == ()
    assert not_taken(server, (), ["observer"]) == ()
    assert len(not_taken(server, (), ["client"])) == 3
    assert disagreements(server, ["server"], (), ["client"])


def test_another_program_of_the_same_ports_is_named_as_such() -> None:
    ours, theirs = (made(1),), (made(2, sends=False, takes=True),)
    (line,) = disagreements(ours, [], theirs, ["r"])
    assert str(line).endswith("it takes it in a program of another name, or with other parts")
    assert not_taken(ours, theirs, ["r"]) == (site_suffix(1),)


@pytest.mark.parametrize("change", [lambda each: replace(each, port="", receiver="", type="")])
def test_sites_without_texts_still_decide(change: Callable[[Crossing], Crossing]) -> None:
    server, client = version_crossings("server"), version_crossings("client", "renamed_port")
    told = tuple(map(change, client))
    assert not_taken(server, told, ["client"]) == not_taken(server, client, ["client"])
    (line,) = disagreements(server, ["server"], told, ["client"])
    assert "we send Tensor.FLOAT" in str(line)


@given(CROSSINGS, st.lists(st.text(max_size=30), max_size=20))
def test_whatever_a_peer_states_is_compared(ours: tuple[Crossing, ...], told: list[str]) -> None:
    texts = [*told, "T of [²]", "T of [" + "9" * 40 + "]", "T of [-1]", "T of ?, [3]"]
    theirs = tuple(
        replace(each, sends=each.takes, takes=each.sends, type=text)
        for each, text in zip(ours, texts, strict=False)
    )
    theirs = decode_crossings(encode_crossings(theirs)) or ()
    sized = [replace(each, shape="[3]", inferred="[3]", models=("m",)) for each in ours]
    found = unfit(sized, ["r", *(e.receiver for e in ours)], theirs, ["r"])
    assert found is None or found.reason.isprintable()


def test_shapes_go_before_all_texts_do() -> None:
    many = tuple(made(i, type="Tensor.FLOAT", shape="[1250], " * 20 + "?") for i in range(120))
    found = decode_crossings(encode_crossings(many))
    assert found is not None
    assert {(each.port, each.type, each.shape) for each in found} == {("p", "Tensor.FLOAT", "")}
