#!/usr/bin/env bash
# Runs on a Slurm cluster with GPUs, one process per GPU. Prints every command before running it; --dry-run only prints.
#
#   NAME=my-run NODES=4 GPUS=8 TIME=24:00:00 EXPERIMENT=experiments/x.py WORKDIR=/shared/runs/x \
#     tpu/slurm.sh [--dry-run] COMMAND [more options of sbatch, for launch]
#
#   launch   submits the batch script    status   shows the job and the newest metrics
#   script   prints the batch script     logs     follows process 0
#   stop     saves and stops (SIGTERM)   delete   cancels the job
#   array    submits SHARDS tasks of a command that takes --shard, each on a node's GPU of its own:
#            NAME=scores SHARDS=64 AT_ONCE=16 TIME=4:00:00 WORKDIR=/shared/scores tpu/slurm.sh array score --model M ...
#
# Before the time limit, and when a node is preempted, the processes get SIGTERM, save and exit with status 143. The job is
# then queued again and continues. A refusal (status 2) ends it. TASK=rl runs `jprm rl`.
#
# Every node is the job's alone, and each process gets CPUS cores (default 8). The run gets every exported JPRM_*,
# JAX_COMPILATION_CACHE_DIR and the variables that FORWARD names ("HF_HOME NCCL_DEBUG"), and ARGUMENTS ("--set steps=20").
# With SPEND and PRICE (of a GPU for an hour, in your currency) a job is not queued again once its runs have cost SPEND, and
# no run may take longer than SPEND allows.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
# shellcheck source=tpu/say.sh
source tpu/say.sh
[ -n "${1:-}" ] || usage
: "${NAME:?name of the job}" "${WORKDIR:?in a gs:// bucket, or a folder that every node can write to}"
case $WORKDIR in *://*) logs=$PWD/logs ;; *) logs=$WORKDIR/logs ;; esac

script() {
  : "${NODES:?}" "${GPUS:?a node}" "${TIME:?}" "${EXPERIMENT:?}"
  forward
  local time=$TIME ledger=$logs/$NAME.seconds check="" before=""
  price $((NODES * GPUS))
  if [ -n "$rate" ]; then
    time=$(awk -v rate="$rate" -v spend="$SPEND" 'BEGIN { printf "%d", spend / rate * 60 }') # minutes
    time=$(shorter "$TIME" "$time")
    before="
before=\$(cat $(quoted "$ledger") 2> /dev/null || echo 0) SECONDS=0"
    check="
echo \"\$((before + SECONDS))\" > $(quoted "$ledger")
if awk -v s=\"\$((before + SECONDS))\" 'BEGIN { exit !(s / 3600 * $rate >= $SPEND) }'; then
  echo \"SPEND=$SPEND is spent\"; exit \"\$status\"
fi"
  fi
  # jax takes 75 % of a GPU's memory by default; plans are for 92 %.
  environment+=("XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}}")
  local command
  command=$(quoted .venv/bin/jprm "${TASK:-train}" "$EXPERIMENT" --workdir "$WORKDIR" --distributed auto "${arguments[@]}")
  cat << BATCH
#!/usr/bin/env bash
#SBATCH --job-name=$NAME
#SBATCH --nodes=$NODES
#SBATCH --ntasks-per-node=$GPUS
#SBATCH --gpus-per-node=$GPUS
#SBATCH --cpus-per-task=${CPUS:-8}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=$time
#SBATCH --signal=TERM@${GRACE:-300}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$logs/%x.log
cd "$PWD" || exit 2
unset XLA_PYTHON_CLIENT_MEM_FRACTION # the older name: jax refuses both
export $(assigned "${environment[@]}")$before
srun --cpus-per-task=${CPUS:-8} --kill-on-bad-exit=1 --label $command
status=\$?
echo "\$(date -u +%FT%TZ) status \$status, restart \${SLURM_RESTART_COUNT:-0}"
case \$status in
  0 | 2 | 130) exit "\$status" ;;
esac$check
if [ "\${SLURM_RESTART_COUNT:-0}" -lt ${RETRIES:-1000} ]; then scontrol requeue "\$SLURM_JOB_ID"; fi
exit "\$status"
BATCH
}

# The shorter one of a time limit in Slurm's notation and a number of minutes.
shorter() {
  awk -v time="$1" -v most="$2" 'BEGIN {
    days = split(time, parts, "-") > 1 ? parts[1] : 0
    n = split(parts[days ? 2 : 1], t, ":")
    if (days) minutes = days * 1440 + t[1] * 60 + t[2]
    else minutes = n == 3 ? t[1] * 60 + t[2] + t[3] / 60 : t[1] + t[2] / 60
    print (minutes <= most ? time : most) }'
}

# An array's task has the index that `--shard auto` reads. A task that is requeued continues its shard.
array_script() {
  : "${SHARDS:?how many}" "${TIME:?}"
  EXPERIMENT=${EXPERIMENT:-/dev/null} forward
  environment+=("XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92}")
  cat << BATCH
#!/usr/bin/env bash
#SBATCH --job-name=$NAME
#SBATCH --array=0-$((SHARDS - 1))${AT_ONCE:+%$AT_ONCE}
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=${GPUS:-1}
#SBATCH --cpus-per-task=${CPUS:-8}
#SBATCH --time=$TIME
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$logs/%x_%a.log
cd "$PWD" || exit 2
unset XLA_PYTHON_CLIENT_MEM_FRACTION # the older name: jax refuses both
export $(assigned "${environment[@]}")
exec $(quoted .venv/bin/jprm "$@" --shard auto)
BATCH
}

array() {
  case ${1:--} in -*) echo "error: array: name a command that takes --shard, e.g. score --model M" >&2; exit 2 ;; esac
  run mkdir -p "$logs"
  if [ "$dry" = 1 ]; then array_script "$@"; return; fi
  array_script "$@" | sbatch
}

launch() {
  run mkdir -p "$logs"
  if [ "$dry" = 1 ]; then script; fi
  echo "+ tpu/slurm.sh script | sbatch $*"
  if [ "$dry" = 0 ]; then script | sbatch "$@"; fi
}

status() {
  run squeue --me --name "$NAME"
  case $WORKDIR in
    gs://*) run gcloud storage cat --range=-500 "$WORKDIR/metrics.jsonl" ;;
    *) run tail -n 1 "$WORKDIR/metrics.jsonl" ;;
  esac
}

logs() { run tail -n 50 -f "$logs/$NAME.log"; }

stop() { run scancel --signal=TERM --name "$NAME" --me; }

delete() { run scancel --name "$NAME" --me; }

case "${1:-}" in
  launch) takes_options "$@"; "$@" ;;
  array) "$@" ;;
  script | status | logs | stop | delete) takes_none "$@"; "$1" ;;
  *) usage ;;
esac
