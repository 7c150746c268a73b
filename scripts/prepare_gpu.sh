#!/bin/sh
# Makes the environment that make test-gpu runs in: sh scripts/prepare_gpu.sh FOLDER
# A torch with CUDA that PYTHON has is used, with all that is beside it; pip installs only what is missing. Otherwise pip
# installs torch, which is several GB. A machine without a network takes wheels from a folder: PIP_NO_INDEX=1
# PIP_FIND_LINKS=wheels make test-gpu
set -eu
folder=$1
python=${PYTHON:-python3}
packages="psutil pyroute2 numpy pandas numba scipy pyarrow zstandard pyparsing protobuf perfetto nvidia-ml-py"
packages="$packages pytest pytest-timeout pytest-xdist hypothesis"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "ringtap needs Python 3.10 or later; $("$python" --version) is $python" >&2
    exit 2
}
"$python" -m venv --clear --without-pip "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pwd >"$site/beside.pth"
if found=$("$python" -c 'import torch; print(*([*torch.__path__] if torch.version.cuda else []))' 2>/dev/null) &&
    [ -n "$found" ]; then
    # a virtual environment may itself hold it, which --system-site-packages would not see
    dirname "$found" >>"$site/beside.pth"
    torch=""
else
    torch="torch --constraint constraints-torch.txt"
fi
"$python" -m pip --version >/dev/null 2>&1 || {
    echo "$python has no pip: install it (Debian, Ubuntu: python3-pip)" >&2
    exit 2
}
# shellcheck disable=SC2086
"$python" -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check $packages $torch
