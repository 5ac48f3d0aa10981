#!/bin/sh
# Run the whole test suite on every database, with each pair of Python and Django.
#
#   sh tests/run.sh [--quick] [--only=sqlite|mysql|postgresql|redis] [--keep] [-- PYTEST ARGUMENTS]
#
# Installs what is missing (Debian's apt, with sudo when not root), makes its own virtual
# environments in .venv-tests/, starts MariaDB, PostgreSQL, Redis, etcd and ZooKeeper privately on
# free ports and stops them at the end. A run is a list of jobs (the slow tests on SQLite, say), of
# which some run at the same time, each on servers of its own. MySQL comes from a newer Debian than
# this machine's, unpacked into .venv-tests/; where it cannot be had, it is skipped.
#
#   --quick   one Python, SQLite and Redis, without the tests marked slow
#   --only=X  only on this database; redis: only what is about Redis
#   --keep    leave the servers running afterwards, and say how to use and stop them
#
# A server that already runs is used instead, with an account that may create databases:
#   DISTLOCK_TEST_MYSQL_URL=mysql://user:password@host:3306/name  (MariaDB)
#   DISTLOCK_TEST_MYSQL9_URL=mysql://user:password@host:3306/name
#   DISTLOCK_TEST_POSTGRESQL_URL=postgresql://user:password@host:5432/name
#   DISTLOCK_TEST_REDIS_URL=redis://:password@host:6379/0
#   DISTLOCK_TEST_REDIS_CLUSTER_URL=redis://host:6379,redis://other:6379
#   DISTLOCK_TEST_ETCD_URL=http://host:2379
#   DISTLOCK_TEST_ZOOKEEPER_URL=host:2181
#   DISTLOCK_TEST_REDLOCK_URL=redis://host:6379,redis://other:6379,redis://third:6379

set -u
given=$(env | grep '^DISTLOCK_TEST_[A-Z_]*URLS\{0,1\}=')
cd "$(dirname "$0")/.." || exit 1
here=$(pwd)
unset PYTHONDONTWRITEBYTECODE  # it would double what collecting the tests costs, in each job

quick= only= keep=
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --keep) keep=1 ;;
        --only=sqlite | --only=mysql | --only=postgresql | --only=redis) only=${1#--only=} ;;
        --) shift; break ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$here/tests/run.sh"; exit 0 ;;
        *) echo "unknown option: $1 (see --help)" >&2; exit 2 ;;
    esac
    shift
done
[ -z "$quick" ] || [ -z "$only" ] || { echo "--quick and --only exclude each other" >&2; exit 2; }

# Every run has Redis; which databases, and is there a browser?
browser=1
case $quick$only in
    1) databases=sqlite browser= ;;
    redis) databases=sqlite browser= ;;
    '') databases='sqlite mysql postgresql' ;;
    *) databases=$only ;;
esac
# Beside SQLite only: they need no database.
case $quick$only in
    '' | sqlite) stores='redlock etcd zookeeper' ;;
    1 | redis) stores=redlock ;;
    *) stores= ;;
esac
kept="new-${databases%% *}"  # whose servers --keep leaves running
wants() { case " $databases redis redis_cluster $stores " in *" $1 "*) true ;; *) false ;; esac; }

# --- The end, whatever it is: what was started is stopped, by its process id. ---------------

umask 022
work=$(mktemp -d "${TMPDIR:-/tmp}/distlock-tests.XXXXXX") || exit 1
chmod 711 "$work"  # the user postgres passes through
python='' child='' lanes='' policy='' skipped="$work/skipped"
: > "$skipped"
: > "$work/table"

