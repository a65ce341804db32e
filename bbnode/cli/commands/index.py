"""`bbnode index`: add, search and remove vectors in a directory or on a running node; stats.

Rule: items that the command reports as added are on disk. A command that was interrupted can be
repeated unchanged, and continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import conditions, exits, output
from bbnode.cli.common import JsonOption, StateDirOption, group
from bbnode.ir.errors import BbnodeError

if TYPE_CHECKING:
    from bbnode.api.indexes import NodeIndex
    from bbnode.components.data.item_files.file import ItemFile
    from bbnode.components.indexes.collection import Collection
    from bbnode.components.indexes.filling import Encode, FilledCounts, Filler
    from bbnode.ir.values import SearchResults

_MOST_ID_DIGITS = 19  # digits of 2**63 - 1; Python refuses to read thousands of digits
_SHOWN_SKIPPED = 10  # skipped rows that are listed; the others are counted
_FOUND = 10  # results of a search in a directory, unless --k says otherwise

app = group("Keep vectors in a directory or on a node, and search them.")

NodeOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="In place of DIR: the index of the running node with this configuration.",
        metavar="FILE",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(help="With -c: the part of the program that is asked.", metavar="CLASS"),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="With -c: seconds to wait for an answer.", min=0.01)
]
EncoderOption = Annotated[
    Path | None,
    typer.Option(help="Directory of the encoder that makes vectors of texts.", metavar="DIR"),
]
WhereOption = Annotated[
    list[str] | None, typer.Option("--where", help=conditions.HELP, metavar="CONDITION")
]


@app.command()
def add(
    place: Annotated[
        Path,
        typer.Argument(
            help="The index's directory; it is made if it is not there. With -c: a file, too.",
            metavar="DIR",
        ),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of items: .npy, .npz, .jsonl, .csv, .tsv, .parquet, .arrow, .txt.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Of a new index: l2, ip or cosine.", metavar="METRIC")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="How it is searched: flat (exact), hnsw or ivf-pq.", metavar="KIND"),
    ] = None,
    vector: Annotated[
        list[str] | None,
        typer.Option(help="Column of vectors; or number columns, as 'x*'.", metavar="COLUMN"),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Column of texts that --encoder makes vectors of.", metavar="COLUMN"),
    ] = None,
    encoder: EncoderOption = None,
    id_column: Annotated[
        str | None, typer.Option(help="Column of ids; default: id or ids.", metavar="COLUMN")
    ] = None,
    row_ids: Annotated[
        bool, typer.Option("--row-ids", help="The numbers of the rows are the ids.")
    ] = False,
    first_id: Annotated[
        int | None, typer.Option(help="Number rows without ids from here.", min=0, metavar="N")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="Column to keep beside the vector; default: all.", metavar="COLUMN"),
    ] = None,
    no_metadata: Annotated[
        bool, typer.Option("--no-metadata", help="Keep vectors and ids alone.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Rows without ids replace items of their numbers.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows that are no items, and count them.")
    ] = False,
    config: NodeOption = None,
    state_dir: StateDirOption = None,
    target: TargetOption = None,
    timeout_s: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> int:
    """Add the items of files to an index; the same files again add nothing twice."""
    if no_metadata and metadata:
        raise typer.BadParameter("goes without --metadata", param_hint="--no-metadata")
    if id_column and row_ids:
        raise typer.BadParameter("goes without --id-column", param_hint="--row-ids")
    if vector and (text or encoder):
        raise typer.BadParameter("vectors of a file need no encoder; give one of the two",
                                 param_hint="--vector, --encoder")  # fmt: skip
    on_node = config is not None or state_dir is not None
    if text and encoder is None and not on_node:
        raise typer.BadParameter("vectors of texts need --encoder DIR", param_hint="--text")
    from bbnode.components.data.item_files.base import ItemLayout
    from bbnode.components.data.item_files.file import ItemFile
    from bbnode.components.indexes.filling import Filler

    node = _node_index(config, state_dir, target, timeout_s) if on_node else None
    texts = encoder is not None or (node is not None and node.takes_texts)
    if text and not texts:
        raise typer.BadParameter("this node takes vectors; give --encoder DIR", param_hint="--text")
    layout = ItemLayout(
        vector=tuple(vector or ()),
        text=(text or "text") if texts else "",
        id=id_column or "",
        metadata=() if no_metadata else tuple(metadata) if metadata else None,
        row_ids=row_ids,
    )
    paths = _files(place, files or [], on_node=on_node)
    if on_node and (metric or kind):
        raise typer.BadParameter("are settings of the node", param_hint="--metric, --kind")
    with contextlib.ExitStack() as stack:
        # All files are checked before an index is created or anything is added.
        opened = [stack.enter_context(ItemFile(path.expanduser(), layout)) for path in paths]
        encode = None if encoder is None else _encoder(encoder)
        if node is not None:
            encode = encode or _as_texts
            into: Any = functools.partial(node.add, timeout_s=timeout_s)
        else:
            into = stack.enter_context(_opened(place, metric=metric, kind=kind, create=True))
        filler = Filler(into, encode=encode, first_id=first_id, replace=replace, skip_bad=skip_bad)
        where = "the node's index" if on_node else str(place)
        try:
            stopped = _fill(filler, opened)
        except BbnodeError:
            if filler.filled.kept:
                output.note(f"{where}: before that, {_counted(filler.filled)}")
            raise
    filled = filler.filled
    if as_json:
        counts = dataclasses.asdict(filled)
        del counts["told"]
        summary = {"index": where, "complete": not stopped, **counts}
        output.json_object(summary, name="index-add")
    else:
        output.data(f"{where}: {_counted(filled)}")
    if not stopped:
        return exits.OK
    output.note("interrupted: what was added is kept; the same command again goes on")
    return exits.INTERRUPTED


def _fill(filler: Filler, files: Sequence[ItemFile]) -> bool:
    """Add the items of files; returns True if Ctrl-C ended it between two batches."""
    shown = 0
    with _interrupts() as interrupted, _progress(files) as advance:
        for file in files:
            for filled in filler.add(file):
                advance(filled)
                for text in filled.told[: max(0, _SHOWN_SKIPPED - shown)]:
                    output.note(f"skipped: {file.path}, {text}")
                shown += len(filled.told)
                if interrupted():
                    return True
    return False


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C to the end of the running batch; a second one ends the command at once.

    Otherwise it could interrupt an index between two of its steps. The disk holds only whole
    batches either way.
    """
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which alone gets signals
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(files: Sequence[ItemFile]) -> Iterator[Callable[[FilledCounts], None]]:
    """Show the progress on a terminal; nothing anywhere else."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    counts = [file.count for file in files]
    total = None if None in counts else sum(count or 0 for count in counts)
    shown = Progress(
        TextColumn("{task.completed:,} rows"), BarColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with shown:
        task = shown.add_task("", total=total)
        yield lambda filled: shown.update(task, completed=filled.rows)


def _counted(filled: FilledCounts) -> str:
    parts = [f"{filled.added} added"]
    for count, what in (
        (filled.replaced, "replaced"),
        (filled.present, "there already"),
        (filled.skipped, "skipped"),
    ):
        parts += [f"{count} {what}"] if count else []
    return ", ".join(parts)


@app.command()
def search(
    place: Annotated[
        Path | None,
        typer.Argument(help="The index's directory.", metavar="DIR", show_default=False),
    ] = None,
    query: Annotated[
        Path | None,
        typer.Option(help="File of a query [D], or of several [Q, D].", metavar="FILE.npy"),
    ] = None,
    vector: Annotated[
        str | None, typer.Option(help='The query itself: "[0.1, 0.2]".', metavar="VECTOR")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Search for a text, with --encoder.", metavar="TEXT")
    ] = None,
    encoder: EncoderOption = None,
    k: Annotated[
        int | None,
        typer.Option("-k", help="Items to find; default: 10, or as the node has it.", min=1),
    ] = None,
    where: WhereOption = None,
    config: NodeOption = None,
    state_dir: StateDirOption = None,
    target: TargetOption = None,
    timeout_s: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Find the items that are nearest to a query."""
    if sum(each is not None for each in (query, vector, text)) != 1:
        raise typer.BadParameter("give one of them", param_hint="--query, --vector, --text")
    if encoder is not None and text is None:
        raise typer.BadParameter("goes with --text", param_hint="--encoder")
    if text is not None and encoder is None and place is not None:
        raise typer.BadParameter("needs --encoder DIR", param_hint="--text")
    found_where = conditions.parse(where)
    _one_place(place, config, state_dir)
    if text is not None and encoder is not None:
        asked = _encoder(encoder)([text])[0]
    elif text is not None:
        asked = text
    else:
        asked = _query(query, vector)
    missing: tuple[str, ...] = ()
    if place is None:
        node = _node_index(config, state_dir, target, timeout_s)
        results, missing = node.search(asked, found_where, timeout_s=timeout_s)
    else:
        with _opened(place) as index:
            results = index.search(asked, k or _FOUND, found_where)
    _show_results(results, missing, k, as_json=as_json)


