# shellcheck shell=bash
# Sourced by the other scripts: `run COMMAND ...` prints a command and runs it unless dry=1; `usage` prints the script's
# first comment and exits.
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
