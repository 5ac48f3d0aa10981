#!/bin/sh
# Run the whole test suite: sh tests/run.sh --help says more. It needs a Python of 3.10 or later.
cd "$(dirname "$0")/.." || exit 1
for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
        exec "$python" -m tests.running "$@"
done
echo "Python 3.10 or later was not found; on Debian: apt-get install python3" >&2
exit 1
