// Serves the example page with the headers that threads need: node serve.mjs [PORT [MODELS]]
import { createReadStream } from "node:fs";
import { readdir, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";

const [port = "8000", models = "../models"] = process.argv.slice(2);
const example = fileURLToPath(new URL(".", import.meta.url));
const folders = { dist: join(example, "../dist"), models };
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".wasm": "application/wasm" };
const headers = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src 'self' data:",
};

async function handle(request, response) {
  const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname)).slice(1);
  if (path === "models.json") {
    const names = await readdir(models).catch(() => []);
    const listed = names.filter((name) => name.endsWith(".gguf")).map((name) => `models/${name}`);
    return response.writeHead(200, { ...headers, "Content-Type": types[".json"] }).end(JSON.stringify(listed));
  }
  const [first, ...rest] = path.split("/");
  const file = first in folders ? join(folders[first], ...rest) : join(example, path || "index.html");
  const { size, mtimeMs } = await stat(file);
  const etag = `"${size}-${Math.round(mtimeMs)}"`;
  const type = types[extname(file)] ?? "application/octet-stream";
  response.writeHead(200, { ...headers, "Content-Type": type, "Content-Length": size, ETag: etag });
  createReadStream(file).pipe(response);
}

createServer((request, response) => {
  handle(request, response).catch(() => response.writeHead(404, headers).end("Not found."));
}).listen(Number(port), "127.0.0.1", function () {
  console.log(`http://localhost:${this.address().port}/`);
});
