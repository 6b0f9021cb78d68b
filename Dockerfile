# fedproto with Flower on CPUs: for a federation's server and for its members (docs/docker.md).
FROM python:3.12-slim-bookworm AS build
# torch alone comes from this index: wheels for CPUs, a tenth of the size of those for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/fedproto \
    && /opt/fedproto/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY fedproto fedproto
RUN /opt/fedproto/bin/pip install --no-cache-dir -c constraints.txt ".[flower,privacy]"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/fedproto /opt/fedproto
RUN useradd --uid 1000 --no-create-home --shell /usr/sbin/nologin fedproto
ENV PATH=/opt/fedproto/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
USER 1000:1000
WORKDIR /deployment
CMD ["fedproto", "--help"]
