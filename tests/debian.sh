#!/usr/bin/env bash
# Run a command of this checkout in Debian unstable, which has newer Pythons and servers than most
# machines. Needs root, and Debian's `debootstrap`; the system goes to .matrix/debian, once.
#   tests/debian.sh env PYTHONS=3.14 SETS=newest tests/matrix.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=python3.14-dev,python3.14-venv,redis-server,libfaketime,default-jre-headless,chromium,dbus-x11,gcc,git,procps,openssl
root=$PWD/.matrix/debian
if [[ ! -e $root.ready ]]; then
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --include="$packages" sid "$root"
    touch "$root.ready"
fi
mkdir -p "$root$PWD" "$root/etc/ssl/certs"
touch "$root/etc/resolv.conf" "$root/etc/hosts" "$root/etc/pip.conf"

# What is mounted here ends with the command. This checkout first: it has nothing of the others below it.
inside='
    for place in "$PWD" /proc /dev /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs; do
        [[ ! -e $place ]] || mount --rbind "$place" "$0$place"
    done
    exec chroot "$0" env HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /bin/bash -c "cd \"\$0\" && exec \"\$@\"" "$PWD" "$@"
'
exec unshare --mount /bin/bash -c "set -euo pipefail; $inside" "$root" "$@"
