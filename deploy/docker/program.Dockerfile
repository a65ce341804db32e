# The image with a program of one's own, and what that needs. In the program's folder, which has a
# pyproject.toml as `bbnode new` writes it:
#
#   docker build -f PATH/TO/bbnode/deploy/docker/program.Dockerfile -t mine .
#
# Rule: what runs has neither pip nor compilers. What installs is in a stage that is left behind, and
# installs into the environment of the image that it was copied from.

# What it is made from, and the base that that one was made from: they share a Python.
ARG IMAGE=bbnode
ARG BASE=debian:bookworm-slim

FROM ${IMAGE} AS bbnode

FROM ${BASE} AS program
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=bbnode /opt/bbnode /opt/bbnode
COPY . /src
# More packages than pyproject.toml names, as "bbnode[tables]".
ARG PACKAGES=""
# The override is that of the image: pip would compile what it was made without.
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir --disable-pip-version-check uv
RUN echo 'fastecdsa>=4' | /uv/bin/uv pip install --no-cache --compile-bytecode --override - \
        --python /opt/bbnode/bin/python /src ${PACKAGES}

FROM bbnode
COPY --from=program /opt/bbnode /opt/bbnode
