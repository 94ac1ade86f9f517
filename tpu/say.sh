# shellcheck shell=bash
# Sourced by the launchers: `run COMMAND ...` prints a command and runs it unless dry=1; `usage` prints the script's first
# comment and exits; `takes_none` and `takes_options` refuse words; `forward` collects what every process of the run gets.
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

# Refuses words behind a command that takes none.
takes_none() {
  [ $# -le 1 ] || { echo "error: $1 takes no option, and was given ${*:2}" >&2; exit 2; }
}

# Refuses words behind a command that takes options of another program if the first is no option, and --dry-run there.
takes_options() {
  case ${2:--} in -*) ;; *) echo "error: $1 takes options, and $2 is none" >&2; exit 2 ;; esac
  case " ${*:2} " in *" --dry-run "*) echo "error: --dry-run goes before $1" >&2; exit 2 ;; esac
}

# Fills `environment` with NAME=VALUE for every exported JPRM_* but the key of a server, for JAX_COMPILATION_CACHE_DIR, and
# for the names in FORWARD; and `arguments` with the words of ARGUMENTS, which may be quoted.
forward() {
  local name names words
  # shellcheck disable=SC2034 # the launchers use them
  environment=() arguments=()
  names=$(compgen -e | grep -xE 'JPRM_.*|JAX_COMPILATION_CACHE_DIR' | grep -vxE 'JPRM_API_KEY|JPRM_COMMIT' || true)
  for name in $names ${FORWARD:-}; do
    [ -n "${!name+set}" ] || { echo "error: FORWARD names $name, which is not set" >&2; exit 2; }
    environment+=("$name=${!name}")
  done
  if [ -n "${ARGUMENTS:-}" ]; then
    words=$(xargs printf '%s\n' <<< "$ARGUMENTS") || { echo "error: ARGUMENTS: a quote is not closed" >&2; exit 2; }
    # shellcheck disable=SC2034
    mapfile -t arguments <<< "$words"
  fi
  names=$(grep -soE '\bJPRM_[A-Z_]+' "${EXPERIMENT:?}" | sort -u || true)
  for name in $names; do
    [ -n "${!name+set}" ] || echo "note: $EXPERIMENT reads $name, which is not set here" >&2
  done
}

# Sets `rate`, what CHIPS chips or GPUs cost an hour, where SPEND limits what a run may cost; PRICE is that of one for an
# hour, as in your contract.
price() {
  rate=""
  [ -n "${SPEND:-}" ] || return 0
  rate=$(awk -v spend="$SPEND" -v price="${PRICE:-}" -v chips="$1" 'BEGIN {
    number = "^[0-9]+(\\.[0-9]+)?$"
    if (spend !~ number || price !~ number || spend * price == 0) exit 1
    printf "%.6f", price * chips }') ||
    { echo "error: SPEND=$SPEND needs PRICE, what a chip or GPU costs an hour; both positive numbers" >&2; exit 2; }
}

# Whether so many seconds of what costs `rate` an hour are all that SPEND allows.
spent() { [ -n "${rate:?}" ] && awk -v s="$1" -v rate="$rate" -v spend="$SPEND" 'BEGIN { exit !(s / 3600 * rate >= spend) }'; }

# The words, each quoted for a shell.
quoted() {
  local word text=""
  for word in "$@"; do text+="${text:+ }$(printf %q "$word")"; done
  echo "$text"
}

# NAME=VALUE words, each value quoted for a shell.
assigned() {
  local word text=""
  for word in "$@"; do text+="${text:+ }${word%%=*}=$(printf %q "${word#*=}")"; done
  echo "$text"
}
