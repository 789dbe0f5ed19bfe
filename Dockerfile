# All of Penstock on one machine: `penstock up` with its private Redis. Build from the repository's root:
#   docker build -t penstock .
#   docker run -p 127.0.0.1:8000:8000 -e PENSTOCK_PUBLISHED_HOST=127.0.0.1 -v penstock:/data penstock
#   docker run -p 127.0.0.1:8000:8000 -e PENSTOCK_PUBLISHED_HOST=127.0.0.1 -v penstock:/data penstock up Qwen/Qwen3-0.6B
#   docker run --read-only --tmpfs /tmp:exec --cap-drop ALL ...
# /data keeps the queue, files, models of the hub and compiled kernels.
# PENSTOCK_PUBLISHED_HOST says where -p publishes the port, which the process cannot see. Without it, or with
# an address that others reach, the frontend starts only with keys (PENSTOCK_API_KEYS).
# The first layers are those of worker/Dockerfile, which also explains TORCH_PIP_ARGS.
ARG BASE=python:3.11-slim

FROM ${BASE} AS requirements
COPY pyproject.toml /
RUN python -c "import tomllib; p = tomllib.load(open('/pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(r for extra in ('api', 'server', 'worker-torch', 'otel') for r in p['optional-dependencies'][extra]), sep='\n')" > /requirements.txt

FROM ${BASE} AS torch
COPY constraints.txt /
RUN grep '^torch==' /constraints.txt > /torch.txt

FROM ${BASE} AS code
WORKDIR /build
COPY pyproject.toml ./
RUN pip install --no-cache-dir "$(python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])")"
COPY README.md LICENSE ./
COPY shared ./shared
COPY api ./api
COPY worker ./worker
COPY penstock ./penstock
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation --target /code .

FROM ${BASE}
# The native CPU kernels are compiled once, for the processor that they run on; Triton compiles what
# launches its kernels.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# A volume takes the owner of the directory that it is mounted on: for models and kernels.
RUN useradd --uid 10001 --user-group --create-home penstock \
    && install -d -o 10001 -g 10001 /home/penstock/.cache
ARG TORCH_PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
COPY --from=torch /torch.txt /srv/
RUN pip install --no-cache-dir -r /srv/torch.txt ${TORCH_PIP_ARGS}
# Process 1 has to take the exit status of processes whose parent died, which `penstock up` does not.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /data
COPY constraints.txt /srv/
COPY --from=requirements /requirements.txt /srv/
RUN pip install --no-cache-dir -c /srv/constraints.txt -r /srv/requirements.txt
COPY --from=code /code /srv/penstock
USER 10001:10001
WORKDIR /data
ENV PATH=/srv/penstock/bin:${PATH} PYTHONPATH=/srv/penstock/penstock/packages:/srv/penstock HOME=/data TRITON_CACHE_DIR=/data/.cache/triton PENSTOCK_DATA_DIR=/data PENSTOCK_HOST=0.0.0.0 PENSTOCK_PORT=8000 PENSTOCK_LOG_LEVEL=INFO
VOLUME /data
EXPOSE 8000
# Loading a model, which may have to be fetched, takes its time.
HEALTHCHECK --interval=5s --timeout=3s --start-period=1h \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="penstock" \
    org.opencontainers.image.description="Large language models served from a durable queue: Redis, a frontend and a worker." \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["tini", "--", "penstock"]
CMD ["up"]
