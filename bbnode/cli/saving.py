"""`--save` of `bbnode invoke`: outputs into files.

Rule: NAME=FILE.npy is one array, NAME=FILE.npz one of several arrays in a file, NAME=FILE.json any
value; DIR/ saves all outputs, arrays as .npy and others as .json. The destinations are checked
before anything is invoked, and a file is written whole or not at all. A name of an output never
leads out of DIR.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer

from bbnode.cli import output
from bbnode.cli.common import pairs

HELP = (
    "Save an output: NAME=FILE.npy, NAME=FILE.npz (several in one file), NAME=FILE.json; "
    "DIR/ saves all of them."
)
_OPTION = "--save"
_SUFFIXES = (".npy", ".npz", ".json")
# For file names in DIR/; a file system takes names of 255 bytes.
_MAX_NAME_CHARS = 200


@dataclass(frozen=True)
class Saving:
    """The destination files of outputs."""

    files: Mapping[str, Path] = field(default_factory=dict)
    directory: Path | None = None

    def write(self, answer: Mapping[str, Any]) -> list[Path]:
        """Write the outputs of an answer; returns the files.

        Raises DeploymentError for an output that does not exist or does not fit into its file, and
        StorageError.
        """
        from bbnode.daemon import paths
        from bbnode.daemon.invoke.exact import decoded
        from bbnode.ir.errors import DeploymentError

        values = answer["values"] or {}
        lost = [name for name in self.files if name not in values]
        if lost:
            raise DeploymentError(
                f"nothing to save: there is no output {', '.join(map(repr, lost))}; there are: "
                f"{', '.join(map(repr, values)) or 'none'}"
            )
        wanted = list(self.files.items())
        if self.directory is not None:
            for name, value in values.items():
                suffix = ".npy" if "dtype" in value else ".json"
                wanted.append((name, self.directory / f"{_file_name(name)}{suffix}"))
        grouped: dict[Path, list[str]] = {}
        for name, path in wanted:
            grouped.setdefault(path, []).append(name)
        contents = {}
        for path, names in grouped.items():
            if path.suffix == ".json":
                contents[path] = _json_bytes({name: values[name] for name in names})
            else:
                contents[path] = _array_bytes(path, {name: decoded(values[name]) for name in names})
        for path, data in contents.items():
            paths.write_atomically(path, data, mode=0o666 & ~_umask())
        return list(contents)


def parse(texts: Sequence[str]) -> Saving:
    """Return the destinations that `--save` names; a usage error for a wrong text."""
    directories = [text for text in texts if text.endswith("/") or Path(text).is_dir()]
    files = pairs([text for text in texts if text not in directories], _OPTION)
    if len(directories) > 1:
        raise _usage("give one directory")
    files_by_name: dict[str, Path] = {}
    for name, text in files.items():
        path = Path(text).expanduser().absolute()
        if path.suffix not in _SUFFIXES:
            raise _usage(f"{text}: give a file that ends in {', '.join(_SUFFIXES)}, or DIR/")
        if path.suffix == ".npy" and path in files_by_name.values():
            raise _usage(f"{text} holds one array; name a .npz for several")
        _check_directory(path.parent)
        files_by_name[name] = path
    directory = None
    if directories:
        directory = Path(directories[0]).expanduser().absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _usage(f"{directory}: {error.strerror}") from error
        _check_directory(directory)
    return Saving(files_by_name, directory)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise _usage(f"{path} is no directory; make it first")
    if not os.access(path, os.W_OK | os.X_OK):
        raise _usage(f"{path} can't be written to")


def _usage(what: str) -> typer.BadParameter:
    return typer.BadParameter(output.cell(what), param_hint=_OPTION)


def _file_name(name: str) -> str:
    """Return a file name for the name of an output: without a separator or leading dot."""
    quoted = quote(name, safe="")
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    return quoted[:_MAX_NAME_CHARS]


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    import json

    from bbnode.cli.values import readable

    whole = {name: readable(value) for name, value in values.items()}
    content = next(iter(whole.values())) if len(whole) == 1 else whole
    return (json.dumps(content, indent=2, ensure_ascii=True) + "\n").encode()


def _array_bytes(path: Path, named: Mapping[str, Any]) -> bytes:
    import numpy as np

    from bbnode.ir.errors import DeploymentError

    arrays = {}
    for name, value in named.items():
        if not isinstance(value, np.ndarray):
            raise DeploymentError(
                f"output {name!r} is no array but {type(value).__name__}: save it in a .json file"
            )
        if value.dtype.kind == "O":
            value = value.astype(str)  # fixed width, as files without pickle hold texts
        elif value.dtype.kind == "V":
            value = value.astype(np.float32)  # bfloat16 and smaller convert without loss
        arrays[name] = value
    stream = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(stream, **{_file_name(name): array for name, array in arrays.items()})
    else:
        np.save(stream, next(iter(arrays.values())), allow_pickle=False)
    return stream.getvalue()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
