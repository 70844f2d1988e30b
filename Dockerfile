# docker build -t whet .        an image with the command whet and the extra train, without CUDA
# docker run --rm -it -v "$PWD:/work" whet chat models/MODEL.gguf
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps -w /wheel /source

FROM python:3.12-slim
RUN useradd --create-home whet
COPY --from=build /wheel /wheel
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(ls /wheel/*.whl)[train]"
USER whet
WORKDIR /work
ENTRYPOINT ["whet"]
