# syntax=docker/dockerfile:1
# jprm on one machine: training, scoring and serving.
#
#   docker build --tag jprm .                                   for CPUs
#   docker build --tag jprm:cuda --build-arg EXTRA=cuda .       for NVIDIA GPUs: the driver alone comes from the host
#
# docs/serving.md has the commands that run it. Pods' image is tpu/Dockerfile.

FROM python:3.11-slim AS build
ARG EXTRA=""
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/jprm && \
    /opt/jprm/bin/pip install -c constraints.txt ".[train,serve,parquet${EXTRA:+,$EXTRA}]"

FROM python:3.11-slim
# Any user may run it (docker run --user), and keep compiled programs and downloads at home.
RUN useradd --create-home --uid 1000 jprm && chmod 1777 /home/jprm
COPY --from=build /opt/jprm /opt/jprm
ENV HOME=/home/jprm PATH=/opt/jprm/bin:$PATH
# What NVIDIA's container toolkit gives a container; nothing without it.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["jprm"]
CMD ["--help"]
