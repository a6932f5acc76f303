# Paceline with JupyterLab, for CPUs, and for GPUs where torch is built for them.
#
#   docker build -t paceline .
#   docker run --rm -it -p 8888:8888 paceline
#   docker run --rm -v "$PWD:/mnt" -w /mnt paceline torchrun --nproc-per-node 2 train.py
#
# Ranks share memory by memfd, which no /dev/shm limits: Paceline needs neither
# --shm-size nor --ipc=host.  (torch's DataLoader with workers still uses /dev/shm.)
#
# On GPUs (docker run --gpus all; not tried on one yet): PyPI's torch brings NCCL, and
# NVRTC, which compiles our kernels when the first GPU is used, for there is no nvcc here.
# An image that has nvcc builds them in; nvcc needs g++ beside gcc.

FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# The torch that the tests run with.  Give the address of an index with CPU builds as
# PIP_EXTRA_INDEX_URL to save gigabytes; ARG keeps it out of the image.
ARG TORCH_VERSION=2.13.0
ARG PIP_EXTRA_INDEX_URL=""
ARG PIP_NO_CACHE_DIR=1
RUN pip install "torch==${TORCH_VERSION}"

COPY . /opt/paceline
RUN pip install "torch==${TORCH_VERSION}" "/opt/paceline[demo,notebook]" \
 && rm -rf /opt/paceline

RUN useradd --create-home user
USER user
WORKDIR /home/user
COPY --chown=user notebook[s] ./notebooks

EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]
