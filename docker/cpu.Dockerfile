# The CPU build: quickstart and tests on any 64-bit Linux machine.
#   docker build -f docker/cpu.Dockerfile -t rlhf-ray:cpu .
#   docker run --rm --shm-size=2g -v "$PWD/runs:/app/runs" rlhf-ray:cpu quickstart
FROM python:3.11.13-slim-bookworm AS build

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /app
COPY requirements/cpu.txt requirements/cpu.txt
RUN uv venv --python "$(command -v python3.11)" /opt/venv && \
    VIRTUAL_ENV=/opt/venv uv pip install --no-cache --torch-backend=cpu --no-deps --require-hashes -r requirements/cpu.txt
COPY pyproject.toml README.md ./
COPY rlhf_ray rlhf_ray
RUN VIRTUAL_ENV=/opt/venv uv pip install --no-cache --no-deps .

FROM python:3.11.13-slim-bookworm

# g++: torch.compile and DeepSpeed build small kernels on first use. procps: Ray's dashboard agent.
RUN apt-get update && apt-get install -y --no-install-recommends g++ procps && rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 1000 trainer && mkdir -p /app/runs && chown -R trainer /app
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY --chown=trainer configs configs
USER trainer
HEALTHCHECK --interval=60s --timeout=30s CMD ["rlhf-ray", "doctor"]
ENTRYPOINT ["rlhf-ray"]
CMD ["--help"]
