#!/usr/bin/env python3
"""Builds the image's file system without a container engine, and tries it.

    sudo deploy/docker/build_root.py --extras demo [--keep DIR]

Rule: the steps are the Dockerfile's own, read from it; nothing here repeats one. `FROM` is a
Debian root made by debootstrap, `RUN` is a shell in a chroot with mounts of its own (which are
gone when it ends), `COPY` is a copy. Then the result is run as compose.yaml runs it: another
user, no privileges, a read-only root, one writable volume.

Needs root, debootstrap, and the network. Where pip needs a certificate of one's own, show it to
the RUN steps: `--bind /etc/ssl/certs/ca-certificates.crt:/run/ca.crt --env PIP_CERT=/run/ca.crt`.
What of this machine is shown to a step is read-only: its package scripts run as root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTEXT = HERE.parent.parent
DOCKERFILE = HERE / "Dockerfile"

# Instructions that say something about the image and change no file of it.
METADATA = {"LABEL", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
# Before an image says something else, as an engine has it.
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
}
# Of /dev, all that a step sees.
DEVICES = ("null", "zero", "full", "random", "urandom")
# What a RUN step may take: the longest compiles and downloads.
STEP_TIMEOUT_S = 1800
SMOKE_TIMEOUT_S = 300


class BuildError(Exception):
    """A step failed, or the Dockerfile says something that this script does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: its word in upper case, and the rest with its lines joined."""

    word: str
    rest: str


@dataclass(slots=True, kw_only=True)
class Stage:
    """What stands between two FROMs."""

    name: str
    base: str
    steps: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> str | None:
        """The rest of the last instruction with that word."""
        return next((s.rest for s in reversed(self.steps) if s.word == word), None)


def parse(text: str) -> list[Stage]:
    """The stages of a Dockerfile, `${NAME}` in a FROM filled in from the ARGs before the first one.

    Raises BuildError for a stage that begins without FROM, or from something not understood.
    """
    stages: list[Stage] = []
    defaults: dict[str, str] = {}
    for each in _instructions(text):
        if each.word == "FROM":
            rest = re.sub(r"\$\{(\w+)\}", lambda m: defaults.get(m[1], ""), each.rest)
            found = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", rest, re.IGNORECASE)
            if found is None:
                raise BuildError(f"FROM {each.rest}: not understood")
            stages.append(Stage(base=found[1], name=found[2] or str(len(stages))))
        elif stages:
            stages[-1].steps.append(each)
        elif each.word == "ARG":
            name, _, default = each.rest.partition("=")
            defaults[name] = default
        else:
            raise BuildError(f"{each.word} before the first FROM")
    return stages


def _instructions(text: str) -> Iterator[Instruction]:
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        word, _, rest = (joined + line).strip().partition(" ")
        joined = ""
        yield Instruction(word=word.upper(), rest=rest.strip())


@dataclass(slots=True, kw_only=True)
class Root:
    """A stage's file system while its steps run."""

    path: Path
    # Paths of this machine, and where the steps see them.
    binds: Mapping[Path, str]
    env: dict[str, str]
    work: str = "/"
    user: str = "root"

    def inside(self, path: str) -> Path:
        """A path of the stage as this machine sees it."""
        return self.path / os.path.normpath(os.path.join(self.work, path)).lstrip("/")  # noqa: PTH118

    def run(self, script: str) -> None:
        """A RUN step: a shell in the root, with /proc, /dev and the network's files."""
        shown = {Path(p): p for p in ("/etc/resolv.conf", "/etc/hosts")} | dict(self.binds)
        mounts = [_bind(source, self.path, seen) for source, seen in shown.items()]
        inner = f"cd {shlex.quote(self.work)} && {script}"
        _in_chroot(self, mounts, ["/bin/sh", "-c", inner], timeout_s=STEP_TIMEOUT_S)


def _bind(source: Path, root: Path, seen: str) -> str:
    """The commands that show a path of this machine in a root, read-only."""
    target = root / seen.lstrip("/")
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    quoted = shlex.quote(str(target))
    return f"mount --bind {shlex.quote(str(source))} {quoted}; mount -o remount,bind,ro {quoted}"


