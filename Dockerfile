# Paceline with JupyterLab, SSH and the lessons.  docs/image.md says how to use it.
#
#   docker build -t paceline .                                               CUDA
#   docker build -t paceline --build-arg BASE_IMAGE=python:3.12-slim .       without
#   docker build -t paceline --target train .          neither Jupyter nor SSH
#   docker run --rm -it -p 127.0.0.1:8888:8888 paceline                      Jupyter
#
# The base is any image of Debian or Ubuntu with Python 3.10 or later and pip.  If it has
# a torch, that torch stays, because it was built for the base's CUDA.  Otherwise pip
# installs TORCH_VERSION.
#
# The container's user is `user`, 1000:1000.  It may not own the folders that you mount.
# To give files your owner, run
#
#   docker run --user "$(id -u):$(id -g)" -v "$PWD:/home/user/work" ...
#
# or build with your numbers: --build-arg UID="$(id -u)" --build-arg GID="$(id -g)".
#
# Ranks share memory by memfd, which /dev/shm does not limit: Paceline needs neither
# --shm-size nor --ipc=host.  (torch's DataLoader with workers still uses /dev/shm.)

ARG BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

# ---- the wheel -----------------------------------------------------------------------

FROM ${BASE_IMAGE} AS build
USER root

# pip reads these; as arguments they leave no trace in the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_CACHE_DIR=1
# The container is the environment: pip may change the distribution's Python.
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_ROOT_USER_ACTION=ignore
ARG DEBIAN_FRONTEND=noninteractive

# A base with nvcc builds the kernels in; nvcc calls g++.  On other bases torch's NVRTC
# compiles them when the first GPU is used.
RUN headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
        $(test -e "$headers/Python.h" || echo python3-dev) \
        $(! command -v nvcc >/dev/null || echo g++) \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY requirements requirements
RUN python3 -m pip install -c requirements/constraints.txt setuptools numpy
# Without docs/, so that an edit there does not compile anew.
COPY pyproject.toml setup.py MANIFEST.in LICENSE README.md ./
COPY csrc csrc
COPY python python
RUN python3 -m pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

# ---- what both images have -----------------------------------------------------------

FROM ${BASE_IMAGE} AS common
USER root

LABEL org.opencontainers.image.title="Paceline" \
      org.opencontainers.image.description="Data parallelism for PyTorch" \
      org.opencontainers.image.licenses="Apache-2.0"

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_CACHE_DIR=1
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_ROOT_USER_ACTION=ignore
ARG DEBIAN_FRONTEND=noninteractive

# 1: gcc, g++ and Python's headers stay, for torch.compile.
ARG WITH_COMPILER=0

RUN headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && apt-get update \
 && apt-get install -y --no-install-recommends tini \
        $(test "$WITH_COMPILER" = 0 || echo gcc g++ libc6-dev) \
        $(test "$WITH_COMPILER" = 0 || test -e "$headers/Python.h" || echo python3-dev) \
 && rm -rf /var/lib/apt/lists/* \
 && (command -v python >/dev/null || ln -s "$(command -v python3)" /usr/local/bin/python)

# The constraints name the base's torch, so that pip cannot replace it; the other
# versions are those of `make`.
ARG TORCH_VERSION=2.13.0
COPY requirements /opt/paceline/requirements
RUN cd /opt/paceline/requirements \
 && torch=$(python3 -c 'from importlib.metadata import version; print(version("torch"))' \
        2>/dev/null || echo "$TORCH_VERSION") \
 && sed -i "s/^torch==.*/torch==$torch/" constraints.txt \
 && python3 -m pip install -c constraints.txt torch numpy cloudpickle -r tools.txt

# '*' means without a password; a locked account would keep sshd's logins out, too.  An
# account of the same name or number is removed: Ubuntu's images have a user 1000.
ARG UID=1000
ARG GID=1000
RUN test "$UID" -gt 0 \
 && for name in user $(id -un "$UID" 2>/dev/null); do \
        ! id "$name" >/dev/null 2>&1 || userdel "$name"; \
    done \
 && (getent group "$GID" >/dev/null || groupadd --gid "$GID" user) \
 && useradd --uid "$UID" --gid "$GID" --password '*' --shell /bin/bash \
        --home-dir /home/user --create-home user \
 && install -d -m 755 -o "$UID" -g "$GID" /home/user /home/user/work \
 && echo "export PATH='$PATH'" > /etc/profile.d/paceline.sh

# Also for a --user without an entry in /etc/passwd.
ENV HOME=/home/user USER=user LOGNAME=user SHELL=/bin/bash
WORKDIR /home/user
# tini passes signals on, and reaps the children of killed programs.
ENTRYPOINT ["tini", "--", "entrypoint"]

# ---- the image for training ----------------------------------------------------------

FROM common AS train
ARG PIP_NO_CACHE_DIR=1
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_ROOT_USER_ACTION=ignore
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-deps /wheels/*.whl \
 && paceline --version
COPY --chmod=755 docker/entrypoint /usr/local/bin/entrypoint
USER user
CMD ["help"]

# ---- the image with Jupyter and SSH --------------------------------------------------

FROM common
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_CACHE_DIR=1
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_ROOT_USER_ACTION=ignore
ARG DEBIAN_FRONTEND=noninteractive

# Each container makes its own host keys (docker/entrypoint); those of the package would
# be the same in every container.
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-server \
 && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
 && cd /opt/paceline/requirements \
 && python3 -m pip install -c constraints.txt -r demo.txt -r notebook.txt

# After the heavy packages, so that an edit of the sources does not install them again.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-deps /wheels/*.whl \
 && paceline --version

COPY notebooks /home/user/notebooks
COPY tests/examples /home/user/examples
RUN install -d -m 700 /home/user/.ssh /home/user/.sshd \
 && chown -R user: /home/user
COPY --chmod=644 docker/sshd_config /opt/paceline/sshd_config
COPY --chmod=755 docker/entrypoint /usr/local/bin/entrypoint

USER user
EXPOSE 8888 22
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["entrypoint", "health"]
CMD ["jupyter"]
