#!/usr/bin/env bash
# Trains on this host as one process of a run, and restarts after a stop. Launchers run this on every host. With TASK=rl it
# runs `jprm rl` in place of `jprm train`.
#
#   tpu/run.sh [--dry-run] EXPERIMENT.py WORKDIR [more arguments of `jprm train`]
#
# A refusal (status 2), Ctrl-C (130) and the end of the run (0) are final. Anything else, such as a preemption (143) or a
# dead host, restarts after PAUSE seconds from the checkpoint, until RETRIES starts in a row bring no new checkpoint.
# DISTRIBUTED (default auto) is the value of --distributed, "" for one process. Output goes to WORKDIR/logs/ too, or to
# logs/ here where WORKDIR is a bucket's (gs://BUCKET/RUN).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

dry=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
if [ $# -lt 2 ]; then echo "usage: tpu/run.sh [--dry-run] EXPERIMENT.py WORKDIR [arguments]" >&2; exit 2; fi
experiment=$1 workdir=$2
shift 2

command=(.venv/bin/jprm "${TASK:-train}" "$experiment" --workdir "$workdir" "$@")
[ -x .venv/bin/jprm ] || command[0]=jprm
where=${DISTRIBUTED-auto}
[ -n "$where" ] && command+=(--distributed "$where")
case $workdir in *://*) logs=logs ;; *) logs=$workdir/logs ;; esac
log=$logs/$(hostname).log
if [ "$dry" = 1 ]; then
  printf '+'; printf ' %q' "${command[@]}"; echo " 2>&1 | tee -a $(printf %q "$logs")/HOST.log"
  echo "again after ${PAUSE:-30} s, unless its status is 0, 2 or 130 or ${RETRIES:-5} starts brought no new checkpoint"
  exit 0
fi

# Two runs on one host would compete for its accelerators.
exec 9> "${TMPDIR:-/tmp}/jprm-run.lock"
flock -n 9 || { echo "error: tpu/run.sh runs on this host already" >&2; exit 2; }
echo $$ > "${TMPDIR:-/tmp}/jprm-run.pid" # read by `stop`
mkdir -p "$logs"
in_bucket='
import re, sys
from jprm.storage import Remote
found = (re.search(r"/(\d+)/commit_success.txt$", file.url) for file in Remote(sys.argv[1]).files())
print(max((int(step[1]) for step in found if step), default=""))'
newest() {
  case $workdir in
    *://*) "${command[0]/%jprm/python}" -c "$in_bucket" "$workdir/checkpoints" ;;
    *) find "$workdir/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' 2> /dev/null | sed 's|.*/||' | sort -n | tail -n 1 ;;
  esac
}
child=0 stopped=0 idle=0
trap 'stopped=1; [ "$child" = 0 ] || kill -TERM "$child"' TERM
while true; do
  before=$(newest)
  "${command[@]}" > >(tee -a "$log") 2>&1 9>&- &
  child=$!
  wait "$child"; status=$?
  while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done # a signal ends the first wait
  child=0
  now=$(newest)
  if [ "$now" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "$(date -u +%FT%TZ) $(hostname): status $status, newest checkpoint $now" | tee -a "$log"
  case $status in
    0 | 2 | 130) exit "$status" ;;
  esac
  [ "$stopped" = 1 ] && exit "$status" # SIGTERM came to this host
  if [ "$idle" -ge "${RETRIES:-5}" ]; then
    echo "error: $idle starts in a row without a new checkpoint: $log says why" >&2
    exit "$status"
  fi
  sleep "${PAUSE:-30}"
done
