# The server with one bundle, without training code and without torch:
#   docker build -t openworld:1 --build-arg BUNDLE=runs/demo/bundle .
# How to run it: docs/howto/deploy.md. `bentoml containerize` makes a similar image from bentofile.yaml.

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/openworld
# The packages change rarely, so they are a layer of their own, in the versions that were tested.
COPY pyproject.toml constraints.txt README.md LICENSE openworld.py ./
RUN /opt/openworld/bin/python -m pip install --constraint constraints.txt ".[postgres,huggingface]"
# Of the packages of openworld, only the one that serves.
COPY serving ./serving
RUN /opt/openworld/bin/python -m pip install --no-deps --force-reinstall . \
    && /opt/openworld/bin/python -m compileall -q /opt/openworld/lib/python3.11/site-packages/serving

FROM python:3.11-slim-bookworm
ARG BUNDLE=runs/demo/bundle
RUN groupadd --gid 1034 openworld \
    && useradd --uid 1034 --gid 1034 --no-create-home --shell /usr/sbin/nologin openworld \
    && install --directory --owner=1034 --group=1034 /var/lib/bentoml /var/lib/openworld
COPY --from=build /opt/openworld /opt/openworld
COPY ${BUNDLE} /srv/bundle
COPY docs/sbom-image.cdx.json /usr/share/doc/openworld/sbom.cdx.json
# Everything that is written is below /tmp, BENTOML_HOME and /var/lib/openworld, so the root may be read-only.
ENV PATH=/opt/openworld/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    BENTOML_DO_NOT_TRACK=True \
    BENTOML_HOME=/var/lib/bentoml \
    BENTOML_HOST=0.0.0.0 \
    ORT_DISABLE_TELEMETRY=1 \
    OPENWORLD_BUNDLE=/srv/bundle \
    OPENWORLD_PROVIDER=cpu
WORKDIR /var/lib/openworld
USER 1034:1034
EXPOSE 3000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:3000/readyz', timeout=4)"]
ENTRYPOINT ["python", "-m", "serving"]
CMD ["--port", "3000"]
