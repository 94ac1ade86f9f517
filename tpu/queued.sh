#!/usr/bin/env bash
# Runs on Cloud TPU VMs through queued resources. Prints every command before running it; --dry-run only prints.
#
#   NAME=my-run PROJECT=p ZONE=us-west4-a TYPE=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite SPOT=1 \
#     EXPERIMENT=experiments/x.py WORKDIR=gs://BUCKET/runs/x tpu/queued.sh [--dry-run] COMMAND
#
#   create   requests the slice                  status   shows the request and the run
#   deploy   copies this commit to every host    logs     follows the output of process 0
#   launch   starts the run                      stop     saves and stops (SIGTERM)
#   watch    creates, deploys and launches, again after a preemption, until the run is finished; then deletes the slice
#   delete   deletes the slice, which costs money until then
#
# NFS=SERVER:/SHARE mounts a share at /shared, for a WORKDIR there in place of a bucket's.
# SLICES (default 1) slices of TYPE, joined by the data centre's network: `mesh.data` must be a multiple of SLICES.
# TASK=rl runs `jprm rl`.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
# shellcheck source=tpu/say.sh
source tpu/say.sh
[ -n "${1:-}" ] || usage
: "${NAME:?name of the slice}" "${PROJECT:?}" "${ZONE:?}" "${TYPE:?accelerator type, such as v5litepod-16}"
at=(--project="$PROJECT" --zone="$ZONE")
archive=${TMPDIR:-/tmp}/jprm-$NAME.tar.gz

everywhere() { run gcloud compute tpus queued-resources ssh "$NAME" "${at[@]}" --node=all --worker=all --command="$1"; }

first() { run gcloud compute tpus queued-resources ssh "$NAME" "${at[@]}" --node=0 --worker=0 --command="$1"; }

state() {
  if [ "$dry" = 1 ]; then echo "${STATE:-ACTIVE}"; return; fi
  gcloud compute tpus queued-resources describe "$NAME" "${at[@]}" --format='value(state.state)' 2> /dev/null || echo ABSENT
}

create() {
  : "${RUNTIME:?runtime version, such as v2-alpha-tpuv5-lite}"
  local spot=() nodes=(--node-id="$NAME")
  [ "${SPOT:-0}" = 1 ] && spot=(--spot)
  [ "${SLICES:-1}" = 1 ] || nodes=(--node-count="$SLICES" --node-prefix="$NAME")
  case "$(state)" in
    ABSENT) ;;
    SUSPENDED | SUSPENDING | FAILED) delete ;; # a preempted slice never comes back by itself
    *) [ "$dry" = 1 ] || { echo "$NAME is there: $(state)"; return; } ;;
  esac
  run gcloud compute tpus queued-resources create "$NAME" "${at[@]}" "${nodes[@]}" --accelerator-type="$TYPE" \
    --runtime-version="$RUNTIME" "${spot[@]}"
}

deploy() {
  run git archive --format=tar.gz --output="$archive" HEAD
  run gcloud compute tpus queued-resources scp "$archive" "$NAME:jprm.tar.gz" "${at[@]}" --node=all --worker=all
  everywhere "mkdir -p jprm && tar -xzf jprm.tar.gz -C jprm && jprm/tpu/setup.sh${NFS:+ --nfs $NFS}"
}

launch() {
  : "${EXPERIMENT:?}" "${WORKDIR:?in a bucket, or a folder that every host can write to}"
  local start="tpu/run.sh $EXPERIMENT $WORKDIR${ARGUMENTS:+ $ARGUMENTS}"
  everywhere "cd jprm && JPRM_COMMIT=$(git rev-parse HEAD)${TASK:+ TASK=$TASK} setsid nohup $start > run.log 2>&1 < /dev/null &"
}

status() {
  run gcloud compute tpus queued-resources describe "$NAME" "${at[@]}" --format='value(state.state)'
  case ${WORKDIR:?} in
    gs://*) first "gcloud storage cat $WORKDIR/metrics.jsonl | tail -n 1; gcloud storage ls $WORKDIR/checkpoints/" ;;
    *) first "tail -n 1 $WORKDIR/metrics.jsonl; ls $WORKDIR/checkpoints" ;;
  esac
}

logs() { first "tail -n ${LINES_OF_LOG:-50} -f jprm/run.log"; }

# shellcheck disable=SC2016 # the host expands it
stop() { everywhere 'kill -TERM "$(cat /tmp/jprm-run.pid)"'; }

delete() { run gcloud compute tpus queued-resources delete "$NAME" "${at[@]}" --force --quiet; }

ended() {
  case ${TASK:-train},${WORKDIR:?} in
    rl,gs://*) first "gcloud storage cat $WORKDIR/rl.json | grep -q '\"finished\": true'" ;;
    rl,*) first "grep -q '\"finished\": true' $WORKDIR/rl.json" ;;
    *,gs://*) first "gcloud storage ls $WORKDIR/result.json" ;;
    *) first "test -f $WORKDIR/result.json" ;;
  esac
}

watch() {
  local now started=0
  create
  while true; do
    now=$(state)
    echo "$(date -u +%FT%TZ) $NAME: $now"
    case $now in
      ACTIVE)
        if [ "$started" = 0 ]; then deploy && launch && started=1; fi
        if [ "$started" = 1 ] && ended; then echo "the run has ended"; delete; return; fi
        ;;
      SUSPENDED | SUSPENDING | FAILED | ABSENT) started=0; create || true ;;
    esac
    sleep "${EVERY:-60}"
  done
}

case "${1:-}" in
  create | deploy | launch | status | watch | logs | stop | delete) "$1" ;;
  *) usage ;;
esac
