// A page bundled by each bundler with its defaults and run in Chromium: GGUF file, threads, adapter and folder.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";
import { FIXTURES, readFixture } from "../fixtures.mjs";
import { serve } from "../server.mjs";

const executablePath = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
assert.ok(executablePath, "Chromium is not installed");
const { cases } = await readFixture("model");
const { ids, greedy } = cases.q8_0;
const ISOLATED = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp" };
const SERVED = ["q8_0.gguf", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"];
const FOLDER = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"].map((name) => `folder/${name}`);
const here = `${process.cwd()}/test/bundlers`; // make runs the tests in web/
const modules = join(here, "node_modules");
const projects = join(here, "build"); // next to node_modules, where every bundler resolves the package
let browser;

before(async () => {
  const whet = join(modules, "whet-web");
  for (const folder of [projects, whet]) await rm(folder, { recursive: true, force: true });
  for (const folder of [projects, whet]) await mkdir(folder);
  const packed = execFileSync("npm", ["pack", "--ignore-scripts", process.cwd()], { cwd: projects, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] }).trim();
  execFileSync("tar", ["xzf", packed, "-C", whet, "--strip-components=1"], { cwd: projects });
  browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
});
after(() => browser?.close());

/** Create a project with the page and these files. */
async function createProject(name, files = {}) {
  const folder = join(projects, name);
  await mkdir(folder);
  for (const file of ["app.js", "index.html"]) await cp(join(here, file), join(folder, file));
  for (const [file, text] of Object.entries(files)) await writeFile(join(folder, file), text);
  return folder;
}

const bin = (name) => join(modules, ".bin", name);
const build = (command, args, cwd) => execFileSync(bin(command), args, { cwd, encoding: "utf8", stdio: "pipe", timeout: 240_000, env: { ...process.env, NEXT_TELEMETRY_DISABLED: "1", NODE_ENV: "production" } });

async function filesOf(folder) {
  const entries = await readdir(folder, { recursive: true, withFileTypes: true });
  const paths = entries.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
  return Object.fromEntries(await Promise.all(paths.map(async (path) => [path.slice(folder.length + 1), await readFile(path)])));
}

const fixtures = async () => Object.fromEntries(await Promise.all([...SERVED, ...FOLDER].map(async (name) => [name, await readFile(new URL(name, FIXTURES))])));

async function check(url, options = {}) {
  const page = await browser.newPage();
  try {
    await page.goto(url);
    await page.waitForFunction(() => globalThis.run !== undefined);
    const found = await page.evaluate(([ids, options]) => globalThis.run(ids, options), [ids, options]);
    assert.deepEqual(found, { tokens: greedy.slice(0, 8), adapter: 1, build: "threads", threads: 2, fromFolder: cases.folder.greedy.slice(0, 8) });
  } finally {
    await page.close();
  }
}

/** Serve a bundler's output next to the models and check it. */
async function checkFiles(folder, options) {
  const server = await serve({ ...(await filesOf(folder)), ...(await fixtures()) }, ISOLATED);
  try {
    await check(server.url("index.html"), options);
  } finally {
    await server.close();
  }
}

const ASSETS = ["worker.js", "thread.js", "hf.js", "learner.js", "threads.wasm", "threads-plain.wasm", "plain.wasm", "learner.wasm"];
const copyAssets = (to) => Promise.all(ASSETS.map((name) => cp(join(modules, "whet-web/dist", name), join(to, name))));

for (const [vite, config] of [["vite", ""], ["vite-7", 'optimizeDeps: { exclude: ["whet-web"] }']]) {
  const script = join(modules, vite, "bin/vite.js");
  test(`${vite} builds it`, async () => {
    const folder = await createProject(`${vite}-build`);
    execFileSync(process.execPath, [script, "build"], { cwd: folder, stdio: "pipe" });
    await checkFiles(join(folder, "dist"));
  });

  test(`${vite} serves it in development`, async () => {
    const headers = JSON.stringify(ISOLATED);
    const folder = await createProject(`${vite}-dev`, { "vite.config.js": `export default { server: { headers: ${headers}, fs: { strict: false } }, ${config} };` });
    for (const [name, bytes] of Object.entries(await fixtures())) {
      await mkdir(join(folder, "public", name, ".."), { recursive: true });
      await writeFile(join(folder, "public", name), bytes);
    }
    const server = spawn(process.execPath, [script, "--host", "127.0.0.1", "--port", "0"], { cwd: folder, env: { ...process.env, NO_COLOR: "1" } });
    try {
      const url = await new Promise((resolve, reject) => {
        let output = "";
        server.stdout.on("data", (data) => {
          const found = /http:\/\/127.0.0.1:\d+\//.exec((output += data));
          if (found) resolve(found[0]);
        });
        server.on("exit", () => reject(new Error(output)));
      });
      await check(url);
    } finally {
      server.kill();
    }
  });
}

test("webpack bundles it", async () => {
  const folder = await createProject("webpack", { "webpack.config.mjs": 'export default { mode: "production", entry: "./app.js" };' });
  build("webpack", [], folder);
  await writeFile(join(folder, "dist/index.html"), '<!doctype html><script src="main.js"></script>');
  await checkFiles(join(folder, "dist"));
});

for (const how of ["--turbopack", "--webpack"]) {
  test(`Next.js ${how} bundles it`, async () => {
    const folder = join(projects, `next${how}`);
    await cp(join(here, "next"), folder, { recursive: true });
    await cp(join(here, "app.js"), join(folder, "app.js"));
    await writeFile(join(folder, "package.json"), '{ "private": true, "type": "module" }');
    build("next", ["build", how], folder);
    await checkFiles(join(folder, "out"));
  });
}

test("esbuild bundles the import, with the package's other files next to the output", async () => {
  const folder = await createProject("esbuild");
  build("esbuild", ["app.js", "--bundle", "--format=esm", "--outdir=out"], folder);
  await cp(join(folder, "index.html"), join(folder, "out/index.html"));
  await copyAssets(join(folder, "out"));
  await checkFiles(join(folder, "out"));
});

test("Rollup bundles the import, with the package's other files next to the output", async () => {
  const folder = await createProject("rollup");
  build("rollup", ["app.js", "--dir", "out", "--format", "es", "-p", "node-resolve"], folder);
  await cp(join(folder, "index.html"), join(folder, "out/index.html"));
  await copyAssets(join(folder, "out"));
  await checkFiles(join(folder, "out"));
});

test("Parcel bundles the import, with the package's files as assets", async () => {
  const folder = await createProject("parcel", { "index.html": '<!doctype html><title>app</title><script type="module" src="./app.js"></script>', "package.json": '{ "private": true }' });
  build("parcel", ["build", "index.html", "--dist-dir", "out", "--cache-dir", "cache", "--no-autoinstall"], folder);
  await mkdir(join(folder, "out/whet"));
  await copyAssets(join(folder, "out/whet"));
  await checkFiles(join(folder, "out"), { assets: "/whet/" });
});