def _show_results(
    results: SearchResults, missing: Sequence[str], k: int | None, *, as_json: bool
) -> None:
    queries = [results.hits(number)[:k] for number in range(results.queries)]
    if as_json:
        queries_as_json = [
            [
                {
                    "id": hit.id,
                    "distance": hit.distance,
                    "metadata": {n: _plain(v) for n, v in hit.metadata.items()},
                    **({} if hit.sender is None else {"sender": str(hit.sender)}),
                }
                for hit in hits
            ]
            for hits in queries
        ]
        output.json_object(
            {"queries": queries_as_json, "missing": list(missing)}, name="index-search"
        )
        return
    for number, hits in enumerate(queries):
        names = list(dict.fromkeys(name for hit in hits for name in hit.metadata))
        by = ["sender"] if any(hit.sender for hit in hits) else []
        rows = [
            [
                hit.id,
                hit.distance,
                *([hit.sender.short if hit.sender else None] if by else []),
                *(hit.metadata.get(name) for name in names),
            ]
            for hit in hits
        ]
        title = f"query {number}" if len(queries) > 1 else ""
        output.table(title, ("id", "distance", *by, *names), rows, out=output.console())
        if not hits:
            output.note(f"{title}: nothing found" if title else "nothing found")
    if missing:
        output.note(f"without {len(missing)} shard(s) that gave no answer: {', '.join(missing)}")


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


