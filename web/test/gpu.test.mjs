// The engine on a GPU, which is SwiftShader in Chromium: log-probs and tokens of the CPU engine with the same float32 weights.
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readdir, readFile } from "node:fs/promises";
import { after, before, describe, test } from "node:test";
import { chromium } from "playwright-core";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture } from "./fixtures.mjs";
import { serve } from "./server.mjs";

const CHROMIUM = "/usr/bin/chromium";
const families = await readFixture("families");
// A dense model, heads of two sizes with a second embedding, recurrent mixers of three kinds, and mixtures; some with an adapter.
const FILES = ["llama.gguf", "granite4-hybrid-experts.gguf"];
const FORMATS = ["q4_k"];
if (process.env.WHET_WEB_WIDE) {
  FILES.push("gpt2/", "gemma4.gguf", "lfm2.gguf", "qwen3_5_text.gguf", "nemotron_h-groups.gguf", "gpt_oss.gguf");
  FORMATS.push("q8_0", "q5_1");
}
const LARGEST = 3e-5; // difference of a log-prob

async function packageFiles() {
  const found = { "index.html": Buffer.from("<!doctype html><title>whet-web</title>"), ...Object.fromEntries(await Promise.all(["q8_0", ...FORMATS].map(async (name) => [`${name}.gguf`, await readFile(new URL(`${name}.gguf`, FIXTURES))]))) };
  for (const name of await readdir(new URL("../dist/", import.meta.url))) if (/\.(js|wasm)$/.test(name)) found[name] = await readFile(new URL(`../dist/${name}`, import.meta.url));
  const add = async (folder) => {
    for (const entry of await readdir(new URL(folder, FIXTURES), { withFileTypes: true })) {
      if (entry.isDirectory()) await add(`${folder}${entry.name}/`);
      else found[folder + entry.name] = await readFile(new URL(folder + entry.name, FIXTURES));
    }
  };
  await add("families/");
  found["shaders.json"] = await readFile(new URL("shaders.json", FIXTURES));
  // The package with a GPU of small buffers, and with one that can be lost.
  const scripts = {
    small: "Object.defineProperty(GPUSupportedLimits.prototype, 'maxStorageBufferBindingSize', { get: () => 4096 });",
    lost: "const { requestDevice } = GPUAdapter.prototype; GPUAdapter.prototype.requestDevice = async function (...how) { const device = await requestDevice.apply(this, how); new BroadcastChannel('lose').onmessage = () => device.destroy(); return device; };",
  };
  for (const [folder, script] of Object.entries(scripts)) {
    for (const name of Object.keys(found)) if (/^[^/]+\.(js|wasm)$/.test(name)) found[`${folder}/${name}`] = found[name];
    found[`${folder}/worker.js`] = Buffer.from(`{ ${script} }\n${found["worker.js"]}`);
  }
  return found;
}

