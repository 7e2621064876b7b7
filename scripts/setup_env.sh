#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make or update .venv with the given groups of pyproject.toml and the patched vLLM in it.
#   bash scripts/setup_env.sh [GROUP...]        default: serve tools
# Run again it only checks a stamp. PYTHON names the interpreter (3.11 or newer). pip's own
# settings apply, for instance an extra index with CPU builds of torch (a smaller download).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- serve tools
groups=("$@")
say() { echo "setup: $*" >&2; }

mkdir -p out
if command -v flock >/dev/null; then  # two set-ups at once would disturb each other
    exec 9>out/.setup.lock
    flock 9
fi

python=.venv/bin/python
if [ ! -x .venv/bin/pip ]; then  # also when an earlier set-up was interrupted
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { say "${PYTHON:-python3} is older than 3.11: set PYTHON to a newer one"; exit 2; }
    say "making .venv"
    "${PYTHON:-python3}" -m venv .venv
fi

wanted=$(sha256sum pyproject.toml | cut -d' ' -f1)
missing=()
alone=()
for group in "${groups[@]}"; do
    [ "$(cat ".venv/setup-$group.sha256" 2>/dev/null)" != "$wanted" ] || continue
    if [ "$group" = lmcache ]; then alone=(--group lmcache); else missing+=(--group "$group"); fi
done
if [ ${#missing[@]} -gt 0 ] || [ ${#alone[@]} -gt 0 ]; then
    say "installing ${missing[*]} ${alone[*]} (the first time takes minutes)"
    # --group needs pip 25.1; later pips are not tried.
    "$python" -m pip install --quiet pip==25.3
    [ ${#missing[@]} -eq 0 ] || "$python" -m pip install --quiet "${missing[@]}"
    [ ${#alone[@]} -eq 0 ] || "$python" -m pip install --quiet --no-deps "${alone[@]}"
    if [[ " ${missing[*]} " == *" serve "* ]]; then
        # What pip resolves of this family needs CUDA libraries and breaks `import vllm`.
        "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
        say "compiling, so that each server start need not"
        "$python" -m compileall -q -j 0 .venv/lib/python3*/site-packages >/dev/null || true
    fi
    for group in "${groups[@]}"; do echo "$wanted" >".venv/setup-$group.sha256"; done
fi

if [[ " ${groups[*]} " == *" serve "* ]]; then
    "$python" tools/install_computecache.py --root "$(echo .venv/lib/python3*/site-packages)" >&2
fi
