# The GPU build: vLLM's CUDA wheels bring the CUDA libraries; the host needs an NVIDIA driver and container toolkit.
#   docker build -f docker/gpu.Dockerfile -t rlhf-ray:gpu .
#   docker run --rm --init --gpus all --shm-size=16g -v "$PWD/runs:/app/runs" rlhf-ray:gpu doctor
FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1 AS installer

RUN pip install --no-cache-dir uv==0.13.8

# CUDA 13.0 is what torch 2.13 is built for; the devel image has nvcc and g++, with which DeepSpeed and vLLM build
# kernels on first use.
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04

COPY --from=installer /usr/local/bin/uv /usr/local/bin/uv
RUN useradd --create-home --uid 1000 trainer && mkdir -p /app/runs /opt/venv && \
    chown trainer:trainer /app /app/runs /opt/venv
USER 1000
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1
# Dependencies come first, so that a change of the project's code does not rebuild their layer.
COPY requirements/gpu.txt requirements/gpu.txt
RUN uv venv --clear --managed-python --python 3.11 /opt/venv && \
    uv pip install --no-cache --no-deps --require-hashes -r requirements/gpu.txt
COPY --chown=1000 pyproject.toml README.md LICENSE ./
COPY configs configs
COPY --chown=1000 rlhf_ray rlhf_ray
RUN uv pip install --no-cache --no-deps .
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s CMD ["rlhf-ray", "doctor"]
ENTRYPOINT ["rlhf-ray"]
CMD ["--help"]