@app.command()
def remove(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="The index's directory, and ids of items. With -c: ids alone.",
            metavar="DIR [ID...]",
            show_default=False,
        ),
    ] = None,
    where: WhereOption = None,
    config: NodeOption = None,
    state_dir: StateDirOption = None,
    target: TargetOption = None,
    timeout_s: TimeoutOption = 60.0,
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Write the files anew without them, as `compact` does.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove items by their ids, or those that meet conditions."""
    from bbnode.ir.values import MAX_INT64

    texts = list(places or ())
    on_node = config is not None or state_dir is not None
    if not on_node and not texts:
        raise typer.BadParameter("give the index's directory, and ids", param_hint="DIR")
    place = None if on_node else Path(texts.pop(0))
    for text in texts:
        is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_ID_DIGITS
        if not is_number or int(text) > MAX_INT64:
            raise typer.BadParameter(f"{text!r} is no id, a whole number from 0", param_hint="ID")
    ids = [int(text) for text in texts]
    if bool(ids) == bool(where):
        raise typer.BadParameter("give ids or --where, one of the two", param_hint="ID, --where")
    if place is None:
        if where:
            raise typer.BadParameter("goes with DIR; a node takes ids", param_hint="--where")
        if wipe:
            raise typer.BadParameter(
                "goes with DIR; a node does it by its setting wipe_removed", param_hint="--wipe"
            )
        _node_index(config, state_dir, target, timeout_s).remove(ids, timeout_s=timeout_s)
        summary: dict[str, Any] = {"index": "the node's index", "asked": len(ids)}
        text = f"the node's index: {len(ids)} id(s) are not in it any more"
    else:
        with _opened(place) as index:
            if where:
                ids = index.ids_matching(conditions.parse(where)).tolist()
            removed = index.remove(ids)
            if wipe:
                index.compact()
            dead = index.stats()["dead_rows"]
            summary = {
                "index": str(place),
                "removed": removed,
                "items": len(index),
                "dead_rows": dead,
            }
        text = f"{place}: {removed} removed, {summary['items']} left"
        if dead:
            text += f"; {dead} removed or replaced are still in its files (bbnode index compact)"
    if as_json:
        output.json_object(summary, name="index-remove")
    else:
        output.data(text)


@app.command()
def compact(
    place: Annotated[Path, typer.Argument(help="The index's directory.", metavar="DIR")],
    as_json: JsonOption = False,
) -> None:
    """Write an index's files anew without removed and replaced items, and delete the old ones."""
    with _opened(place) as index:
        wiped = index.stats()["dead_rows"]
        index.compact()
        summary = {"index": str(place), "wiped": wiped, "items": len(index)}
    if as_json:
        output.json_object(summary, name="index-compact")
    else:
        output.data(f"{place}: {wiped} removed or replaced wiped, {summary['items']} left")


