// Drives one page in Chromium for benchmarks.contenders.web: node driver.mjs SETTINGS.
//
// SETTINGS is JSON: {chromium, page, folders: {path: folder}}. The page is a module served from one of the folders. Each
// input line, {call, arguments}, calls a function that it exports; the output line is {result} or {error}. The page is
// isolated, so that its memory can be shared.
import { createReadStream, readdirSync, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { join, normalize } from "node:path";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const settings = JSON.parse(process.argv[2]);
const TYPES = { html: "text/html", js: "text/javascript", mjs: "text/javascript", wasm: "application/wasm", json: "application/json" };
const ISOLATED = {
  "cross-origin-opener-policy": "same-origin",
  "cross-origin-embedder-policy": "require-corp",
  "cache-control": "no-store",
};

function find(path) {
  for (const [prefix, folder] of Object.entries(settings.folders)) {
    if (!path.startsWith(`/${prefix}/`)) continue;
    const file = join(folder, normalize(path.slice(prefix.length + 1)));
    const stats = statSync(file, { throwIfNoEntry: false });
    if (stats?.isFile()) return { file, size: stats.size };
  }
  return undefined;
}

const server = createServer((request, response) => {
  const path = decodeURIComponent(request.url.split("?")[0]);
  if (path === "/") return response.writeHead(200, { ...ISOLATED, "content-type": TYPES.html }).end("<!doctype html><title>whet bench web</title>");
  const found = find(path);
  if (found === undefined) return response.writeHead(404, ISOLATED).end();
  response.writeHead(200, { ...ISOLATED, "content-type": TYPES[path.split(".").pop()] ?? "application/octet-stream", "content-length": found.size });
  if (request.method === "HEAD") return response.end();
  createReadStream(found.file).pipe(response);
});

/** Return the peak memory of this browser's largest renderer in bytes, or undefined if none is found. */
function rendererPeak() {
  const parents = new Map();
  const peaks = new Map();
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name)).map(Number)) {
    try {
      const status = readFileSync(`/proc/${pid}/status`, "utf8");
      parents.set(pid, Number(/^PPid:\s+(\d+)/m.exec(status)[1]));
      if (!readFileSync(`/proc/${pid}/cmdline`, "utf8").includes("--type=renderer")) continue;
      peaks.set(pid, Number(/^VmHWM:\s+(\d+)/m.exec(status)[1]) * 1024);
    } catch {
      continue; // the process has ended
    }
  }
  const isOurs = (pid) => pid === process.pid || (parents.has(pid) && isOurs(parents.get(pid)));
  const ours = [...peaks].filter(([pid]) => isOurs(pid)).map(([, peak]) => peak);
  return ours.length > 0 ? Math.max(...ours) : undefined;
}

await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const browser = await chromium.launch({
  executablePath: settings.chromium,
  args: ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
process.stdout.on("error", () => {}); // the parent has exited: input ends, and the loop below with it
const reply = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
try {
  const page = await browser.newPage();
  const problems = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && problems.push(message.text()));
  page.on("crash", () => problems.push("the page crashed"));
  const report = (error) => reply({ error: [error.message, ...problems.splice(0).slice(-5)].join("; ") });
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await page.evaluate(async (path) => void (globalThis.contender = await import(path)), settings.page).then(() => reply({ result: browser.version() }), report);
  for await (const line of createInterface({ input: process.stdin })) {
    const { call, arguments: given } = JSON.parse(line);
    if (call === "rendererPeak") reply({ result: rendererPeak() ?? null });
    else await page.evaluate(([name, given]) => globalThis.contender[name](given), [call, given]).then((result) => reply({ result: result ?? null }), report);
  }
} finally {
  await browser.close();
  server.close();
}