stop_servers() {
    for directory in "$work"/${1:-*}/servers; do
        [ ! -d "$directory" ] || "$python" -m tests.servers stop --dir "$directory"
    done
}
clean_up() {
    trap - EXIT
    trap '' INT TERM HUP
    for process in $child $lanes; do
        kill -TERM "$process" 2>/dev/null
        wait "$process" 2>/dev/null
    done
    [ -z "$policy" ] || as_root rm -f /usr/sbin/policy-rc.d
    if [ -n "$keep" ] && [ -s "$work/$kept/env" ]; then
        say "The servers run on. Use them:  set -a; . $work/$kept/env; python -m pytest"
        echo "Stop them:  $python -m tests.servers stop --dir $work/$kept/servers && rm -rf $work"
    else
        stop_servers
        rm -rf "$work"
    fi
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

say() { printf '\n=== %s\n' "$*"; }
fail() { echo "FAILED: $*" >&2; : > "$work/failed"; }
skip() { echo "$*" >> "$skipped"; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Run a command so that a signal to this script ends it too: the shell handles signals while it
# waits, not while a command runs. The shell makes what it starts in the background deaf to
# Ctrl-C, which tests of Ctrl-C would inherit.
run() {
    env --default-signal=INT,QUIT "$@" &
    child=$!
    wait "$child"
    set -- $?
    child=
    return "$1"
}

# --- What is missing is installed. ----------------------------------------------------------

has() { PATH="$PATH:/usr/local/sbin:/usr/sbin" command -v "$1" >/dev/null 2>&1; }
header() {  # is Python.h there for Debian's own Python?
    [ -x /usr/bin/python3 ] || { has python3; return; }
    /usr/bin/python3 -c 'import os, sysconfig as s
raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' 2>/dev/null
}
missing=
need() { missing="$missing $*"; }

has python3 && python3 -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
# Tests that kill a server start one of their own, even if the suite's is given by a URL.
has redis-server || has valkey-server || need redis-server
if [ -n "$stores" ]; then
    has etcd || need etcd-server
    has java || need default-jre-headless
    [ -e /usr/share/java/zookeeper.jar ] || need zookeeper
fi
if wants mysql; then
    has gcc || need gcc libc6-dev
    header || need python3-dev
    has pkg-config && { pkg-config --exists libmariadb || pkg-config --exists mysqlclient; } ||
        need libmariadb-dev pkg-config
    has mariadbd && has mariadb-install-db || need mariadb-server-core mariadb-client
fi
if wants postgresql; then
    has postgres || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need postgresql
fi
if [ -n "$browser" ]; then
    has chromium && has chromedriver || need chromium chromium-driver
    [ -d /usr/share/fonts/truetype/nanum ] || need fonts-nanum
fi
has msgfmt || [ -n "$quick" ] || need gettext

if [ -n "$missing" ]; then
    say "Installing$missing"
    if ! has apt-get; then
        echo "There is no apt-get here; please install the equivalent of:$missing" >&2
    elif [ "$(id -u)" != 0 ] && ! has sudo; then
        echo "Neither root nor sudo; please run: apt-get install$missing" >&2
    else
        # The packages must not start services of their own beside ours.
        if [ ! -e /usr/sbin/policy-rc.d ]; then
            policy=1
            printf '#!/bin/sh\nexit 101\n' > "$work/policy-rc.d"
            as_root install -m 755 "$work/policy-rc.d" /usr/sbin/policy-rc.d
        fi
        export DEBIAN_FRONTEND=noninteractive
        as_root apt-get update -qq
        # shellcheck disable=SC2086  # a list of packages
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends $missing > "$work/apt.log" 2>&1 ||
            { tail -n 20 "$work/apt.log" >&2; fail "apt-get install$missing"; }
        [ -z "$policy" ] || as_root rm -f /usr/sbin/policy-rc.d
        policy=
    fi
fi

# --- Which Pythons are here, and which Django goes with each. -------------------------------

# The path of a working Python of this version, from PATH or pyenv.
find_python() {
    pyenv_root=$(pyenv root 2>/dev/null || echo "${HOME:-/root}/.pyenv")
    for candidate in "$(command -v "python$1")" "/usr/bin/python$1" "/usr/local/bin/python$1" \
        "$pyenv_root"/versions/*/"bin/python$1"; do
        [ -x "$candidate" ] || continue
        "$candidate" -c "import ensurepip, sqlite3, ssl, sys, venv
raise SystemExit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null || continue
        "$candidate" -c 'import sys; print(sys.executable)'
        return
    done
    return 1
}

# 3.10 and 3.11 have Django 5.2 as their last. Two pairs, the oldest and the newest Django, run
# on every database, the newest with the slow tests. What does not depend on the database runs
# beside SQLite only: with Django 5.2 on another Python, and the lowest versions that setup.cfg
# allows, which have to pass the contract suite on every database, too. With Django 6.0 the built
# wheel is tested on SQLite.
main_pairs= old= new= lowest_pair= wheel_pair=
for version in 3.11 3.10; do
    find_python "$version" > "$work/python$version" || { rm "$work/python$version"; continue; }
    if [ -z "$old" ]; then old=$version; else lowest_pair=$version-5.2; fi
done
for version in 3.13 3.12 3.14; do
    find_python "$version" > "$work/python$version" || { rm "$work/python$version"; continue; }
    if [ -z "$new" ]; then new=$version
    elif [ -z "$wheel_pair" ]; then wheel_pair=$version-6.0
    else skip "Python $version"; fi
done
[ -z "$old" ] || main_pairs="$old-5.2"
[ -z "$new" ] || main_pairs="$main_pairs $new-6.1"
[ -n "$lowest_pair" ] || skip "the lowest versions: only one of Python 3.10 and 3.11 is here"
[ -n "$wheel_pair" ] || skip "the built wheel: only one of Python 3.12, 3.13 and 3.14 is here"
[ -n "$old" ] || skip "Django 5.2: no Python 3.11 or 3.10 here"
[ -n "$new" ] || skip "Django 6.1: no Python 3.12 or later here"
[ -n "$main_pairs" ] || { echo "No Python 3.10 or later with venv was found." >&2; exit 1; }
if [ -n "$quick$only" ]; then
    skip "the pairs beside the main ones: $lowest_pair $wheel_pair (--quick or --only)"
    lowest_pair= wheel_pair=
fi
if [ -n "$quick" ]; then
    skip 'tests marked slow; MariaDB, PostgreSQL, etcd, ZooKeeper and the browser (--quick)'
    for pair in $main_pairs; do last=$pair; done
    [ "$main_pairs" = "$last" ] || skip "every pair but $last (--quick)"
    main_pairs=$last
fi
chosen=$*
[ -z "$only" ] || skip "everything but $only (--only=$only)"
[ "$only" != redis ] || set -- "$@" -k 'redis or redlock'
for pair in $main_pairs; do python=$(cat "$work/python${pair%-*}"); done

# Make the virtual environment of a pair, or keep it if what it was made from is the same. One job
# makes it, the others that want it wait.
make_venv() {
    exec 9> "$work/$1.lock"
    flock 9
    make_venv_alone "$1"
    set -- $?
    exec 9>&-
    return "$1"
}
make_venv_alone() {
    pair=$1 venv="$here/.venv-tests/$1"
    source=$(cat "$work/python${pair%-*}")
    lowest=
    [ "$pair" != "$lowest_pair" ] || lowest=tests/lowest.txt
    # shellcheck disable=SC2086  # none or one
    { cat requirements.txt $lowest; echo "Django~=${pair#*-}.0"; } > "$work/$pair-all"
    # mysqlclient has to be compiled: not for those who only try SQLite and Redis.
    grep -v '^mysqlclient' "$work/$pair-all" > "$work/$pair-some"
    if wants mysql; then wanted=all; else wanted=some; fi
    for made in $wanted all; do
        stamp=$({ echo "$source"; cat "$work/$pair-$made"; } | cksum)
        [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ] || return 0
    done
    say "Virtual environment $pair"
    rm -rf "$venv"
    "$source" -m venv "$venv" &&
        run "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
            -r "$work/$pair-$wanted" &&
        { echo "$source"; cat "$work/$pair-$wanted"; } | cksum > "$venv/stamp" && return
    fail "virtual environment $pair"
    record "$pair" install FAILED 0 ''
    return 1
}

# --- The runs. ------------------------------------------------------------------------------

record() { printf '%-10s %-20s %-8s %6s s  %s\n' "$@" >> "$work/table"; }

# run_suite PAIR DATABASE [PYTEST ARGUMENTS]
run_suite() {
    pair=$1 database=$2
    shift 2
    say "Python ${pair%-*}, Django ${pair#*-}, $database"
    rm -f "$DISTLOCK_TEST_TOTALS"
    began=$(date +%s) result=ok
    # InnoDB's own default: MariaDB is tested at Django's, READ COMMITTED.
    [ "$database" != mysql9 ] || export DISTLOCK_TEST_ISOLATION='repeatable read' \
        DISTLOCK_TEST_MYSQL_URL="$DISTLOCK_TEST_MYSQL9_URL"
    run env DISTLOCK_TEST_DATABASE="${database%9}" \
        "$here/.venv-tests/$pair/bin/python" -W error -m pytest -q -rs "$@"
    case $? in
        0) ;;
        5) [ -n "$chosen" ] && result=none || result=FAILED ;;  # none of those asked for is here
        *) result=FAILED ;;
    esac
    [ "$result" != FAILED ] || : > "$work/failed"
    record "$pair" "$job" "$result" $(($(date +%s) - began)) \
        "$(cat "$DISTLOCK_TEST_TOTALS" 2>/dev/null)"
}

# check NAME COMMAND...
check() {
    name=$1 began=$(date +%s) result=ok
    shift
    run "$@" || { result=FAILED; : > "$work/failed"; }
    record "$pair" "$name" "$result" $(($(date +%s) - began)) ''
}

# Start the servers that a job on this database needs, in "$lane".
start_servers() {
    needed="redis $1"
    # What runs beside SQLite only may need any of them.
    case $marks in *'not once'*) ;; *) needed="$needed redis_cluster $stores $databases" ;; esac
    export DISTLOCK_TEST_REQUIRE=
    for server in redis redis_cluster redlock mysql mysql9 postgresql etcd zookeeper; do
        case " $needed " in *" $server "*) ;; *) continue ;; esac
        DISTLOCK_TEST_REQUIRE="$DISTLOCK_TEST_REQUIRE $server"
        variable=DISTLOCK_TEST_$(echo "$server" | tr '[:lower:]' '[:upper:]')_URL
        if eval "[ -n \"\${$variable:-}\" ]"; then
            echo "$server: the one of $variable"
        elif line=$("$python" -m tests.servers start --dir "$lane/servers" "$server"); then
            echo "$line" | tee -a "$lane/env"
            export "${line?}"
        elif [ $? = 69 ] && [ "$server" = mysql9 ]; then
            skip "MySQL: it cannot be had here"
            return 1
        else
            fail "the server $server"
        fi
    done
    [ -z "$browser" ] || DISTLOCK_TEST_REQUIRE="$DISTLOCK_TEST_REQUIRE chromium"
}

# run_job KIND-DATABASE [PYTEST ARGUMENTS]: the tests of this kind on this database, on servers of
# its own. In the background: what it exports is for this job.
run_job() {
    job=$1 kind=${1%-*} database=${1#*-} lane="$work/$1" child=''
    shift
    trap - EXIT
    trap '[ -z "$child" ] || kill -TERM "$child"; exit 143' TERM
    mkdir -m 711 "$lane/servers" "$lane/tmp"
    export TMPDIR="$lane/tmp" DISTLOCK_TEST_VAR="$lane/var" DISTLOCK_TEST_TOTALS="$lane/totals"
    case $kind in
        checks) run_checks; return ;;
        slow) own=$new_pair marks=slow ;;
        new) own=$new_pair marks='not slow' ;;
        old) own=$old_pair marks=$old_marks ;;
        lowest) own=$lowest_pair marks='not slow and not crowd and once' ;;
        contract) own=$lowest_pair marks='not slow and not crowd and not once' ;;
        wheel) own=$wheel_pair marks='not slow and not crowd and not once' ;;
    esac
    case $kind-$database in
        old-sqlite | old-postgresql | new-mysql9) marks="$marks and not crowd" ;;
    esac
    case $database-$marks in
        sqlite-* | *'not once'*) ;;
        *) marks="$marks and not once" ;;
    esac
    make_venv "$own" || return
    start_servers "$database" || return
    case $kind in
        wheel) test_wheel "$@" ;;
        contract)
            [ -n "$chosen" ] || set -- tests/test_contract.py
            run_suite "$own" "$database" "$@" -m "$marks" -k contract ;;
        *) run_suite "$own" "$database" "$@" -m "$marks" ;;
    esac
    [ "$keep$job" = "1$kept" ] || stop_servers "$job"
}

# Do one job after the other: each is done by the worker that makes its directory.
work_off() {
    child=''
    trap - EXIT
    trap '[ -z "$child" ] || { kill -TERM "$child"; wait "$child"; }; exit 143' TERM
    for job in $jobs; do
        mkdir -m 711 "$work/$job" 2>/dev/null || continue
        echo "Begun: $job"
        if [ "$at_once" = 1 ]; then
            run_job "$job" "$@" &
        else
            run_job "$job" "$@" > "$work/$job.log" 2>&1 &
        fi
        child=$!
        wait "$child"
        [ $? -lt 128 ] || fail "the job $job was killed"
        child=''
        [ "$at_once" = 1 ] || flock "$work/printed" cat "$work/$job.log"
    done
    return 0
}

# Test what users install, in a copy of the project that has lost its sources.
test_wheel() {
    bin="$here/.venv-tests/$own/bin"
    mkdir "$lane/project"
    cp -R ./* "$lane/project"
    cd "$lane/project" || exit 1
    if run "$bin/python" -m build --wheel --outdir "$lane/dist" > "$lane/build.log" 2>&1 &&
        run "$bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
            --force-reinstall "$lane"/dist/*.whl && rm -r build distlock_app; then
        run_suite "$own" sqlite "$@" -m "$marks"
    else
        tail -n 20 "$lane/build.log"
        fail "the wheel"
    fi
    run "$bin/python" -m pip uninstall --quiet --yes distlock_app
    cd "$here" || exit 1
}

run_checks() {
    pair=$new_pair bin="$here/.venv-tests/$new_pair/bin"
    say "Linter, types, imports, migrations ($pair)"
    check ruff "$bin/ruff" check --no-cache .
    check format "$bin/ruff" format --no-cache --check .
    if [ "$pair" = 3.10-5.2 ]; then
        skip "types and import floors: their checkers need Python 3.11"
    else
        check types "$bin/mypy" --cache-dir="$work/mypy"
        check imports "$bin/lint-imports" --no-cache
    fi
    check migrations env DJANGO_SETTINGS_MODULE=tests.settings \
        "$bin/python" -m django makemigrations --check --dry-run
}

new_pair=${main_pairs##* }
old_pair=${main_pairs%"$new_pair"}
old_pair=${old_pair% }
make_venv "$new_pair" || exit 1

# The jobs, the longest first.
jobs=
if [ -n "$quick" ]; then
    jobs='new-sqlite checks'
else
    for pair in $old_pair $lowest_pair $wheel_pair; do
        skip "slow tests on $pair: the pair $new_pair runs them"
    done
    for pair in $old_pair; do
        skip "tests on $pair that start processes, but those on MariaDB: the pair $new_pair runs them"
    done
    for pair in $lowest_pair $wheel_pair; do
        skip "tests on $pair that start processes"
    done
    for pair in $lowest_pair; do
        skip "what depends on the database on $pair, but the contract: the pair $old_pair runs it"
    done
    for pair in $wheel_pair; do
        skip "MariaDB and PostgreSQL on $pair, and what is the same on every database"
    done
    old_marks='not slow'
    if [ -n "$lowest_pair" ]; then
        skip "what is the same on every database on $old_pair: the pair $lowest_pair runs it"
        old_marks='not slow and not once'
    fi
    first= middle= last=
    for database in $databases; do
        case $database in
            sqlite) first="slow-sqlite new-sqlite" ;;
            *) middle="$middle new-$database" last="$last slow-$database" ;;
        esac
        [ -z "$old_pair" ] || last="old-$database $last"
        [ -z "$lowest_pair" ] || last="$last contract-$database"
    done
    if wants mysql; then
        middle="$middle new-mysql9"
        skip 'tests on MySQL that are slow, start processes, or need no database'
    fi
    jobs="$first ${lowest_pair:+lowest-sqlite} $middle ${wheel_pair:+wheel-sqlite} $last checks"
fi
# More at once than there are processors: two thirds of the time tests wait for a ttl, a server, a
# process. One at a time on a server that somebody gave us, where they would meet.
at_once=$(($(nproc) * 3))
[ -z "$given$quick" ] || at_once=1
for _ in $(seq "$at_once"); do
    work_off "$@" &
    lanes="$lanes $!"
done
for process in $lanes; do wait "$process" || fail "a worker ended"; done
lanes=

say "Summary"
cat "$work/table"
if [ -s "$skipped" ]; then
    echo "Skipped:"
    sed 's/^/  - /' "$skipped"
fi
if [ -e "$work/failed" ]; then
    echo "FAILED"
    exit 1
fi
echo "All passed."