def _in_chroot(
    root: Root,
    mounts: Sequence[str],
    command: Sequence[str],
    *,
    timeout_s: float,
    before: Sequence[str] = (),
) -> None:
    """Run in the root, in mount and process namespaces of its own: nothing of them is left."""
    quoted = shlex.quote(str(root.path))
    settings = [f"{name}={value}" for name, value in (DEFAULT_ENV | root.env).items()]
    script = "; ".join(
        [
            "set -e",
            *before,
            f"mount -t tmpfs -o nosuid,noexec,mode=0755 tmpfs {quoted}/dev",
            f"mkdir -m 1777 {quoted}/dev/shm",
            *(
                f"touch {quoted}/dev/{node}; mount --bind /dev/{node} {quoted}/dev/{node}"
                for node in DEVICES
            ),
            f"mount -t proc proc {quoted}/proc",
            *mounts,
            # Its environment is the image's alone.
            f"exec chroot {quoted} {shlex.join(['/usr/bin/env', '-i', *settings, *command])}",
        ]
    )
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    try:
        done = subprocess.run(
            [*unshare, "/bin/sh", "-c", script],
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"not done within {timeout_s:g} s: {shlex.join(command)}") from error
    if done.returncode != 0:
        raise BuildError(f"exit code {done.returncode}: {shlex.join(command)}")


def build(
    stages: Sequence[Stage],
    work: Path,
    *,
    args: dict[str, str],
    env: dict[str, str],
    binds: Mapping[Path, str],
) -> dict[str, Root]:
    """Run every stage; returns their roots by name."""
    roots: dict[str, Root] = {}
    for stage in stages:
        began = time.monotonic()
        root = Root(path=work / stage.name, binds=binds, env=dict(env))
        _copy_tree(_base(stage.base, work), root.path)
        for step in stage.steps:
            _apply(step, root, roots, args)
        roots[stage.name] = root
        say(f"stage {stage.name}: {time.monotonic() - began:.0f} s, {size_mb(root.path):.0f} MB")
    return roots


def _base(image: str, work: Path) -> Path:
    """`debian:SUITE-slim` as debootstrap makes it, less what "slim" leaves out."""
    found = re.fullmatch(r"debian:([a-z]+)(-slim)?", image)
    if found is None:
        raise BuildError(f"FROM {image}: only debian:SUITE and debian:SUITE-slim are known")
    base = work / f"base-{found[1]}"
    if not base.exists():
        began = time.monotonic()
        log = work / "debootstrap.log"
        with log.open("wb") as stream:
            code = subprocess.call(
                ["debootstrap", "--variant=minbase", found[1], str(base)],
                stdout=stream,
                stderr=stream,
            )
        if code != 0:
            raise BuildError(f"debootstrap failed: {log.read_text('utf-8', 'replace')[-2000:]}")
        slim = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale")
        for each in (*slim, "var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(base / each, ignore_errors=True)
        (base / "var/cache/apt/archives/partial").mkdir(parents=True)
        (base / "var/lib/apt/lists/partial").mkdir(parents=True)
        say(f"{image}: {time.monotonic() - began:.0f} s, {size_mb(base):.0f} MB")
    return base


def _apply(step: Instruction, root: Root, roots: dict[str, Root], args: dict[str, str]) -> None:
    match step.word:
        case "RUN":
            say(f"RUN {step.rest[:90]}")
            root.run(step.rest)
        case "ARG":
            name, _, default = step.rest.partition("=")
            root.env[name] = args.get(name, default.strip('"'))
        case "ENV":
            for pair in shlex.split(step.rest):
                name, _, value = pair.partition("=")
                root.env[name] = value
        case "WORKDIR":
            root.work = step.rest
            root.inside(".").mkdir(parents=True, exist_ok=True)
        case "USER":
            root.user = step.rest
        case "COPY":
            _copy(shlex.split(step.rest), root, roots)
        case word if word not in METADATA:
            raise BuildError(f"{word}: this script does not know that instruction")


def _copy(words: list[str], root: Root, roots: dict[str, Root]) -> None:
    options = dict(w[2:].split("=", 1) for w in words if w.startswith("--"))
    *sources, target = [w for w in words if not w.startswith("--")]
    base = roots[options["from"]].path if "from" in options else CONTEXT
    for source in sources:
        found = base / source.lstrip("/")
        if found.is_dir():
            _copy_tree(found, root.inside(target))
            continue
        into_dir = target.endswith("/")
        to = root.inside(target) / found.name if into_dir else root.inside(target)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found, to)
        to.chmod(int(options.get("chmod", "0644"), 8))


