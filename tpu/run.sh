#!/usr/bin/env bash
# Trains on this host as one process of a run, and restarts after a stop. Launchers run this on every host. With TASK=rl it
# runs `jprm rl` in place of `jprm train`.
#
#   tpu/run.sh [--dry-run] EXPERIMENT.py WORKDIR [more arguments of `jprm train`]
#   tpu/run.sh --state      prints what this host does: running, idle, or ended STATUS
#
# A refusal (status 2), Ctrl-C (130) and the end of the run (0) are final. Anything else, such as a preemption (143) or a
# dead host, restarts after PAUSE seconds from the checkpoint, until RETRIES starts in a row bring no new checkpoint.
# DISTRIBUTED (default auto) is the value of --distributed, "" for one process. Output goes to WORKDIR/logs/ too, or to
# logs/ here where WORKDIR is a bucket's (gs://BUCKET/RUN). The final status goes to WORKDIR/status/HOST with the
# last lines of the output, since a launcher then deletes the host.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

lock=${TMPDIR:-/tmp}/jprm-run.lock
if [ "${1:-}" = --state ]; then
  # A reboot leaves neither a process nor a record of its end: the host is idle, and the run may be launched again.
  # The kernel's list, since trying the lock could keep a start from getting it.
  if [ -e "$lock" ] && grep -q "FLOCK.*:$(stat --format %i "$lock") " /proc/locks; then state=running
  elif [ -s run.ended ]; then state="ended $(cat run.ended)"
  else state=idle; fi
  echo "jprm-host $(hostname) $state"
  exit 0
fi

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
exec 9> "$lock"
flock --nonblock 9 || { echo "error: tpu/run.sh runs on this host already" >&2; exit 2; }
echo $$ > "${TMPDIR:-/tmp}/jprm-run.pid" # read by `stop`
mkdir -p "$logs"
exec 8> >(tee -a "$log")
writer=$!
in_bucket='
import re, sys
from jprm.io.storage import Remote
found = (re.search(r"/(\d+)/commit_success.txt$", file.url) for file in Remote(sys.argv[1]).files())
print(max((int(step[1]) for step in found if step), default=""))'
newest() {
  case $workdir in
    *://*) "${command[0]/%jprm/python}" -c "$in_bucket" "$workdir/checkpoints" ;;
    *) find "$workdir/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' 2> /dev/null | sed 's|.*/||' | sort -n | tail -n 1 ;;
  esac
}
write='import sys; from jprm.io.storage import Remote; Remote(sys.argv[1]).write_bytes(sys.stdin.buffer.read())'
record() { # writes what it reads to WORKDIR/status/HOST
  local file
  file=$workdir/status/$(hostname)
  case $workdir in
    *://*) "${command[0]/%jprm/python}" -c "$write" "$file" ;;
    *) mkdir -p "${file%/*}" && cat > "$file" ;;
  esac || echo "warning: $file could not be written" >&2
}
finish() {
  # SIGTERM that `stop` did not send is a preemption's or a reboot's: the host then counts as idle.
  if [ "$stopped" = 0 ] || [ -e run.stop ]; then echo "$1" > run.ended; fi
  exec 8>&-
  for ((i = 0; i < 50; i++)); do # until all output is in the log
    kill -0 "$writer" 2> /dev/null || break
    sleep 0.1
  done
  { echo "$(date -u +%FT%TZ) $(hostname): status $1, $2"; tail -n 50 "$log"; } | record
  exit "$1"
}
rm -f run.ended run.stop
echo "$(date -u +%FT%TZ) $(hostname): started" | record
child=0 stopped=0 idle=0
trap 'stopped=1; [ "$child" = 0 ] || kill -TERM "$child"' TERM
while true; do
  before=$(newest)
  "${command[@]}" >&8 2>&1 8>&- 9>&- &
  child=$!
  [ "$stopped" = 0 ] || kill -TERM "$child" # the signal came before there was a child
  wait "$child"; status=$?
  while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done # a signal ends the first wait
  child=0
  now=$(newest)
  if [ "$now" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "$(date -u +%FT%TZ) $(hostname): status $status, newest checkpoint $now" >&8
  case $status in
    0) finish 0 "the run is finished" ;;
    2) finish 2 "refused: starting again would not help" ;;
    130) finish 130 "Ctrl-C" ;;
  esac
  [ "$stopped" = 1 ] && finish "$status" "SIGTERM came to this host"
  if [ "$idle" -ge "${RETRIES:-5}" ]; then
    echo "error: $idle starts in a row without a new checkpoint: $log says why" >&2
    finish "$status" "$idle starts in a row brought no new checkpoint"
  fi
  sleep "${PAUSE:-30}"
  [ "$stopped" = 1 ] && finish 143 "SIGTERM came to this host between two starts"
done
