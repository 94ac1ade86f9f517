#!/usr/bin/env bash
# What a start does is the next line of `plan`, or the last: a status; `wait` for SIGTERM; `reboot` or, of the first
# slice alone, `preempt`, which end this host's tpu/run.sh without a trace.
trap 'echo saved; exit 143' TERM
echo "$HOST_NAME ${JPRM_COMMIT:-} ${JPRM_BASE:-} $*" >> "$STUB/starts"
does=$(sed -n "$(grep -c "^$HOST_NAME " "$STUB/starts")p" "$STUB/plan")
does=${does:-$(tail -n 1 "$STUB/plan")}
case $does in
  wait) for ((i = 0; i < 6000; i++)); do sleep 0.1; done ;;
  slow) sleep 1; exit 0 ;;
  reboot | preempt)
    if [ "$does" = preempt ]; then
      [ "$(grep -c create "$STUB/calls")" = 1 ] || exit 0 # this host was slower than the preemption
      echo SUSPENDED > "$STUB/slice"
    fi
    kill -KILL "$PPID" ;;
  *) exit "$does" ;;
esac
