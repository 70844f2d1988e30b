// The package as packed by npm and installed into an empty project: runs in Node, Deno and Bun, bundled by Vite and esbuild.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { cp, mkdtemp, readdir, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { FIXTURES, readFixture } from "./fixtures.mjs";
import { serve } from "./server.mjs";

const { cases } = await readFixture("model");
const { ids, greedy } = cases.q8_0;
const tool = (name) => fileURLToPath(new URL(`test/runtimes/node_modules/.bin/${name}`, `file://${process.cwd()}/`));
const reasonMissing = (name) => !existsSync(tool(name)) && `${name} is not installed`;
const executablePath = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const ISOLATED = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp" };
const PROGRAM = `
import { Engine } from "whet-web";
export async function run(source) {
  const engine = await Engine.load(source, { threads: 2, cache: false });
  const tokens = [];
  for await (const { token } of engine.generate(${JSON.stringify(ids)}, { temperature: 0, maxNewTokens: 8, stopTokenIds: [] })) tokens.push(token);
  const adapter = await engine.loadAdapter(["adapter_config.json", "adapter_model.safetensors"].map((file) => new URL("adapter/" + file, new URL(source, globalThis.location?.href))));
  const { build, exact } = await engine.info();
  engine.close();
  return { tokens, adapter, build, exact };
}
`;
const TYPED = `
import { Engine, type Learner, type Message } from "whet-web";
import { Ops } from "whet-web/ops";
interface Mine { role: "user" | "assistant"; content: string }
export async function run(engine: Engine, mine: Mine[], file: File, list: FileList): Promise<Message[]> {
  engine.generate(mine);
  engine.generate([{ role: "assistant", tool_calls: [] }, { role: "assistant", content: null, tool_calls: [] }, { role: "tool", content: "1", tool_call_id: "a" }]);
  await engine.render([{ role: "user", content: [{ type: "text", text: "a" }] }]);
  // @ts-expect-error a message has a role
  engine.generate([{ content: "a" }]);
  const chat = engine.chat({ system: "a", seed: 1n });
  chat.messages.push(...mine);
  await Engine.load(list);
  await Engine.load([file, file], { learning: true });
  const learner: Learner = await engine.learner({ rank: 4, targets: ["q_proj"] });
  await learner.sft([{ prompt: mine, completion: "a" }, { prompt: [1], completion: [2] }], { steps: 1, learningRate: 1e-3 });
  await learner.grpo([{ prompt: "a", sum: 3 }], { reward: async ({ text }, { sum }) => text.length - sum, groupSize: 4, topP: 0.9 });
  // @ts-expect-error a row has no product
  await learner.grpo([{ prompt: "a", sum: 3 }], { reward: ({ text }, { product }) => text.length - product });
  await engine.loadAdapter(await learner.toPeft());
  await Ops.load();
  return chat.messages;
}
`;
let folder;
before(async () => {
  folder = await mkdtemp(join(tmpdir(), "whet-web-"));
  const npm = (...args) => execFileSync("npm", args, { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  await writeFile(join(folder, "package.json"), JSON.stringify({ private: true, type: "module" }));
  const [packed] = npm("pack", "--ignore-scripts", process.cwd()).trim().split("\n").slice(-1);
  npm("install", "--offline", "--no-audit", "--no-fund", packed);
  await writeFile(join(folder, "program.js"), PROGRAM);
  await writeFile(join(folder, "main.js"), `import { run } from "./program.js";\nimport { Ops } from "whet-web/ops";\nconst found = await run(process.argv[2]);\nconsole.log(JSON.stringify({ ...found, half: (await Ops.load()).softmax([1, 1])[0] }));\n`);
  await writeFile(join(folder, "app.js"), `import { run } from "./program.js";\nglobalThis.run = run;\n`);
  await writeFile(join(folder, "index.html"), '<!doctype html><title>app</title><script type="module" src="/app.js"></script>');
});
after(() => rm(folder, { recursive: true }));

for (const [name, command, isExact] of [["node", [process.execPath], true], ["deno", [tool("deno"), "run", "-A"], true], ["bun", [tool("bun")], undefined]]) {
  test(`${name} runs it`, { skip: name !== "node" && reasonMissing(name) }, () => {
    const [program, ...args] = command;
    const output = execFileSync(program, [...args, "main.js", new URL("q8_0.gguf", FIXTURES).href], { cwd: folder, encoding: "utf8", timeout: 60_000 });
    const found = JSON.parse(output);
    assert.deepEqual([found.build, found.half, found.adapter], ["threads", 0.5, 1]);
    if (isExact !== undefined) assert.equal(found.exact, isExact); // Bun rounds twice on x86-64
    if (found.exact) assert.deepEqual(found.tokens, greedy.slice(0, 8));
    assert.equal(found.tokens.length, 8);
  });
}

const SWIFTSHADER = "/usr/lib/chromium/vk_swiftshader_icd.json";
const webgpu = fileURLToPath(new URL("test/runtimes/node_modules/webgpu", `file://${process.cwd()}/`));
test("node computes on a GPU with the package webgpu", { skip: [SWIFTSHADER, webgpu].every(existsSync) ? false : "webgpu or SwiftShader is not installed" }, async () => {
  await symlink(webgpu, join(folder, "node_modules/webgpu"));
  const source = `import { Engine } from "whet-web";
    const found = {};
    for (const device of ["cpu", "gpu"]) {
      const engine = await Engine.load(process.argv[2], { weights: "float32", device });
      found[device] = [];
      for await (const { token } of engine.generate([1, 2, 3], { temperature: 0.8, maxNewTokens: 6, seed: 1 })) found[device].push(token);
      found.info = await engine.info();
      engine.close();
    }
    console.log(JSON.stringify(found));`;
  await writeFile(join(folder, "gpu.js"), source);
  const env = { ...process.env, VK_ICD_FILENAMES: SWIFTSHADER, XDG_RUNTIME_DIR: tmpdir() };
  const found = JSON.parse(execFileSync(process.execPath, ["gpu.js", new URL("families/llama.gguf", FIXTURES).href], { cwd: folder, encoding: "utf8", timeout: 60_000, env }));
  assert.equal(found.info.device, "gpu");
  assert.deepEqual(found.gpu, found.cpu);
});

for (const resolution of ["nodenext", "bundler", "node10"]) {
  test(`types accept all valid calls with moduleResolution ${resolution}`, async () => {
    await writeFile(join(folder, "typed.ts"), TYPED);
    const module = resolution === "nodenext" ? resolution : "esnext";
    const args = ["--noEmit", "--strict", "--target", "es2022", "--lib", "es2023,dom", "--module", module, "--moduleResolution", resolution];
    execFileSync(`${process.cwd()}/node_modules/.bin/tsc`, [...args, "typed.ts"], { cwd: folder, encoding: "utf8" });
  });
}

test("the package contains its README and licences", async () => {
  const root = join(folder, "node_modules/whet-web");
  for (const name of ["README.md", "LICENSE", "dist/third_party_licenses.txt"]) assert.ok((await readFile(join(root, name), "utf8")).length > 1000, name);
  const licences = await readFile(join(root, "dist/third_party_licenses.txt"), "utf8");
  for (const name of ["@huggingface/jinja", "libc++", "wasi-libc", "LLVM Exceptions"]) assert.ok(licences.includes(name), name);
});

/** Read the files below a folder by path. */
async function filesOf(root) {
  const entries = await readdir(root, { recursive: true, withFileTypes: true });
  const paths = entries.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
  return Object.fromEntries(await Promise.all(paths.map(async (path) => [path.slice(root.length + 1), await readFile(path)])));
}

async function runInChromium(files) {
  const { chromium } = await import("playwright-core");
  const served = ["q8_0.gguf", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"];
  const fixtures = Object.fromEntries(await Promise.all(served.map(async (name) => [name, await readFile(new URL(name, FIXTURES))])));
  const server = await serve({ ...files, ...fixtures }, ISOLATED);
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage();
    await page.goto(server.url("index.html"));
    await page.waitForFunction(() => globalThis.run !== undefined);
    return await page.evaluate(() => globalThis.run("q8_0.gguf"));
  } finally {
    await browser.close();
    await server.close();
  }
}

const EXPECTED = { tokens: greedy.slice(0, 8), adapter: 1, build: "threads", exact: true };

test("Vite bundles it without configuration, including workers and modules", { skip: reasonMissing("vite") || (!executablePath && "Chromium is not installed") }, async () => {
  execFileSync(process.execPath, [tool("vite"), "build"], { cwd: folder, stdio: "ignore", timeout: 60_000 });
  assert.deepEqual(await runInChromium(await filesOf(join(folder, "dist"))), EXPECTED);
});

test("esbuild bundles it without configuration, with the package's other files next to the output", { skip: !executablePath && "Chromium is not installed" }, async () => {
  const out = join(folder, "out");
  await build({ entryPoints: [join(folder, "app.js")], bundle: true, format: "esm", outdir: out, logLevel: "silent" });
  await cp(join(folder, "index.html"), join(out, "index.html"));
  for (const name of ["worker.js", "thread.js", "hf.js", "threads.wasm", "threads-plain.wasm", "plain.wasm"]) await cp(join(folder, "node_modules/whet-web/dist", name), join(out, name));
  assert.deepEqual(await runInChromium(await filesOf(out)), EXPECTED);
});
