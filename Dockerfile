# The server for CPUs.
#
#     docker build -t octavo:0.1.0 .
#     docker run --rm -p 127.0.0.1:8000:8000 -v octavo-models:/models octavo:0.1.0 qwen3:4b --api-key SECRET
#
# The volume keeps the models. The process does not run as root.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels /source

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index --find-links /wheels octavo
RUN useradd --create-home --uid 10001 octavo && install -d -o octavo /models
USER octavo
ENV OCTAVO_CACHE=/models HF_HOME=/models/hub
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live')"]
ENTRYPOINT ["octavo", "serve", "--host", "0.0.0.0"]
CMD ["smollm2"]
