#!/usr/bin/env bash
# Sets up a host for jprm: Python, the package in .venv, a shared folder where one is named. Safe to run again.
#
#   tpu/setup.sh [--dry-run] [--nfs SERVER:/SHARE] [--at /shared] [--extra tpu|cuda] [--packages "A B"]
set -euo pipefail
cd "$(dirname "$0")/.."

dry=0 nfs="" at=/shared extra=tpu packages=""
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=1; shift ;;
    --nfs) nfs=$2; shift 2 ;;
    --at) at=$2; shift 2 ;;
    --extra) extra=$2; shift 2 ;;
    --packages) packages=$2; shift 2 ;;
    *) echo "error: $1: see the first lines of $0" >&2; exit 2 ;;
  esac
done

# shellcheck source=tpu/say.sh
source tpu/say.sh

if [ -n "$nfs" ]; then
  if [ "$dry" = 1 ] || ! command -v mount.nfs > /dev/null; then
    run sudo apt-get install -qq -y nfs-common
  fi
  if [ "$dry" = 1 ] || ! mountpoint -q "$at"; then
    run sudo mkdir -p "$at"
    run sudo mount -t nfs -o hard,nconnect=4 "$nfs" "$at"
    run sudo chmod 1777 "$at"
  fi
fi

python=${PYTHON:-}
for name in python3.12 python3.11; do # what constraints.txt pins
  [ -n "$python" ] && break
  if "$name" -c "" 2> /dev/null; then python=$name; fi
done
if [ -z "$python" ]; then
  # TPU VM images may have another Python; uv installs a newer one for this user.
  run python3 -m pip install --user -q uv
  run python3 -m uv python install 3.12
  [ "$dry" = 1 ] && python=python3.12 || python=$(python3 -m uv python find 3.12)
fi
if [ "$dry" = 1 ] || [ ! -x .venv/bin/python ]; then
  run "$python" -m venv .venv
fi
run .venv/bin/python -m pip install -q -c constraints.txt -e ".[train,gcs,$extra]"
if [ -n "$packages" ]; then
  read -ra words <<< "$packages"
  run .venv/bin/python -m pip install -q --no-deps -c constraints.txt "${words[@]}"
fi
echo "ready: .venv/bin/jprm, for tpu/run.sh"
