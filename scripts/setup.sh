#!/bin/sh
# Makes this machine ready: setup.sh demo | test | interop [REQUIREMENT...]
#
# Finds Python 3.11 to 3.14, makes .venv (.venv-interop for interop), installs the wheels, and where no headless OpenGL
# context can be made, Mesa's packages. Packages are installed only as root with apt-get; else the command is printed.
# A stamp in the environment holds a hash of all this depends on: the second run only compares it.
set -eu
cd "$(dirname "$0")/.."

profile=${1:-}
[ $# -eq 0 ] || shift
requirements="$*"
case $profile in
    demo | test) venv=.venv ;;
    interop) venv=.venv-interop ;;
    *) echo "usage: setup.sh demo | test | interop [REQUIREMENT...]" >&2; exit 2 ;;
esac
gl_packages="libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0 libgles2 libgl1"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# The driver's device nodes count too: with a GPU put in later, other wheels are due.
wanted() {
    {
        cat pyproject.toml scripts/setup.sh scripts/probe.py
        echo "$1 $requirements"
        ls /dev/nvidiactl /dev/dxg 2>/dev/null || true
    } | sha256sum
}
is_done() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/setup-$1" 2>/dev/null)" = "$(wanted "$1")" ]; }

is_done "$profile" && exit 0
# What the tests need holds all that the demo needs.
[ "$profile" = demo ] && is_done test && exit 0

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }
updated=no
install_packages() {
    if [ $updated = no ]; then
        say "apt-get update"
        apt-get -q=2 update || say "apt-get update failed; going on with the lists that are here"
        updated=yes
    fi
    say "apt-get install $*"
    DEBIAN_FRONTEND=noninteractive apt-get -q=2 install --no-install-recommends "$@" >/dev/null
}

usable() {
    [ "$("$1" -c 'import sys; print((3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null)" = True ]
}
find_python() {
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        usable "$python" && return 0
    done
    return 1
}

if ! find_python; then
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.14"
    if may_install; then
        for package in python3 python3.13 python3.12 python3.11; do
            install_packages $package || continue
            find_python && break
        done
    fi
    find_python || fail "no Python 3.11 to 3.14 found (python3 is $(python3 -V 2>/dev/null || echo missing)).
       Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12 ..."
fi

if ! { [ -x $venv/bin/python ] && usable $venv/bin/python && $venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    # Debian keeps ensurepip, which fills a virtual environment, in a package of its own.
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        may_install || fail "$python cannot make virtual environments. Run, then try again:
       sudo apt-get install $package"
        install_packages "$package" || fail "could not install $package, which makes virtual environments"
    fi
    say "$venv with $("$python" -V)"
    rm -rf $venv
    "$python" -m venv $venv
fi

cuda=$($venv/bin/python scripts/probe.py cuda)
case $profile in
    demo) extras=demo ;;
    test) extras=test,lint ;;
    interop) extras=test ;;
esac
if [ "$cuda" != none ]; then
    extras=$extras,$cuda
elif [ "$profile" != demo ]; then
    extras=$extras,compile
fi
say "pip install cuglue[$extras] $requirements"
# shellcheck disable=SC2086 # the requirements are words
$venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" $requirements

if ! why=$($venv/bin/python scripts/probe.py gl 2>&1); then
    say "no headless OpenGL: $why"
    if may_install; then
        # shellcheck disable=SC2086 # the packages are words
        install_packages $gl_packages || say "could not install all of: $gl_packages"
    fi
    if ! why=$($venv/bin/python scripts/probe.py gl 2>&1); then
        way_out="still no headless OpenGL ($why). To get it:
       sudo apt-get update && sudo apt-get install $gl_packages"
        # The demo has something to show without OpenGL; tests that cannot run must not look as if they had passed.
        [ "$profile" = demo ] || fail "$way_out"
        say "$way_out"
        say "the demo goes on without OpenGL"
        # As root it is tried again next time; else it is the reader's turn, and the demo itself looks for OpenGL.
        may_install && exit 0
        why="no OpenGL yet"
    fi
fi
say "$why"

# Two tests speak to the library as C programs do.
if [ "$profile" != demo ] && ! command -v gcc >/dev/null 2>&1; then
    if may_install; then
        install_packages gcc libc6-dev || say "could not install gcc"
    fi
    command -v gcc >/dev/null 2>&1 || fail "no C compiler for the tests. To get one:
       sudo apt-get install gcc libc6-dev"
fi
wanted "$profile" >$venv/setup-"$profile"
say "ready"
