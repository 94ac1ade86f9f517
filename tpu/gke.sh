#!/usr/bin/env bash
# Runs on GKE: as a JobSet through kubectl, in a queue of Kueue where one is named. Prints every command before running
# it; --dry-run only prints.
#
#   NAME=my-run IMAGE=REGION-docker.pkg.dev/P/R/jprm:TAG ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=4x4 HOSTS=4 CHIPS=4 \
#     ACCOUNT=jprm EXPERIMENT=experiments/x.py WORKDIR=gs://BUCKET/runs/x tpu/gke.sh [--dry-run] COMMAND
#
#   build    builds and pushes this commit's image      launch   applies the JobSet
#   status   shows the JobSet and its pods              logs     follows process 0
#   stop     saves and stops (SIGTERM to the pods)      delete   deletes the JobSet, not the cluster's nodes
#   manifest prints the JobSet                          submit   runs through Cluster Toolkit (gcluster job submit)
#
# HOSTS x CHIPS is the number of chips in TOPOLOGY. SLICES (default 1) such slices; SPOT=1 uses spot nodes. ACCOUNT is a
# Kubernetes service account that may read and write the bucket. CLAIM is a volume claim, mounted at MOUNT (default
# /shared), for a WORKDIR there in place of a bucket's. QUEUE is a LocalQueue of Kueue, which starts the run when its quota
# allows, and PRIORITY one of its workload priority classes; tpu/kueue.yaml has queues for two teams. HOURS ends the run
# after so much time in a queue's quota, or without one each of its starts; SPEND with PRICE (of a chip for an hour, in your
# currency) sets HOURS. TASK=rl runs `jprm rl`. `submit` takes COMPUTE (Cluster Toolkit's compute type, such as
# v6e-16), CLUSTER and LOCATION in place of ACCELERATOR, HOSTS and CHIPS.
#
# The run gets every exported JPRM_*, the variables that FORWARD names ("LIBTPU_INIT_ARGS"), and ARGUMENTS ("--set
# steps=20"). Compiled programs are kept in JAX_COMPILATION_CACHE_DIR (default WORKDIR/compiled), since a pod loses its
# disk whenever it restarts.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
# shellcheck source=tpu/say.sh
source tpu/say.sh
[ -n "${1:-}" ] || usage
: "${NAME:?name of the run}"

manifest() {
  : "${IMAGE:?}" "${ACCELERATOR:?}" "${TOPOLOGY:?}" "${HOSTS:?}" "${CHIPS:?}" "${EXPERIMENT:?}" "${WORKDIR:?}"
  local deadline="" hours seconds spot="" account="" mounts="" volumes="" queue="" suspend="
  suspend: false" variables="" words="" each
  forward
  hours=$(limit "$((HOSTS * CHIPS * ${SLICES:-1}))")
  seconds=$(awk -v hours="${hours:-0}" 'BEGIN { printf "%d", hours * 3600 }')
  [ -n "${JAX_COMPILATION_CACHE_DIR:-}" ] || environment+=("JAX_COMPILATION_CACHE_DIR=$WORKDIR/compiled")
  for each in "${environment[@]}"; do
    variables+="
                    - name: ${each%%=*}
                      value: $(scalar "${each#*=}")"
  done
  for each in jprm "${TASK:-train}" "$EXPERIMENT" --workdir "$WORKDIR" --distributed auto "${arguments[@]}"; do
    words+="${words:+, }$(scalar "$each")"
  done
  # Kueue suspends and resumes the JobSet itself.
  [ -n "${QUEUE:-}" ] && suspend="" && queue="
  labels:
    kueue.x-k8s.io/queue-name: $(scalar "$QUEUE")${PRIORITY:+
    kueue.x-k8s.io/priority-class: $(scalar "$PRIORITY")}"
  if [ "$seconds" != 0 ]; then
    if [ -n "${QUEUE:-}" ]; then
      queue+="
    kueue.x-k8s.io/max-exec-time-seconds: '$seconds'"
    else
      deadline="
          activeDeadlineSeconds: $seconds"
    fi
  fi
  [ "${SPOT:-0}" = 1 ] && spot='
                cloud.google.com/gke-spot: "true"'
  [ -n "${ACCOUNT:-}" ] && account="
              serviceAccountName: $ACCOUNT"
  [ -n "${CLAIM:-}" ] && mounts='
                  volumeMounts:
                    - name: shared
                      mountPath: '"${MOUNT:-/shared}" && volumes="
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: $CLAIM"
  cat << YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME$queue
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:$suspend
  # A failed pod restarts the JobSet, which continues from the checkpoint; a refusal (status 2) and a deadline end it.
  failurePolicy:
    maxRestarts: ${RETRIES:-1000}
    rules:
      - name: refused
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy, DeadlineExceeded]
  replicatedJobs:
    - name: slice
      replicas: ${SLICES:-1}
      template:
        spec:
          completionMode: Indexed
          parallelism: $HOSTS
          completions: $HOSTS
          backoffLimit: 0$deadline
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: jprm
                  operator: In
                  values: [2]
          template:
            spec:
              restartPolicy: Never$account
              terminationGracePeriodSeconds: ${GRACE:-300}
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
                cloud.google.com/gke-tpu-topology: $TOPOLOGY$spot
              containers:
                - name: jprm
                  image: $IMAGE
                  command: [$words]
                  env:$variables
                  ports:
                    - containerPort: 8471
                  resources:
                    requests:
                      google.com/tpu: "$CHIPS"
                    limits:
                      google.com/tpu: "$CHIPS"$mounts$volumes
