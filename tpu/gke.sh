#!/usr/bin/env bash
# Runs on GKE: as a JobSet through kubectl, or through xpk. Prints every command before running it; --dry-run only
# prints.
#
#   NAME=my-run IMAGE=REGION-docker.pkg.dev/P/R/jprm:TAG ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=4x4 HOSTS=4 CHIPS=4 \
#     ACCOUNT=jprm EXPERIMENT=experiments/x.py WORKDIR=gs://BUCKET/runs/x tpu/gke.sh [--dry-run] COMMAND
#
#   build    builds and pushes this commit's image      launch   applies the JobSet
#   status   shows the JobSet and its pods              logs     follows process 0
#   stop     saves and stops (SIGTERM to the pods)      delete   deletes the JobSet, not the cluster's nodes
#   manifest prints the JobSet                          xpk      runs through xpk: CLUSTER, TYPE, PROJECT, ZONE
#
# HOSTS x CHIPS is the number of chips in TOPOLOGY. SLICES (default 1) such slices; SPOT=1 uses spot nodes. ACCOUNT is a
# Kubernetes service account that may read and write the bucket. CLAIM is a volume claim, mounted at /shared, for a WORKDIR
# there in place of a bucket's. TASK=rl runs `jprm rl`.
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
  local spot="" account="" mounts="" volumes=""
  [ "${SPOT:-0}" = 1 ] && spot='
                cloud.google.com/gke-spot: "true"'
  [ -n "${ACCOUNT:-}" ] && account="
              serviceAccountName: $ACCOUNT"
  [ -n "${CLAIM:-}" ] && mounts='
                  volumeMounts:
                    - name: shared
                      mountPath: /shared' && volumes="
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: $CLAIM"
  cat << YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  suspend: false
  # A failed pod restarts the JobSet, which continues from the checkpoint; a refusal (status 2) ends it.
  failurePolicy:
    maxRestarts: ${RETRIES:-1000}
    rules:
      - name: refused
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: ${SLICES:-1}
      template:
        spec:
          completionMode: Indexed
          parallelism: $HOSTS
          completions: $HOSTS
          backoffLimit: 0
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
                  command: [jprm, ${TASK:-train}, $EXPERIMENT, --workdir, $WORKDIR, --distributed, auto]
                  ports:
                    - containerPort: 8471
                  resources:
                    requests:
                      google.com/tpu: "$CHIPS"
                    limits:
                      google.com/tpu: "$CHIPS"$mounts$volumes
YAML
}

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

status() {
  run kubectl get jobset "$NAME"
  run kubectl get pods --selector "jobset.sigs.k8s.io/jobset-name=$NAME" --output wide
}

logs() {
  local zero="jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/job-index=0"
  zero+=",batch.kubernetes.io/job-completion-index=0"
  run kubectl logs --follow --tail 50 --selector "$zero" --container jprm
}

# A suspended JobSet deletes its pods, which have GRACE seconds to save; launch resumes it.
stop() { run kubectl patch jobset "$NAME" --type merge --patch '{"spec":{"suspend":true}}'; }

delete() { run kubectl delete jobset "$NAME"; }

xpk() {
  : "${CLUSTER:?}" "${TYPE:?accelerator type, such as v5litepod-16}" "${PROJECT:?}" "${ZONE:?}" "${IMAGE:?}"
  run xpk workload create --workload "$NAME" --cluster "$CLUSTER" --project "$PROJECT" --zone "$ZONE" \
    --tpu-type "$TYPE" --num-slices "${SLICES:-1}" --docker-image "$IMAGE" --max-restarts "${RETRIES:-1000}" \
    --command "jprm ${TASK:-train} ${EXPERIMENT:?} --workdir ${WORKDIR:?} --distributed auto"
}

case "${1:-}" in
  build | launch | status | logs | stop | delete | manifest) "$1" ;;
  xpk) xpk ;;
  *) usage ;;
esac
