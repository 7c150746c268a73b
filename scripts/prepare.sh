#!/bin/sh
# Makes the environment that make demo runs in: sh scripts/prepare.sh FOLDER
# With "checks" as second word it adds the other packages of make check.
# With "tests" it then adds what make test alone needs: Horovod, compiled once, in that environment; torchvision, beside
# it; tshark, Slurm, sshd, Prometheus, shellcheck and, on Debian, Chromium.
# System tools are installed where this is root on Debian or Ubuntu; elsewhere one line says what to install.
set -eu
folder=$1
part=${2:-demo}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "ringtap needs Python 3.10 or later; $("$python" --version) is $python" >&2
    exit 2
}

# tool:package
missing=""
case $part in
demo) tools="ip:iproute2 tc:iproute2 iperf3:iperf3 tcpdump:tcpdump" ;;
checks) tools="" ;;
tests)
    tools="c++:g++ make:make tshark:tshark capinfos:wireshark-common shellcheck:shellcheck"
    tools="$tools prometheus:prometheus promtool:prometheus"
    tools="$tools slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge sshd:openssh-server ssh:openssh-client"
    # elsewhere it has another name or is a snap; without it, its test is skipped
    ! grep -qs '^ID=debian' /etc/os-release || tools="$tools chromium:chromium firefox-esr:firefox-esr"
    ;;
*)
    echo "prepare.sh FOLDER [checks | tests]; $part is neither" >&2
    exit 2
    ;;
esac
for pair in $tools; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
if [ "$part" = tests ]; then
    header='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    "$python" -c "$header" || missing="$missing python3-dev"
fi
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
if [ -n "${missing% }" ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "Installing $missing" >&2
        apt-get update -qq
        # the tests start servers of their own: no service is to come up with its package
        policy=/usr/sbin/policy-rc.d
        if [ ! -e "$policy" ]; then
            trap 'rm -f "$policy"' EXIT
            printf '#!/bin/sh\nexit 101\n' >"$policy"
            chmod 755 "$policy"
        fi
        # two of them ask: iperf3 whether to start a service, tshark whether others may capture; both take no
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        echo "Please install: $missing(Debian, Ubuntu: sudo apt-get install $missing)" >&2
        exit 2
    fi
fi

install() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
if [ "$part" = checks ]; then
    install --require-hashes --no-deps --requirement constraints.txt
    # some packages hold files that are not for this Python
    "$folder/bin/python" -m compileall -q "$folder/lib" >/dev/null 2>&1 || true
    touch "$folder/checks"
    exit
fi
if [ "$part" = tests ]; then
    "$folder/bin/python" -m ringtap.examples.build_horovod --install
    # its wheel is for CUDA, and beside a torch without CUDA, packages that find it fail to import
    install --constraint constraints-torch.txt --no-deps --upgrade --target "$folder/torchvision" torchvision
    touch "$folder/tests"
    exit
fi

"$python" -m venv --clear "$folder"
# without bytecode, which takes longer than all the rest, but for what is imported
install --no-compile --require-hashes --no-deps --requirement constraints-demo.txt
install --no-compile --constraint constraints-torch.txt torch
install --no-deps --no-build-isolation --editable .
PYTHONDONTWRITEBYTECODE="" "$folder/bin/python" -c "import matplotlib.pyplot, numba, pandas, scipy.stats, torch.distributed"
touch "$folder/ready"
