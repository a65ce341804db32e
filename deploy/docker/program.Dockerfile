# The image with a program of one's own, and what that needs. In the program's folder, which has a
# pyproject.toml as `bbnode new` writes it:
#
#   docker build -f PATH/TO/bbnode/deploy/docker/program.Dockerfile -t mine .
#
# Rule: what runs has neither pip nor compilers. They are in a stage that is left behind, whose pip
# installs into the environment of the image that it was copied from.

# What it is made from, and the base that that one was made from: they share a Python.
ARG IMAGE=bbnode
ARG BASE=debian:bookworm-slim

FROM ${IMAGE} AS bbnode

FROM ${BASE} AS program
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pip \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=bbnode /opt/bbnode /opt/bbnode
COPY . /src
# More packages than pyproject.toml names, as "bbnode[tables]".
ARG PACKAGES=""
RUN python3 -m pip --python /opt/bbnode/bin/python install --no-cache-dir \
        --disable-pip-version-check /src ${PACKAGES}

FROM bbnode
COPY --from=program /opt/bbnode /opt/bbnode
