#!/usr/bin/env bash
# A queued resource is the file `slice` with its state; its hosts are folders, which are empty after every `create`, and
# can be reached while the state is ACTIVE.
cd "$STUB" || exit 1
verb=$4 command="" all=0
for word in "$@"; do
  case $word in --command=*) command=${word#--command=} ;; --worker=all) all=1 ;; esac
done
echo "$verb" >> calls
if [ -s "fail-$verb" ]; then # the next lines of failures; an empty line is a success
  line=$(head -n 1 "fail-$verb"); sed -i 1d "fail-$verb"
  [ -z "$line" ] || { echo "ERROR: (gcloud.compute.tpus.queued-resources.$verb) $line" >&2; exit 1; }
fi
reached() {
  grep -qx ACTIVE slice && return
  echo "ERROR: (gcloud.compute.tpus.queued-resources.$verb) the slice is not ACTIVE" >&2; exit 1
}
missing() { echo "ERROR: (gcloud.compute.tpus.queued-resources.$verb) NOT_FOUND: Resource 'my-run'" >&2; exit 1; }
case $verb in
  create)
    echo ACTIVE > slice
    for host in ${HOSTS:-h0 h1}; do mkdir -p "hosts/$host"; done
    if [ "$(grep -c create calls)" = 2 ]; then git -C checkout commit -q --allow-empty -m later; fi ;;
  describe) [ -e slice ] || missing; cat slice ;;
  delete) # what ran on its hosts may still write there
    [ -e slice ] || missing
    rm slice; mv hosts "hosts.$(wc -l < calls)" ;;
  scp) reached; for host in hosts/*; do cp "$5" "$host/jprm.tar.gz"; done ;;
  ssh)
    reached; status=0
    for host in hosts/*; do
      [ "$all" = 1 ] || [ "$host" = hosts/h0 ] || continue
      ( cd "$host" && export HOST_NAME=${host#hosts/} TMPDIR=$PWD &&
        bash -c "${command//\/tmp\/jprm-run/$PWD\/jprm-run}" ) || status=$?
    done
    exit "$status" ;;
esac
