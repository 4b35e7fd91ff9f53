# The GPU build: vLLM's CUDA wheels bring the CUDA libraries; the host needs an NVIDIA driver and container toolkit.
#   docker build -f docker/gpu.Dockerfile -t rlhf-ray:gpu .
#   docker run --rm --gpus all --shm-size=16g -v "$PWD/runs:/app/runs" rlhf-ray:gpu doctor
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04

# CUDA 13.0 is what torch 2.13 is built for. Python 3.11 by uv; the devel image has nvcc and g++, with which DeepSpeed and vLLM build kernels on first use.
COPY --from=ghcr.io/astral-sh/uv:0.13.8 /uv /usr/local/bin/uv
RUN useradd --create-home --uid 1000 trainer && mkdir -p /app/runs /opt/venv && chown -R trainer /app /opt/venv
USER trainer
WORKDIR /app
COPY --chown=trainer pyproject.toml README.md ./
COPY --chown=trainer rlhf_ray rlhf_ray
RUN uv venv --clear --managed-python --python 3.11 /opt/venv && VIRTUAL_ENV=/opt/venv uv pip install --no-cache ".[gpu]"
ENV PATH=/opt/venv/bin:$PATH
COPY --chown=trainer configs configs
HEALTHCHECK --interval=60s --timeout=30s CMD ["rlhf-ray", "doctor"]
ENTRYPOINT ["rlhf-ray"]
CMD ["--help"]
