"""The terminal of a job: commands as a user types them, and what they took.

Rule: every command is shown before it runs, so that it can be typed again in the job's folder, and
one that fails ends the job with its last lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bbnode.ir.errors import BbnodeError

ROOT: Final = Path(__file__).parents[1]
MIB: Final = 1024 * 1024
_LAST_LINES: Final = 12
_SHOWN: Final = 1000  # characters of a line
_END_S: Final = 60.0  # that a testbed has for its end


class CommandFailed(BbnodeError):
    """A command of a job ended with another exit code than 0."""


@dataclass
class Terminal:
    """A shell in the folder of a job.

    Attributes:
        folder: where commands run and data are written.
        show: gets each command before it runs.
        moved_bytes: what peers have sent each other, of all testbeds.
    """

    folder: Path
    show: Callable[[str], None] = print
    moved_bytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def bring(self, *files: Path) -> None:
        """Copy files of the job, its program say, into the folder."""
        for file in files:
            shutil.copy(file, self.folder)

    def bbnode(self, line: str) -> str:
        """Run a line of `bbnode`; return what it printed. Raises CommandFailed."""
        words = shlex.split(line)
        self._type(line)
        ended = subprocess.run(
            [sys.executable, "-m", "bbnode", *words],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            last = "\n".join(ended.stdout.splitlines()[-_LAST_LINES:])
            raise CommandFailed(f"bbnode {words[0]} ended with {ended.returncode}:\n{last}")
        return ended.stdout

    def up(self, line: str) -> Report:
        """Run `bbnode up` with a line of arguments; return its report. Raises CommandFailed."""
        self.bbnode(f"up {line}")
        words = shlex.split(line)
        out = words[words.index("--out") + 1] if "--out" in words else "up-out"
        report = Report(json.loads((self.folder / out / "report.json").read_text("utf-8")))
        self.moved_bytes += sum(each.get("bytes", 0) for each in report.rounds)
        return report

    @contextmanager
    def running(self, line: str, nodes: int) -> Iterator[subprocess.Popen[str]]:
        """Run a testbed, or a node, beside other commands: from when all is ready to the end.

        It is ended by Ctrl-C. Raises CommandFailed where it ends before.
        """
        words = shlex.split(line)
        self._type(f"{line} &")
        process = subprocess.Popen(
            [sys.executable, "-m", "bbnode", *words],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        drained = threading.Thread(target=deque, args=(process.stdout, 0), daemon=True)
        try:
            last: deque[str] = deque(maxlen=_LAST_LINES)
            for said in process.stdout:
                last.append(said.rstrip())
                nodes -= said.rstrip().endswith("is ready") or " ready peer_id=" in said
                if not nodes:
                    break
            else:
                code = process.wait(_END_S)
                raise CommandFailed(
                    "\n".join((f"bbnode {words[0]} ended with {code} before it was ready:", *last))
                )
            drained.start()
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_END_S)
            if drained.ident is not None:
                drained.join()
            process.stdout.close()

    @contextmanager
    def node(self, config: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run one node beside other commands, from when it is ready to the end.

        Raises CommandFailed where it is not ready in a minute.
        """
        line = f"run -c {config} --log-format text"
        self._type(f"{line} &")
        path = self.folder / Path(config).parent / "node.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bbnode", *shlex.split(line)],
                cwd=self.folder,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.bbnode(f"wait --ready -c {config}")
            yield process
        except CommandFailed as error:
            last = path.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
            raise CommandFailed("\n".join((str(error), *last))) from error
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_END_S)

    def wait_for_peers(self, config: str, count: int) -> None:
        """Wait until a node is connected with so many others. Raises CommandFailed."""
        until_s = time.monotonic() + _END_S
        while len(json.loads(self.bbnode(f"peers -c {config} --json"))["peers"]) < count:
            if time.monotonic() > until_s:
                raise CommandFailed(f"{config} is not connected with {count} peers")
            time.sleep(0.2)

    def pid_of(self, config: str) -> int:
        """Return the process that runs the node of a configuration. Raises CommandFailed."""
        wanted = str(self.folder / config).encode()
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (each / "cmdline").read_bytes().split(b"\0"):
                        return int(each.name)
        raise CommandFailed(f"nothing runs {config}")

    @property
    def memory_mib(self) -> float:
        """The most that one process of the commands held, so far; without any, this one."""
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return (most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024

    def _type(self, line: str) -> None:
        words = " ".join(line.split())
        more = f" … ({len(words)} characters)" if len(words) > _SHOWN else ""
        self.show(f"$ bbnode {words[:_SHOWN]}{more}")

    def _environment(self) -> Mapping[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        return {**os.environ, "PYTHONPATH": path, **self.environment}


@dataclass(frozen=True)
class Report:
    """The report of a testbed."""

    whole: Mapping[str, Any]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds, in their order."""
        return list(self.whole["rounds"])

    def series(self, output: str) -> list[float]:
        """Return an output of every round that has it."""
        return [each["outputs"][output] for each in self.rounds if output in each["outputs"]]
