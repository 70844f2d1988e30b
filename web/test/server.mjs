// File server for tests. Queries: ?cut=N ends the first response after N bytes (&always: every response); ?etag=none; ?gzip;
// ?busy=X answers 503 once, with Retry-After X; ?rangeless drops range requests, ?whole ignores their range. While `isDown`, no
// request is answered.
import { createServer } from "node:http";
import { gzipSync } from "node:zlib";

export async function serve(files, headers = {}) {
  const requests = [];
  const seen = new Set();
  const server = createServer((request, response) => {
    const url = new URL(request.url, "http://localhost");
    requests.push({ method: request.method, path: url.pathname, range: request.headers.range });
    const { searchParams } = url;
    const range = !searchParams.has("whole") && /bytes=(\d+)-(\d*)/.exec(request.headers.range ?? "");
    if (server.isDown || (range && searchParams.has("rangeless"))) return request.destroy();
    if (searchParams.has("busy") && !seen.has(request.url)) {
      seen.add(request.url);
      return response.writeHead(503, { ...headers, "retry-after": searchParams.get("busy") }).end();
    }
    let body = files[url.pathname.slice(1)];
    if (body === undefined) return response.writeHead(404, headers).end();
    const etag = searchParams.get("etag") === "none" ? undefined : `"${server.etag}"`;
    const all = { ...headers, ...(etag ? { etag } : {}), "content-type": typeFor(url.pathname) };
    if (searchParams.has("gzip")) {
      all["content-encoding"] = "gzip";
      body = gzipSync(body);
    }
    const isSame = request.headers["if-range"] === undefined || request.headers["if-range"] === etag;
    let status = 200;
    if (range && isSame) {
      const [begin, end] = [Number(range[1]), range[2] === "" ? body.length : Number(range[2]) + 1];
      if (begin >= body.length) return response.writeHead(416, all).end();
      all["content-range"] = `bytes ${begin}-${end - 1}/${body.length}`;
      body = body.subarray(begin, end);
      status = 206;
    }
    response.writeHead(status, { ...all, "content-length": body.length });
    if (request.method === "HEAD") return response.end();
    const cut = Number(searchParams.get("cut"));
    if (cut > 0 && cut < body.length && (searchParams.has("always") || !seen.has(request.url))) {
      seen.add(request.url);
      response.write(body.subarray(0, cut), () => setTimeout(() => response.destroy(), 20));
    } else response.end(body);
  });
  server.etag = "1";
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  return {
    url: (path) => `http://127.0.0.1:${port}/${path}`,
    requests,
    set etag(value) {
      server.etag = value;
    },
    set isDown(value) {
      server.isDown = value;
    },
    close: () => new Promise((resolve) => (server.closeAllConnections(), server.close(resolve))),
  };
}

const TYPES = { js: "text/javascript", wasm: "application/wasm", html: "text/html; charset=utf-8", css: "text/css", json: "application/json" };
const typeFor = (path) => TYPES[path.split(".").pop()] ?? "application/octet-stream";
