# shellcheck shell=bash
# Sourced by the scripts beside it: `run COMMAND ...` prints a command as one would type it, and runs it unless dry=1;
# `usage` prints the comment that the script begins with, and ends it.
run() {
  local word line="+"
  for word in "$@"; do
    if [[ $word =~ ^[][A-Za-z0-9_./:=@%+,-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
  done
  echo "$line"
  [ "${dry:?}" = 1 ] || "$@"
}

usage() {
  sed -n '2,/^set/p' "tpu/$(basename "$0")" | grep '^#' >&2
  exit 2
}
