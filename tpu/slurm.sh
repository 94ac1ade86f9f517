#!/usr/bin/env bash
# Runs on a Slurm cluster with GPUs, one process per GPU. Prints every command before running it; --dry-run only prints.
#
#   NAME=my-run NODES=4 GPUS=8 TIME=24:00:00 EXPERIMENT=experiments/x.py WORKDIR=/shared/runs/x \
#     tpu/slurm.sh [--dry-run] COMMAND [more options of sbatch, for launch]
#
#   launch   submits the batch script    status   shows the job and the newest metrics
#   script   prints the batch script     logs     follows process 0
#   stop     saves and stops (SIGTERM)   delete   cancels the job
#
# Before the time limit, and when a node is preempted, the processes get SIGTERM, save and exit with status 143. The job is
# then queued again and continues. A refusal (status 2) ends it. TASK=rl runs `jprm rl`.
#
# Every node is the job's alone, and each process gets CPUS cores (default 8). The run gets every exported JPRM_*,
# JAX_COMPILATION_CACHE_DIR and the variables that FORWARD names ("HF_HOME NCCL_DEBUG"), and ARGUMENTS ("--set steps=20").
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
#SBATCH --time=$TIME
#SBATCH --signal=TERM@${GRACE:-300}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$logs/%x.log
cd "$PWD" || exit 2
unset XLA_PYTHON_CLIENT_MEM_FRACTION # the older name: jax refuses both
export $(assigned "${environment[@]}")
srun --cpus-per-task=${CPUS:-8} --kill-on-bad-exit=1 --label $command
status=\$?
echo "\$(date -u +%FT%TZ) status \$status, restart \${SLURM_RESTART_COUNT:-0}"
case \$status in
  0 | 2 | 130) exit "\$status" ;;
esac
if [ "\${SLURM_RESTART_COUNT:-0}" -lt ${RETRIES:-1000} ]; then scontrol requeue "\$SLURM_JOB_ID"; fi
exit "\$status"
BATCH
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
  launch) shift; launch "$@" ;;
  script | status | logs | stop | delete) "$1" ;;
  *) usage ;;
esac
