"""Which ops belong to which entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir import keys
from bbnode.ir.flatten import check_values, flatten
from bbnode.ir.onnx_file import function_of
from bbnode.ir.slices import cut_slices
from tests.engine.builder import Partition

MODEL = keys.role_domain("Model")


def cut(p: Partition):
    flat = flatten(function_of(p.function), {})
    pieces, unreachable = cut_slices(flat, check_values(flat))
    return (
        {piece.name: [flat.ops[i].name for i in piece.positions] for piece in pieces},
        [flat.ops[i].name for i in unreachable],
    )


def test_an_entry_owns_what_can_fire_from_its_seeds() -> None:
    p = Partition("server", inputs=["a", "b"])
    p.recv("r", called="recv")
    p.constant("k", b"", called="k")
    p.op(MODEL, "Params", (), ["w"], called="params")
    p.sys("Gate", ["r", "k"], "rk", called="uses_k")
    p.sys("Gate", ["rk", "w"], "rkw", called="uses_params")
    p.sys("PassThrough", ["a"], "pa", called="of_a")
    p.sys("Gate", ["a", "b"], "ab", called="of_both")
    p.sys("Gate", ["a", "r"], "ar", called="never")
    slices, unreachable = cut(p)
    assert slices == {
        "invoke": ["of_a", "of_both"],
        "recv": ["k", "params", "uses_k", "uses_params"],
        "a": ["of_a"],
        "b": [],
    }
    assert unreachable == ["never"]


def test_sources_that_no_recv_needs_belong_to_invoke() -> None:
    p = Partition("server")
    p.recv("r", called="recv")
    p.op(MODEL, "Params", (), ["w"], called="params")
    p.sys("AppEmit", ["w"], called="emit", name="w")
    assert cut(p) == ({"invoke": ["params", "emit"], "recv": []}, [])


def test_a_call_whose_result_nobody_uses_runs_where_it_was_written() -> None:
    p = Partition("client")
    p.recv("r", called="recv")
    p.recv("q", called="query")
    p.op(MODEL, "LoadParameters", ["r"], ["c"], called="load")
    p.sys("DeadlineCheck", (), "dc", called="check", deadline_ns=1)
    p.op(MODEL, "Train", (), ["s"], called="train", control=["load"], after=["dc"])
    p.sys("AppEmit", ["s"], called="emit", name="s")
    p.op(MODEL, "Forward", ["q"], ["f"], called="forward", control=["train"])
    slices, unreachable = cut(p)
    assert slices == {
        "invoke": [],
        "recv": ["load", "check", "train", "emit"],
        "query": ["forward"],  # does not train again for every query
    }
    assert unreachable == []


def test_a_reset_before_a_use_runs_with_the_use() -> None:
    p = Partition("client")
    p.recv("r", called="recv")
    p.op(keys.role_domain("DataSource"), "Reset", (), ["t"], called="reset")
    p.op(keys.role_domain("DataSource"), "NextBatch", (), ["b", "l"], called="next",
         control=["reset"])  # fmt: skip
    p.sys("Gate", ["b", "r"], "br", called="use")
    assert cut(p)[0] == {"invoke": [], "recv": ["reset", "next", "use"]}


def test_a_constant_does_not_pull_ops_into_other_entries() -> None:
    p = Partition("server", inputs=["x"])
    p.recv("r", called="recv")
    p.constant("k", b"", called="k")
    p.sys("Gate", ["k", "r"], "kr", called="gated")
    p.sys("PassThrough", ["k"], "kk", called="alone")
    assert cut(p)[0] == {"invoke": ["k", "alone"], "recv": ["k", "gated"]}


def test_any_of_two_recvs_fires_for_each() -> None:
    p = Partition("server")
    p.recv("a", called="recv_a")
    p.recv("b", called="recv_b")
    p.sys("Any", ["a", "b"], "first", called="any")
    p.sys("PassThrough", ["first"], "y", called="behind")
    assert cut(p)[0] == {
        "invoke": [],
        "recv_a": ["any[0]", "behind"],
        "recv_b": ["any[1]", "behind"],
    }


@st.composite
def partitions(draw) -> Partition:
    """Random DAGs over inputs, Recvs, constants and sources, with control edges."""
    p = Partition("server", inputs=[f"in{i}" for i in range(draw(st.integers(0, 2)))])
    values = list(p.function.input)
    nodes: list[str] = []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["recv", "constant", "source", "op", "op", "op"]))
        name, made = f"n{len(nodes)}", f"v{len(nodes)}"
        some = st.lists(st.sampled_from(values), min_size=1, max_size=3) if values else None
        control = draw(st.lists(st.sampled_from(nodes), max_size=2)) if nodes else []
        if kind == "recv":
            p.recv(made, called=name)
        elif kind == "constant":
            p.constant(made, b"", called=name)
        elif kind == "source" or some is None:
            p.op(MODEL, "Params", (), [made], called=name, control=control)
        else:
            inputs, after = draw(some), draw(st.lists(st.sampled_from(values), max_size=1))
            p.sys("GateManyDispatch", inputs, made, called=name, control=control, after=after)
        nodes.append(name)
        values.append(made)
    return p


@given(partitions())
def test_every_slice_is_whole_and_every_op_has_a_place(p) -> None:
    flat = flatten(function_of(p.function), {})
    makers = check_values(flat)
    pieces, unreachable = cut_slices(flat, makers)
    placed = set(unreachable)
    for piece in pieces:
        mine = set(piece.positions)
        placed |= mine
        for position in mine:
            for need in flat.ops[position].needs:
                assert need in piece.seeds or mine & set(makers[need])
    entries = {piece.source.position for piece in pieces if piece.source is not None}
    assert placed | entries == {op.position for op in flat.ops}
    assert not placed & entries
