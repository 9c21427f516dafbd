# docker build -t fencepost .          (with buildx: --platform linux/amd64,linux/arm64)
# docker run -p 127.0.0.1:9092:9092 -v fencepost:/var/lib/fencepost fencepost
# The port is open to whoever reaches the container, and nobody is asked who they are: publish it on
# loopback as above, or give it listeners that ask (SASL_SSL, SSL with client certificates).
# Settings, addresses, health: docs/deployment.md
#
# Two stages: the first installs, the second holds nothing but Python and what is installed. All that comes
# from an index is of a known version and hash (packaging/*requirements.txt, `make lock`). A tag may move:
# for a build that can be repeated name the base by its digest, --build-arg PYTHON=python:3.13-slim@sha256:…
ARG PYTHON=python:3.13-slim
FROM ${PYTHON} AS wheels
# For a mirror or a folder of wheels: --build-arg PIP_OPTIONS="--no-index --find-links build/wheelhouse"
ARG PIP_OPTIONS=""
WORKDIR /source
COPY . .
RUN python -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-cache-dir --require-hashes ${PIP_OPTIONS} -r packaging/build-requirements.txt \
    && /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels . \
    && python -m venv /opt/fencepost \
    && /opt/fencepost/bin/python -m pip install --no-cache-dir --require-hashes ${PIP_OPTIONS} -r packaging/requirements.txt \
    && /opt/fencepost/bin/python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && rm -rf /opt/fencepost/lib/python*/site-packages/pip* \
    && mkdir -p /var/lib/fencepost && chown 1000:1000 /var/lib/fencepost

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Fencepost" \
      org.opencontainers.image.description="A Kafka-protocol broker made for groups and transactions" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=wheels /opt/fencepost /opt/fencepost
COPY --from=wheels --chown=1000:1000 /var/lib/fencepost /var/lib/fencepost
ENV PATH=/opt/fencepost/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FENCEPOST_DATA_DIR=/var/lib/fencepost \
    FENCEPOST_SET_LISTENERS=PLAINTEXT://0.0.0.0:9092 \
    FENCEPOST_SET_FENCEPOST_INSECURE=true \
    FENCEPOST_LOG_FORMAT=json
USER 1000:1000
VOLUME /var/lib/fencepost
EXPOSE 9092
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["fencepost", "health", "--timeout", "4"]
ENTRYPOINT ["fencepost"]
CMD ["serve"]
