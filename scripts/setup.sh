#!/usr/bin/env bash
# Makes .venv with UGRO and the named dependency groups of pyproject.toml, as locked; "test" when none is named.
# Usage: scripts/setup.sh [demo|dev|test|proof|bench...]
#   demo   PyTorch, and nothing else: no tools, no Debian packages
#   dev    the tools of `make check`; no Debian packages
#   test   both, and the Debian packages that the tests run for real
#   proof  all of test, and what only `make proof` runs for real: containers, Slurm, InfluxDB
#   bench  what `make bench` compares with
# Needs no network, and next to no time, when there is nothing to do.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin # where Debian keeps sshd and ip, and where users' own PATH does not look

groups=("${@:-test}")

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }
has_group() { [[ " ${groups[*]} " == *" $1 "* ]]; }
is_there() { command -v "$1" >/dev/null || { [[ $1 == /* ]] && compgen -G "$1" >/dev/null; }; }
may_install() { [ "$(id -u)" = 0 ] && is_there apt-get; }

# What is looked for, and the package that brings it. A path may hold a version.
wanted() {
  ! has_group test && ! has_group proof || echo 'sshd openssh-server
        ssh openssh-client
        ip iproute2
        iptables iptables
        ps procps
        gcc gcc
        /usr/include/stdio.h libc6-dev
        fish fish
        tcsh tcsh
        zsh zsh
        tmux tmux
        openssl openssl
        curl curl
        systemd-analyze systemd
        /usr/lib/postgresql/*/bin/initdb postgresql
        haproxy haproxy
        promtool prometheus
        /usr/share/java/zookeeper.jar zookeeper
        chromium chromium'
  ! has_group proof || echo 'podman podman
        runc runc
        catatonit catatonit
        debootstrap debootstrap
        influxd influxdb'
  ! has_group bench || echo 'pdsh pdsh
        rsync rsync
        zstd zstd
        tsp task-spooler'
  # Exported jobs are run by it, and it is what we compare with.
  ! has_group proof && ! has_group bench || echo 'munged munge
        slurmctld slurmctld
        slurmd slurmd
        sbatch slurm-client'
}

missing_packages() {
  local looked_for package
  while read -r looked_for package; do
    is_there "$looked_for" || echo "$package"
  done < <(wanted)
}

# dpkg asks policy-rc.d before it starts a service: we want sshd's program, never a running server.
apt_install() (
  policy=/usr/sbin/policy-rc.d
  saved=$policy.before-ugro
  restore() { rm -f "$policy"; [ ! -e "$saved" ] || mv "$saved" "$policy"; }
  # One that carries our mark was left by a run that was killed: it is nobody's wish.
  if [ -e "$policy" ] && ! grep -q "UGRO's set-up" "$policy"; then mv "$policy" "$saved"; fi
  trap restore EXIT
  trap 'exit 130' INT TERM HUP
  export DEBIAN_FRONTEND=noninteractive
  printf "#!/bin/sh\n# UGRO's set-up\nexit 101\n" >"$policy" && chmod 755 "$policy" &&
    apt-get -qq update &&
    apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 install "$@" >/dev/null
)

install_missing_packages() {
  local packages
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -gt 0 ] || return 0
  if may_install; then
    say "installing ${packages[*]}"
    if apt_install "${packages[@]}"; then
      keep_services_off "${packages[@]}"
      return 0
    fi
  fi
  say "not installed: ${packages[*]}; tests that need them are skipped. To run them all:"
  say "  sudo apt-get install --no-install-recommends ${packages[*]}"
}

# What a package would start at the next boot, with nobody having asked for it.
keep_services_off() {
  local package units=()
  [ -d /run/systemd/system ] || return 0
  for package; do
    case $package in
      openssh-server) units+=(ssh.service ssh.socket) ;;
      podman) units+=(podman.{service,socket} podman-restart.service podman-auto-update.{service,timer}) ;;
      prometheus | postgresql | influxdb | munge | slurmctld | slurmd | haproxy) units+=("$package.service") ;;
    esac
  done
  [ ${#units[@]} = 0 ] || systemctl --quiet disable "${units[@]}" || say "check that you want these: ${units[*]}"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    # Run, not only found: version managers leave commands that answer "not installed".
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3}); set PYTHON=/path/to/it"
}

make_venv() {
  local python package
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    may_install && apt_install "$package" || fail "$python cannot make a venv; run: sudo apt-get install $package"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

pip_install() {
  # Its bars are for people; a log does without.
  local quiet=--quiet
  [ ! -t 1 ] || quiet=--no-input
  .venv/bin/python -m pip --disable-pip-version-check install $quiet "$@"
}

# What has a lock is installed as locked, every file checked against its hash, and nothing is built. PyTorch has none,
# because its builds differ; it finds its own requirements there already. UGRO itself comes last, built by what is locked.
install_packages() {
  local group locked=() unlocked packages
  for group in "${groups[@]}"; do
    [ ! -e "requirements/$group.txt" ] || locked+=(--requirement "requirements/$group.txt")
  done
  [ ${#locked[@]} != 0 ] || locked=(--requirement requirements/demo.txt)
  # A lock is complete; some of it needs PyTorch, which comes after it.
  pip_install --no-deps --require-hashes --only-binary :all: "${locked[@]}"
  unlocked=$(.venv/bin/python scripts/lock.py --unlocked "${groups[@]}")
  mapfile -t packages <<<"$unlocked"
  [ -z "$unlocked" ] || pip_install "${packages[@]}"
  pip_install --no-deps --no-build-isolation --editable .
}

# Two makes at once would build one .venv twice over each other.
exec 9<scripts/setup.sh
flock 9

install_missing_packages

stamp=.venv/.set-up-$(IFS=-; echo "${groups[*]}")
key=$({ pwd; cat pyproject.toml scripts/setup.sh scripts/lock.py requirements/*.txt; } | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x .venv/bin/python ] && exit 0

.venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || make_venv
size=
[[ " ${groups[*]} " != *\ @(demo|test|proof)\ * ]] || size='; with PyTorch, the first time is a large download'
say "installing UGRO into .venv, with what \"${groups[*]}\" needs$size"
install_packages
echo "$key" >"$stamp"