YAML
}

# The hours that a run on so many chips may take by HOURS and by SPEND; nothing where neither is set.
limit() {
  price "$1"
  [ -n "$rate" ] || { echo "${HOURS:-}"; return; }
  awk -v hours="${HOURS:-1e9}" -v most="$(awk "BEGIN { print $SPEND / $rate }")" \
    'BEGIN { print (hours + 0 < most + 0 ? hours : most) }'
}

scalar() { local quote="'"; echo "'${1//$quote/$quote$quote}'"; } # a YAML string

build() {
  : "${IMAGE:?}"
  local command=(docker build --file tpu/Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" --tag "$IMAGE" -)
  echo "+ git archive HEAD | ${command[*]}"
  if [ "$dry" = 0 ]; then git archive HEAD | "${command[@]}"; fi
  run docker push "$IMAGE"
}

launch() {
  if [ "$dry" = 1 ]; then manifest; fi
  echo "+ tpu/gke.sh manifest | kubectl apply --filename -"
  if [ "$dry" = 0 ]; then manifest | kubectl apply --filename -; fi
}

# Cluster Toolkit makes a JobSet of its own, in the queue; --dry-run only prints the command.
submit() {
  : "${IMAGE:?}" "${COMPUTE:?}" "${CLUSTER:?}" "${LOCATION:?}" "${EXPERIMENT:?}" "${WORKDIR:?}"
  forward
  [ -n "${JAX_COMPILATION_CACHE_DIR:-}" ] || environment+=("JAX_COMPILATION_CACHE_DIR=$WORKDIR/compiled")
  run gcluster job submit --name "$NAME" --cluster "$CLUSTER" --location "$LOCATION" ${PROJECT:+--project "$PROJECT"} \
    --image "$IMAGE" --compute-type "$COMPUTE" ${TOPOLOGY:+--topology "$TOPOLOGY"} --num-slices "${SLICES:-1}" \
    ${QUEUE:+--queue "$QUEUE"} --command "env $(assigned "${environment[@]}") \
$(quoted jprm "${TASK:-train}" "$EXPERIMENT" --workdir "$WORKDIR" --distributed auto "${arguments[@]}")"
}

status() {
  run kubectl get jobset "$NAME"
  run kubectl get pods --selector "jobset.sigs.k8s.io/jobset-name=$NAME" --output wide
}

logs() {
  local zero="jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/job-index=0"
  zero+=",batch.kubernetes.io/job-completion-index=0"
  run kubectl logs --follow --tail 50 --selector "$zero" --container jprm
}

# A suspended JobSet deletes its pods, which have GRACE seconds to save; launch resumes it. Kueue would resume it itself, so
# a queued JobSet is deleted; launch queues it again.
stop() {
  if [ -n "${QUEUE:-}" ]; then delete; else
    run kubectl patch jobset "$NAME" --type merge --patch '{"spec":{"suspend":true}}'
  fi
}

delete() { run kubectl delete jobset "$NAME"; }

case "${1:-}" in
  build | launch | submit | status | logs | stop | delete | manifest) takes_none "$@"; "$1" ;;
  *) usage ;;
esac
