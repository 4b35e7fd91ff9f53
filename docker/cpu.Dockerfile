# The CPU build: quickstart and tests on any 64-bit Linux machine.
#   docker build -f docker/cpu.Dockerfile -t rlhf-ray:cpu .
#   docker run --rm --init --shm-size=2g -v "$PWD/runs:/app/runs" rlhf-ray:cpu quickstart
FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1 AS base

# Debian keeps one version of a package a release, so a pinned one vanishes with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ procps && rm -rf /var/lib/apt/lists/*

FROM base AS build

RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /app
# Dependencies come first, so that a change of the project's code does not rebuild their layer.
COPY requirements/cpu.txt requirements/cpu.txt
RUN uv venv --python "$(command -v python3.11)" /opt/venv && \
    VIRTUAL_ENV=/opt/venv uv pip install --no-cache --torch-backend=cpu --no-deps --require-hashes -r requirements/cpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY rlhf_ray rlhf_ray
RUN uv build --wheel --out-dir /dist .

# g++ (in base): torch.compile and DeepSpeed build small kernels on first use. procps: Ray's dashboard agent.
FROM base

RUN useradd --create-home --uid 1000 trainer && mkdir -p /app/runs && chown trainer:trainer /app /app/runs
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,from=build,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
    uv pip install --no-cache --no-deps /dist/*.whl
WORKDIR /app
COPY configs configs
USER 1000
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s CMD ["rlhf-ray", "doctor"]
ENTRYPOINT ["rlhf-ray"]
CMD ["--help"]