test("an unknown device, and options of the CPU with a GPU, are refused", async () => {
  await assert.rejects(Engine.load("a.gguf", { device: "cuda" }), /device is "cuda", expected "cpu" or "gpu"/);
  await assert.rejects(Engine.load("a.gguf", { device: "gpu", learning: true }), /learning computes on the CPU/);
  await assert.rejects(Engine.load("a.gguf", { device: "gpu", threads: 2 }), /threads are the CPU's/);
});

describe("chromium", { skip: existsSync(CHROMIUM) ? false : `${CHROMIUM} is not installed` }, () => {
  let browser, plain, server;
  before(async () => {
    const launch = (...args) => chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--no-first-run", "--disable-background-networking", "--disable-component-update", ...args] });
    [browser, plain] = await Promise.all([launch("--enable-unsafe-webgpu"), launch()]);
    server = await serve(await packageFiles()); // not isolated: the GPU needs no threads
  });
  after(async () => {
    await Promise.all([browser?.close(), plain?.close()]);
    await server?.close();
  });

  /** Run a function in a page, with the package of a folder. */
  async function run(body, given, { folder = "", on = browser } = {}) {
    const page = await on.newPage();
    const messages = [];
    page.on("console", (message) => messages.push(message.text()));
    try {
      await page.goto(server.url("index.html"));
      const helpers = `
        const { Engine } = await import(${JSON.stringify(server.url(`${folder}index.js`))});
        const draw = async (engine, ids, options) => {
          const samples = Array.from({ length: options.n ?? 1 }, () => ({ tokens: [], logprobs: [] }));
          for await (const { sample, token, logprob } of engine.generate(ids, options)) { samples[sample].tokens.push(token); samples[sample].logprobs.push(logprob); }
          return samples;
        };`;
      const found = await page.evaluate(`(async (given) => { ${helpers} return (${body})(given, Engine, draw); })(${JSON.stringify(given)})`);
      return { found, messages };
    } finally {
      await page.close();
    }
  }

  function assertClose({ cpu, gpu }) {
    assert.deepEqual(gpu.drawn.map(({ tokens }) => tokens), cpu.drawn.map(({ tokens }) => tokens));
    const numbers = ({ drawn, scores }) => [...scores, ...drawn.flatMap(({ logprobs }) => logprobs)];
    const expected = numbers(cpu);
    for (const [i, x] of numbers(gpu).entries()) assert.ok(Math.abs(x - expected[i]) < LARGEST, `${x}, expected ${expected[i]}`);
  }

  /** Samples and log-probs of both devices: of float32 weights on the CPU, and of weights as given on the GPU. */
  const inBoth = async ({ file, ids, folder, weights }, Engine, draw) => {
    const found = {};
    for (const device of ["cpu", "gpu"]) {
      const engine = await Engine.load(file, { weights: device === "cpu" ? "float32" : weights, device });
      const adapter = folder === undefined ? 0 : await engine.loadAdapter(["adapter_config.json", "adapter_model.safetensors"].map((name) => folder + name));
      const drawn = await draw(engine, ids, { adapter, n: 2, temperature: 0.8, maxNewTokens: 6, seed: 3 });
      // By the logits, which come back for filters and penalties.
      drawn.push(...(await draw(engine, ids, { adapter, temperature: 0.8, topP: 0.9, repetitionPenalty: 1.1, maxNewTokens: 3, seed: 4 })));
      const scores = [...(await engine.logprobs(ids, { adapter }))];
      if (adapter > 0) await engine.removeAdapter(adapter);
      const plain = [...(await engine.logprobs(ids))];
      found[device] = { drawn, scores: [...scores, ...plain], info: await engine.info() };
      engine.close();
    }
    return found;
  };

  for (const name of FILES) {
    const [{ file, ids }] = families.filter((each) => each.file === `families/${name}`);
    const folder = families.find((each) => each.file === file && each.adapter !== undefined)?.adapter;
    test(`${name}: tokens equal the CPU's, and log-probs within ${LARGEST}`, async () => {
      const { found } = await run(inBoth, { file, ids, folder, weights: "float32" });
      assert.deepEqual([found.cpu.info.device, found.gpu.info.device, found.gpu.info.exact], ["cpu", "gpu", false]);
      assert.match(found.gpu.info.gpu, /swiftshader/i);
      assertClose(found);
    });
  }

  for (const format of FORMATS) {
    test(`${format}: log-probs are near the dequantised weights' with keys and values in float32`, async () => {
      const { found } = await run(inBoth, { file: `${format}.gguf`, ids: families[0].ids });
      assert.ok(found.gpu.info.formats.includes(format));
      const { scores } = found.cpu;
      const difference = found.gpu.scores.reduce((sum, score, i) => sum + Math.abs(score - scores[i]), 0) / scores.length;
      assert.ok(difference < 0.05, `the mean difference is ${difference}`);
    });
  }

  test("Chromium compiles the kernels of every family and format", async () => {
    const compile = async (file) => {
      const sources = await (await fetch(file)).json();
      const device = await (await navigator.gpu.requestAdapter()).requestDevice();
      const errors = [];
      for (const code of sources) {
        const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
        errors.push(...messages.filter(({ type }) => type === "error").map(({ message, lineNum }) => `${message}: ${code.split("\n")[lineNum - 1]}`));
      }
      return { n: sources.length, errors };
    };
    const { n, errors } = (await run(compile, server.url("shaders.json"))).found;
    assert.ok(n > 100, `${n} kernels`);
    assert.deepEqual(errors, []);
  });

  test("requests at the same time have their own results, and an abandoned one disturbs none", async () => {
    const { ids } = families[0];
    const { found } = await run(
      async ({ file, ids }, Engine, draw) => {
        const found = {};
        for (const device of ["cpu", "gpu"]) {
          const engine = await Engine.load(file, { weights: "float32", device });
          const abandon = async () => {
            for await (const _ of engine.generate(ids, { n: 3, maxNewTokens: 50 })) break;
          };
          const [first, second, , scores] = await Promise.all([
            draw(engine, ids, { n: 2, temperature: 1, maxNewTokens: 12, seed: 1 }),
            draw(engine, ids.slice(3), { n: 3, temperature: 0.7, maxNewTokens: 5, seed: 2 }),
            abandon(),
            engine.logprobs(ids.slice(1)),
          ]);
          found[device] = { drawn: [...first, ...second], scores: [...scores] };
          engine.close();
        }
        return found;
      },
      { file: "families/llama.gguf", ids },
    );
    assertClose(found);
  });

  test("without an adapter of WebGPU the CPU computes, and one warning names the reason", async () => {
    const body = async (file, Engine) => {
      const devices = [];
      for (let i = 0; i < 2; ++i) {
        const engine = await Engine.load(file, { device: "gpu" });
        devices.push((await engine.info()).device);
        engine.close();
      }
      return devices;
    };
    const { found, messages } = await run(body, "q8_0.gguf", { on: plain });
    assert.deepEqual(found, ["cpu", "cpu"]);
    assert.equal(messages.filter((text) => text.includes("computes on the CPU: WebGPU has no adapter")).length, 1, messages.join("\n"));
  });

  test("what has no kernel is computed by the CPU, and the warning names it", async () => {
    const body = async (file, Engine) => {
      const engine = await Engine.load(file, { device: "gpu" });
      const { device, fallback } = await engine.info();
      const scores = [...(await engine.logprobs([1, 2, 3]))];
      engine.close();
      return { device, fallback, n: scores.length };
    };
    const { found, messages } = await run(body, server.url("q8_0.gguf"), { folder: "small/" });
    assert.deepEqual([found.device, found.n], ["cpu", 2]);
    assert.match(found.fallback, /the GPU has no kernel for a buffer of \d+ bytes/);
    assert.ok(messages.some((text) => text.includes(found.fallback)));
  });

  test("a lost GPU ends requests with an error that names it", async () => {
    const body = async (file, Engine) => {
      const engine = await Engine.load(file, { device: "gpu" });
      const errors = [];
      let n = 0;
      try {
        for await (const _ of engine.generate([1, 2, 3], { maxNewTokens: 200, stopTokenIds: [] })) if (++n === 2) new BroadcastChannel("lose").postMessage("");
      } catch (error) {
        errors.push(error.message);
      }
      await engine.logprobs([1, 2]).catch((error) => errors.push(error.message));
      const loaded = await engine.tokenize("a").catch((error) => error.message);
      engine.close();
      return { n, errors, loaded };
    };
    const { found } = await run(body, server.url("q8_0.gguf"), { folder: "lost/" });
    assert.equal(found.errors.length, 2, JSON.stringify(found));
    for (const error of found.errors) assert.match(error, /the GPU failed: it was lost .*Load the model again/);
    assert.ok(found.n >= 2 && Array.isArray(found.loaded));
  });
});