@app.command()
def stats(
    place: Annotated[
        Path | None,
        typer.Argument(help="The index's directory.", metavar="DIR", show_default=False),
    ] = None,
    config: NodeOption = None,
    state_dir: StateDirOption = None,
    timeout_s: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Show what an index holds: items, dimensions, metric, sizes."""
    _one_place(place, config, state_dir)
    if place is None:
        summary: dict[str, Any] = {
            "indexes": _node_index(config, state_dir, None, timeout_s).stats()
        }
    else:
        with _opened(place) as index:
            summary = {"index": str(place), **index.stats()}
    if as_json:
        output.json_object(summary, name="index-stats")
    else:
        output.describe(summary, out=output.console())


# -- places -----------------------------------------------------------------------------------


def _files(place: Path, files: Sequence[Path], *, on_node: bool) -> list[Path]:
    """Return the files of items; on a node, the first argument is one of them."""
    if on_node:
        return [place, *files]
    if place.is_file():
        raise typer.BadParameter(
            f"{place} is a file; give the index's directory first, and then files", param_hint="DIR"
        )
    if not files:
        raise typer.BadParameter(
            f"{place} is the index's directory; give files of items, too", param_hint="FILE"
        )
    return list(files)


def _one_place(place: Path | None, config: Path | None, state_dir: Path | None) -> None:
    if (place is None) == (config is None and state_dir is None):
        raise typer.BadParameter(
            "give the index's directory, or the configuration of a running node (-c)",
            param_hint="DIR, -c",
        )


def _opened(
    place: Path, *, metric: str | None = None, kind: str | None = None, create: bool = False
) -> Collection:
    from bbnode.api.indexes import open_index
    from bbnode.components.indexes.errors import IndexInUse
    from bbnode.components.indexes.searchers import METRICS, SEARCHERS

    kind = (kind or "").replace("-", "_")
    for name, known, option in ((metric, METRICS, "--metric"), (kind, SEARCHERS, "--kind")):
        if name and name not in known:
            raise typer.BadParameter(
                f"{name!r}; choose {', '.join(each.replace('_', '-') for each in known)}",
                param_hint=option,
            )
    try:
        return open_index(place, kind=kind, metric=metric or "", create=create)
    except IndexInUse:
        output.note(f"the index of a running node is asked with -c FILE in place of {place}")
        raise


def _node_index(
    config: Path | None, state_dir: Path | None, target: str | None, timeout_s: float
) -> NodeIndex:
    from bbnode.api.blocking import connect
    from bbnode.api.indexes import index_of

    where = state_dir if state_dir is not None else config
    assert where is not None, "checked before"
    return index_of(connect(where, timeout_s=timeout_s), target)


def _encoder(directory: Path) -> Encode:
    from bbnode.components.encoders.sentences import SentenceEncoder

    return SentenceEncoder.open(directory.expanduser()).encode


def _as_texts(texts: Sequence[str]) -> Any:
    """Return texts unchanged, for a node that encodes them."""
    import numpy as np

    return np.array(texts, object)


def _query(file: Path | None, vector: str | None) -> Any:
    import numpy as np

    from bbnode.components.data.numpy_files import read_array

    if file is not None:
        return read_array(file.expanduser(), "--query")
    try:
        numbers = json.loads(vector or "")
        query = np.asarray(numbers, np.float32)
    except (ValueError, TypeError, RecursionError, OverflowError):
        query = None
    if query is None or not query.size or query.ndim not in (1, 2):
        raise typer.BadParameter('give numbers, as "[0.1, 0.2]"', param_hint="--vector")
    return query