def _copy_tree(source: Path, target: Path) -> None:
    """As `cp -a`, without the byte code that .dockerignore keeps away."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["cp", "-a", "--reflink=auto", "--no-target-directory", str(source), str(target)],
        check=True,
    )
    if source.is_relative_to(CONTEXT):
        for cache in target.rglob("__pycache__"):
            shutil.rmtree(cache)


def smoke(root: Root, stage: Stage, volume: Path, script: str) -> None:
    """Run a shell script as the image's user, hardened as in compose.yaml."""
    mount_point = root.path / (stage.last("VOLUME") or "").lstrip("/")
    owner = mount_point.stat()
    volume.mkdir(mode=0o700)
    os.chown(volume, owner.st_uid, owner.st_gid)
    quoted = shlex.quote(str(root.path))
    read_only = [f"mount --bind {quoted} {quoted}", f"mount -o remount,bind,ro {quoted}"]
    writable = [
        f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs {quoted}/tmp",
        f"mount --bind {shlex.quote(str(volume))} {shlex.quote(str(mount_point))}",
    ]
    drop = ["setpriv", f"--reuid={root.user}", f"--regid={root.user}", "--clear-groups"]
    drop += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    inner = f"cd {shlex.quote(root.work)} && {script}"
    home = Root(path=root.path, binds={}, env=root.env | {"HOME": stage.last("VOLUME") or "/"})
    _in_chroot(
        home,
        writable,
        [*drop, "/bin/sh", "-c", inner],
        timeout_s=SMOKE_TIMEOUT_S,
        before=read_only,
    )


def smoke_script(stage: Stage, *, demo: bool) -> str:
    """A node by itself until the image's own health check says yes; then the demo."""
    check = re.search(r"CMD\s+(\[.*\])", stage.last("HEALTHCHECK") or "")
    entry, command = stage.last("ENTRYPOINT"), stage.last("CMD")
    if check is None or entry is None or command is None:
        raise BuildError("the last stage has no HEALTHCHECK, ENTRYPOINT or CMD")
    start = shlex.join(json.loads(entry) + json.loads(command))
    lines = [
        "set -ex",
        "bbnode version",
        "! touch /opt/bbnode/writable 2>/dev/null",
        "bbnode init --module bbnode.examples.gossip_averaging:GossipAveraging --target peer",
        f"{start} & pid=$!",
        "bbnode wait --ready --timeout 30",
        shlex.join(json.loads(check[1])),
        f"kill -s {(stage.last('STOPSIGNAL') or 'SIGTERM').removeprefix('SIG')} $pid",
        "wait $pid",
    ]
    if demo:
        lines.append("bbnode demo --clients 2 --rounds 2 --out /tmp/demo-out")
    return "\n".join(lines)


def size_mb(path: Path) -> float:
    """Megabytes that a tree takes on the disk."""
    told = subprocess.run(["du", "-sxk", str(path)], check=True, capture_output=True, text=True)
    return int(told.stdout.split()[0]) / 1000


def say(text: str) -> None:
    """Talk goes to stderr, as the project's scripts have it."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _pair(text: str, separator: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not (left and found and right):
        raise BuildError(f"{text!r}: write it as LEFT{separator}RIGHT")
    return left, right


def main() -> int:
    """Build, try, tell the size; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the image's root without an engine.")
    parser.add_argument("--extras", default="", help="build argument EXTRAS, as demo")
    parser.add_argument("--keep", type=Path, help="work there and leave it (default: removed)")
    for option, shape, text in (
        ("--env", "NAME=VALUE", "variable for the RUN steps (repeatable)"),
        ("--bind", "PATH:SEEN", "path of this machine, and where they see it (repeatable)"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=shape, help=text)
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        say("error: run it as root, on a machine with debootstrap (apt-get install debootstrap)")
        return 1
    stages = parse(DOCKERFILE.read_text("utf-8"))
    work = options.keep or Path(tempfile.mkdtemp(prefix="bbnode-root-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        for leftover in [*(s.name for s in stages), "volume"]:
            shutil.rmtree(work / leftover, ignore_errors=True)
        roots = build(
            stages,
            work,
            args={"EXTRAS": options.extras},
            env=dict(_pair(text, "=") for text in options.env),
            binds={Path(path): seen for path, seen in (_pair(t, ":") for t in options.bind)},
        )
        last = stages[-1]
        smoke(
            roots[last.name],
            last,
            work / "volume",
            smoke_script(last, demo="demo" in options.extras.split(",")),
        )
    except BuildError as error:
        say(f"error: {error}")
        return 1
    finally:
        if options.keep is None:
            shutil.rmtree(work)
    say("it works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
