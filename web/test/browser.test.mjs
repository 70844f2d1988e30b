// The package in Chromium, and in Firefox if it is installed, in a page that serves it as files.
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { after, before, describe, test } from "node:test";
import { chromium } from "playwright-core";
import puppeteer from "puppeteer-core";
import { FIXTURES, readFixture } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";
import { serve } from "./server.mjs";

const { cases } = await readFixture("model");
const { ids, plain, greedy } = cases.q8_0;
const withTable = (await readFixture("families")).find(({ file }) => file === "families/gemma4.gguf");
const ISOLATED = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp" };
const CSP = { "content-security-policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'" };

// Headers of a cross-origin server that exposes headers but allows none in requests: every preflight fails.
const OTHER = { "access-control-allow-origin": "*", "access-control-expose-headers": "ETag, Content-Range", "cross-origin-resource-policy": "cross-origin" };

const BROWSERS = {
  chromium: {
    path: "/usr/bin/chromium",
    launch: (executablePath) => chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"] }),
  },
  firefox: {
    path: "/usr/bin/firefox-esr",
    launch: (executablePath) => puppeteer.launch({ browser: "firefox", executablePath, headless: true }),
  },
};

async function files() {
  const found = { "index.html": Buffer.from("<!doctype html><title>whet-web</title>") };
  for (const name of ["index.js", "worker.js", "thread.js", "hf.js", "learner.js", "threads.wasm", "threads-plain.wasm", "plain.wasm", "learner.wasm"]) found[name] = await readFile(new URL(`../dist/${name}`, import.meta.url));
  for (const name of ["q8_0.gguf", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]) found[name] = await readFile(new URL(name, FIXTURES));
  found["gemma4.gguf"] = await readFile(new URL(withTable.file, FIXTURES));
  for (const name of ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]) found[`folder/${name}`] = await readFile(new URL(`folder/${name}`, FIXTURES));
  // The package in limited browsers: storage for five models, at most 1 GiB of shared memory, none, no relaxed SIMD, no workers
  // of workers; and with a thread script that is missing or fails.
  const maxPages = (n) => `const { Memory } = WebAssembly; WebAssembly.Memory = class extends Memory { constructor(how) { if (how.shared && how.maximum > ${n}) throw new RangeError("could not allocate memory"); super(how); } };`;
  const limited = { storage: `navigator.storage.estimate = async () => ({ quota: ${5.5 * found["q8_0.gguf"].length} });`, memory: maxPages(16384), shared: maxPages(0), simd: "const { validate } = WebAssembly; let n = 0; WebAssembly.validate = (bytes) => n++ > 0 && validate(bytes);", workers: "globalThis.Worker = undefined;", threadless: "", failing: "" };
  for (const [folder, script] of Object.entries(limited)) {
    for (const name of ["thread.js", "hf.js", "learner.js", "threads.wasm", "threads-plain.wasm", "plain.wasm", "learner.wasm"]) found[`limited/${folder}/${name}`] = found[name];
    found[`limited/${folder}/worker.js`] = Buffer.from(`{ ${script} } // a block: its names must not collide with the bundle's\n${found["worker.js"]}`);
  }
  delete found["limited/threadless/thread.js"];
  found["limited/failing/thread.js"] = Buffer.from(`WebAssembly.instantiate = async () => { throw new RangeError("no memory left"); };\n${found["thread.js"]}`);
  return found;
}

for (const [name, { path, launch }] of Object.entries(BROWSERS)) {
  describe(name, { skip: existsSync(path) ? false : `${path} is not installed` }, () => {
    let browser;
    let isExact; // whether it has relaxed SIMD, which Firefox has since 145: elsewhere samples differ
    const servers = {};
    const assertTokens = (found, expected) => (isExact ? assert.deepEqual(found, expected) : assert.equal(found.length, expected.length));
    before(async () => {
      browser = await launch(path);
      const all = await files();
      servers.isolated = await serve(all, ISOLATED);
      servers.plain = await serve(all);
      servers.strict = await serve(all, { ...ISOLATED, ...CSP });
      servers.closed = await serve(all, { ...ISOLATED, "content-security-policy": CSP["content-security-policy"].replace("; connect-src 'self'", "") });
      servers.other = await serve(all, OTHER);
      servers.bare = await serve(all, { "access-control-allow-origin": "*" });
      const { page } = await open("isolated");
      isExact = await page.evaluate(async () => WebAssembly.validate(await (await fetch("threads.wasm")).arrayBuffer()));
      await page.close();
    });
    after(async () => {
      await browser?.close();
      for (const server of Object.values(servers)) await server.close();
    });

    async function open(kind) {
      const page = await browser.newPage();
      const messages = [];
      page.on("console", (message) => messages.push(message.text()));
      await page.goto(servers[kind].url("index.html"));
      return { page, messages };
    }

    test("an isolated page has threads and results bit-identical to the native engine's", async () => {
      const { page } = await open("isolated");
      const found = await page.evaluate(async ([ids]) => {
        const { Engine } = await import("/index.js");
        const engine = await Engine.load("q8_0.gguf", { threads: 2, cache: false });
        const info = await engine.info();
        const tokens = [];
        for await (const { sample, token, logprob } of engine.generate(ids, { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 24, seed: 7, stopTokenIds: [1] })) if (sample === 0) tokens.push([token, logprob]);
        engine.close();
        return { info, tokens };
      }, [ids]);
      assert.deepEqual([found.info.build, found.info.threads, found.info.exact], [isExact ? "threads" : "threads-plain", 2, isExact]);
      assertTokens(found.tokens.map(([token]) => token), plain.samples[0].tokens);
      assertTokens(found.tokens.map(([, logprob]) => logprob), plain.samples[0].logprobs);
      await page.close();
    });

    test("the page starts the threads, because Firefox may hang when a worker starts another, and close ends them", async () => {
      const { page } = await open("isolated");
      const engine = await page.evaluateHandle(async () => {
        const { Engine } = await import("/index.js");
        return Engine.load("q8_0.gguf", { threads: 3, cache: false, assets: "/limited/workers" });
      });
      const tokens = await engine.evaluate(async (engine, ids) => {
        const tokens = [];
        for await (const { token } of engine.generate(ids, { temperature: 0, maxNewTokens: 16 })) tokens.push(token);
        return tokens;
      }, ids);
      assertTokens(tokens, greedy);
      const running = () => page.workers().map((worker) => worker.url().split("/").pop()).sort();
      if (name !== "firefox") assert.deepEqual(running(), ["thread.js", "thread.js", "worker.js"]); // WebDriver BiDi lists none
      await engine.evaluate((engine) => engine.close());
      for (let i = 0; i < 100 && running().length > 0; ++i) await new Promise((resolve) => setTimeout(resolve, 100)); // Chromium: 2 s
      assert.deepEqual(running(), []);
      await page.close();
    });

    test("a page without isolation has one thread, and one warning names the headers", async () => {
      const { page, messages } = await open("plain");
      const info = await page.evaluate(async () => {
        const { Engine } = await import("/index.js");
        for (let i = 0; i < 2; ++i) (await Engine.load("q8_0.gguf", { cache: false })).close();
        const engine = await Engine.load("q8_0.gguf", { cache: false });
        return engine.info();
      });
      assert.equal(info.threads, 1);
      const warnings = messages.filter((text) => text.includes("Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy"));
      assert.equal(warnings.length, 1);
      await page.close();
    });

    test("a strict content security policy works", async () => {
      const { page } = await open("strict");
      // The policy blocks inline scripts, so the test evaluates through the debugger.
      const tokens = await page.evaluate(async ([ids]) => {
        const { Engine } = await import("/index.js");
        const engine = await Engine.load("q8_0.gguf", { threads: 2, cache: false });
        const tokens = [];
        for await (const { token } of engine.generate(ids, { temperature: 0, maxNewTokens: 16 })) tokens.push(token);
        return tokens;
      }, [ids]);
      assertTokens(tokens, greedy);
      await page.close();
    });

    test("a policy without connect-src: the error names the blocked file", async () => {
      const { page } = await open("closed");
      const message = await page.evaluate(async () => {
        const { Engine } = await import("/index.js");
        return Engine.load("q8_0.gguf").catch(({ message }) => message);
      });
      mentions("Engine.load", "threads.wasm", "content security policy", "connect-src")(message);
      await page.close();
    });

    test("a download is cached, and fetched again if the server has another version", async () => {
      const { page } = await open("isolated");
      const load = () =>
        page.evaluate(async () => {
          const { Engine, listCache } = await import("/index.js");
          (await Engine.load("q8_0.gguf", { threads: 1 })).close();
          return listCache();
        });
      const count = () => servers.isolated.requests.filter((request) => request.method === "GET" && request.path === "/q8_0.gguf").length;
      const before = count();
      const [entry, ...others] = await load();
      assert.deepEqual([entry.isComplete, others.length, count() - before], [true, 0, 1]);
      await load();
      assert.equal(count() - before, 1);
      servers.isolated.etag = "2";
      await load();
      assert.equal(count() - before, 2);
      assert.deepEqual(
        await page.evaluate(async () => {
          const { clearCache, listCache } = await import("/index.js");
          await clearCache();
          return listCache();
        }),
        [],
      );
      await page.close();
    });

    test("rows of a second embedding are read from the cached file, from a File, and without a cache by ranges", async () => {
      const { page } = await open("isolated");
      const { requests } = servers.isolated;
      const run = async (options) => {
        const begin = requests.length;
        const tokens = await page.evaluate(async ([options, ids]) => {
          const { Engine } = await import("/index.js");
          const source = options.isFile ? new File([await (await fetch("gemma4.gguf?file")).blob()], "gemma4.gguf") : "gemma4.gguf";
          const engine = await Engine.load(source, { threads: 2, cache: options.cache });
          const samples = [[], []];
          for await (const { sample, token, logprob } of engine.generate(ids, { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 16, seed: 3 })) samples[sample].push([token, logprob]);
          engine.close();
          return samples;
        }, [options, withTable.ids]);
        for (const [i, sample] of tokens.entries()) {
          assertTokens(sample.map(([token]) => token), withTable.samples[i].tokens);
          assertTokens(sample.map(([, logprob]) => logprob), withTable.samples[i].logprobs);
        }
        return requests.slice(begin).filter(({ method, path }) => method === "GET" && path === "/gemma4.gguf").map(({ range }) => range);
      };
      assert.deepEqual(await run({ cache: true }), [undefined]);
      assert.deepEqual(await run({ cache: true }), []);
      const ranges = (await run({ cache: false })).filter((range) => range !== undefined).map((range) => range.match(/\d+/g));
      const rowBytes = 7 * 6 * 4;
      assert.ok(ranges.filter(([first, last]) => last - first === rowBytes - 1).length > 20, String(ranges)); // 16 tokens of the prompt, and samples
      await run({ isFile: true });
      await page.evaluate(async () => (await import("/index.js")).clearCache());
      await page.close();
    });

    test("a File that changes is an error of the request, which names the bytes of the row", async () => {
      const { page } = await open("isolated");
      const found = await page.evaluate(async (ids) => {
        const { Engine } = await import("/index.js");
        const folder = await navigator.storage.getDirectory();
        const handle = await folder.getFileHandle("changed.gguf", { create: true });
        const write = async (bytes) => {
          const stream = await handle.createWritable();
          await stream.write(bytes);
          await stream.close();
        };
        await write(await (await fetch("gemma4.gguf")).arrayBuffer());
        const engine = await Engine.load(await handle.getFile(), { threads: 1 });
        await write(new Uint8Array(1000));
        const error = await engine.logprobs(ids).then(() => "none", (error) => error.message);
        const { architecture } = await engine.info();
        engine.close();
        await folder.removeEntry("changed.gguf");
        return { error, architecture };
      }, withTable.ids);
      mentions("Engine.logprobs", "per_layer_token_embd.weight", `the row of token ${withTable.ids[0]}`, "changed.gguf", "bytes", "load it again")(found.error);
      assert.equal(found.architecture, "gemma4");
      await page.close();
    });

    test("an interrupted cross-origin download is resumed", async () => {
      const { page } = await open("isolated");
      const { requests } = servers.other;
      const cached = await page.evaluate(async (url) => {
        const { clearCache, Engine, listCache } = await import("/index.js");
        (await Engine.load(url, { threads: 1 })).close();
        const cached = await listCache();
        await clearCache();
        return cached;
      }, servers.other.url("q8_0.gguf?cut=100000"));
      assert.deepEqual(cached.map(({ isComplete }) => isComplete), [true]);
      const [first, ...rest] = requests.filter(({ method }) => method === "GET").map(({ range }) => range);
      assert.equal(first, undefined);
      // Chromium may request the rest in two ranges, for its own cache. After a failed preflight, of old browsers, the whole
      // file is fetched.
      const expected = requests.some(({ method }) => method === "OPTIONS") ? /^undefined$/ : /^bytes=100000-/;
      assert.ok(rest.length > 0 && rest.every((range) => expected.test(range)), String(rest));
      await page.close();
    });

    test("an estimate of a cross-origin file needs no exposed header, and errors name their call", async () => {
      const { page } = await open("plain");
      const found = await page.evaluate(async ([url, small]) => {
        const { Engine } = await import("/index.js");
        const { fileBytes } = await Engine.estimate(url);
        return [fileBytes, await Engine.estimate(small).catch((error) => error.message)];
      }, [servers.bare.url("q8_0.gguf"), servers.bare.url("adapter/adapter_config.json")]);
      assert.equal(found[0], (await readFile(new URL("q8_0.gguf", FIXTURES))).length);
      mentions("Engine.estimate", "adapter_config.json")(found[1]);
      await page.close();
    });

    test("blob: URLs are not cached, and a cached file is found by its hash under another URL", async () => {
      const { page } = await open("isolated");
      const found = await page.evaluate(async () => {
        const { clearCache, Engine, listCache } = await import("/index.js");
        await clearCache();
        const blob = await (await fetch("q8_0.gguf")).blob();
        const digest = await crypto.subtle.digest("SHA-256", await blob.arrayBuffer());
        const sha256 = Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
        const load = async (url, options) => (await Engine.load(url, { threads: 1, ...options })).close();
        await load(URL.createObjectURL(blob));
        await load("q8_0.gguf#1");
        await load("q8_0.gguf#2");
        const first = await listCache();
        await load("q8_0.gguf", { sha256 });
        await load("q8_0.gguf?signature=1", { sha256 });
        const wrong = await Engine.load("q8_0.gguf", { sha256: "0".repeat(64) }).catch((error) => error.message);
        const second = await listCache();
        await clearCache();
        return { first, wrong, second };
      });
      assert.equal(found.first.length, 1);
      assert.deepEqual(found.second, found.first);
      mentions("q8_0.gguf", "sha256", "0".repeat(64))(found.wrong);
      await page.close();
    });

    test("the cache takes half of the origin's quota and evicts the least recently used files", async () => {
      const { page } = await open("isolated");
      const cached = await page.evaluate(async () => {
        const { clearCache, Engine, listCache } = await import("/index.js");
        await clearCache();
        for (const n of [1, 2, 1, 3]) (await Engine.load(`q8_0.gguf?${n}`, { threads: 1, assets: "/limited/storage" })).close();
        const cached = await listCache();
        await clearCache();
        return cached.map(({ url, isComplete }) => [url.split("?")[1], isComplete]).sort();
      });
      assert.deepEqual(cached, [["1", true], ["3", true]]);
      await page.close();
    });

    test("fallbacks without relaxed SIMD, with little address space for shared memory, and with none", async () => {
      const { page, messages } = await open("isolated");
      const found = await page.evaluate(async () => {
        const { Engine } = await import("/index.js");
        const load = async (assets, options) => {
          const engine = await Engine.load("q8_0.gguf", { threads: 2, cache: false, assets, ...options });
          const { build, threads } = await engine.info();
          engine.close();
          return [build, threads];
        };
        const large = await load("/limited/memory", { contextLength: 1_200_000 }).catch(({ message }) => message);
        return [await load("/limited/simd"), await load("/limited/memory"), await load("/limited/shared"), large];
      });
      assert.deepEqual(found.slice(0, 3), [["threads-plain", 2], [isExact ? "threads" : "threads-plain", 2], ["plain", 1]]);
      mentions("Engine.load", "contextLength=1200000", "1074 MB")(found[3]);
      assert.equal(messages.filter((text) => text.includes("shared memory or address space")).length, 1);
      await page.close();
    });

    test("a missing worker script is reported, and the page survives", async () => {
      const { page } = await open("isolated");
      const message = await page.evaluate(async () => {
        const { Engine } = await import("/index.js");
        return Engine.load("q8_0.gguf", { assets: "/elsewhere/" }).catch((error) => `${error.name}: ${error.message}`);
      });
      mentions("WhetError: Engine", "worker", "worker.js")(message);
      await page.close();
    });

    test("a thread script that is missing or fails is reported", async () => {
      const { page } = await open("isolated");
      const messages = await page.evaluate(async () => {
        const { Engine } = await import("/index.js");
        const load = (assets) => Engine.load("q8_0.gguf", { threads: 3, cache: false, assets }).catch((error) => `${error.name}: ${error.message}`);
        return [await load("/limited/threadless"), await load("/limited/failing")];
      });
      mentions("WhetError: Engine", "worker", "thread.js", "Load the model again")(messages[0]);
      mentions("WhetError: Engine", "worker", "no memory left", "Load the model again")(messages[1]);
      await page.close();
    });

    test("a terminated worker and out of memory are reported, and the page survives", async () => {
      const { page } = await open("isolated");
      const state = await page.evaluateHandle(async ([ids]) => {
        const { Engine } = await import("/index.js");
        const format = (error) => `${error.name}: ${error.message}`;
        const engine = await Engine.load("q8_0.gguf", { threads: 1, cache: false });
        const request = (async () => {
          for (;;) for await (const _ of engine.generate(ids, { maxNewTokens: 490 })); // until the worker ends
        })();
        return { Engine, memory: await Engine.load("q8_0.gguf", { kvBytes: 4.294e9, cache: false }).catch(format), ended: request.catch(format) };
      }, [ids]);
      if (name === "chromium") {
        for (const worker of page.workers()) await worker.evaluate(() => close()).catch(() => {}); // it ends before it can reply
        mentions("WhetError: Engine", "worker", "terminated", "Load the model again")(await state.evaluate(({ ended }) => ended));
      }
      const found = await state.evaluate(async ({ Engine, memory }) => {
        (await Engine.load("q8_0.gguf", { threads: 1, cache: false })).close();
        return memory;
      });
      mentions("OutOfMemoryError", "contextLength")(found);
      await page.close();
    });

    test("results of a safetensors folder are bit-identical to the native engine's", async () => {
      const { page } = await open("strict");
      const tokens = await page.evaluate(async ([ids]) => {
        const { clearCache, Engine, listCache } = await import("/index.js");
        (await Engine.load("folder/", { threads: 1 })).close();
        const engine = await Engine.load("folder/", { threads: 2 });
        const cached = await listCache();
        await clearCache();
        const tokens = cached.map(({ url, isComplete }) => [url.split("/").pop(), isComplete]).sort();
        for await (const { sample, token, logprob } of engine.generate(ids, { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 24, seed: 7, stopTokenIds: [1] })) if (sample === 0) tokens.push([token, logprob]);
        return tokens;
      }, [ids]);
      const { tokens: expected, logprobs } = cases.folder.plain.samples[0];
      const cached = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"].map((name) => [name, true]);
      assert.deepEqual(tokens.slice(0, cached.length), cached);
      assertTokens(tokens.slice(cached.length), expected.map((token, i) => [token, logprobs[i]]));
      await page.close();
    });

    test("a page learns, saves adapters in its private file system and trains them further", async (t) => {
      if (!isExact) return t.skip("no relaxed SIMD");
      const { page } = await open("isolated");
      const found = await page.evaluate(async ([prompt]) => {
        const { deleteAdapter, Engine, listAdapters, openAdapter } = await import("/index.js");
        const engine = await Engine.load("q8_0.gguf", { threads: 2, learning: true, cache: false });
        const rows = [{ prompt, completion: [3, 4, 5] }, { prompt, completion: [6, 7] }];
        const learner = await engine.learner({ rank: 4 });
        const losses = (await learner.sft(rows, { steps: 4, learningRate: 0.01 })).map(({ loss }) => loss);
        const rewards = (await learner.grpo([{ prompt }], { reward: async ({ tokens }) => tokens[0] / 1000, groupSize: 2, maxNewTokens: 2 })).map(({ meanReward }) => meanReward);
        const before = await learner.logprobs(rows);
        await learner.save("mine");
        await learner.save("mine"); // replaces it
        await learner.close();
        const names = await listAdapters();
        const again = await engine.learner({ adapter: await openAdapter("mine") });
        const after = await again.logprobs(rows);
        const [number, synced] = [await engine.loadAdapter(await openAdapter("mine")), await again.sync()];
        const scores = await Promise.all([number, synced].map((adapter) => engine.logprobs(prompt, { adapter })));
        await deleteAdapter("mine");
        const { build } = await engine.info();
        engine.close();
        return { losses, rewards, before, after, names, scores, build, left: await listAdapters(), missing: await openAdapter("mine").catch(({ message }) => message) };
      }, [ids]);
      assert.ok(found.losses[3] < found.losses[0] - 0.1, String(found.losses));
      assert.deepEqual([found.build, found.rewards.length, found.names, found.left], ["learner", 1, ["mine"], []]);
      assert.deepEqual(found.after, found.before);
      assert.deepEqual(found.scores[0], found.scores[1]);
      mentions("openAdapter", '"mine"', "listAdapters()")(found.missing);
      await page.close();
    });

    test("learning without isolation, relaxed SIMD or shared memory is refused by name", async () => {
      const refused = async (kind, assets) => {
        const { page } = await open(kind);
        const message = await page.evaluate(async (assets) => {
          const { Engine } = await import("/index.js");
          return Engine.load("q8_0.gguf", { learning: true, cache: false, assets }).then(() => "loaded", ({ message }) => message);
        }, assets);
        await page.close();
        return message;
      };
      mentions("Engine.load", "learning needs threads", "not cross-origin isolated", "Cross-Origin-Opener-Policy: same-origin", "omit learning")(await refused("plain"));
      for (const folder of ["simd", "shared"]) mentions("Engine.load", "learning needs relaxed SIMD and shared memory", "Chrome 114", "omit learning")(await refused("isolated", `/limited/${folder}`));
    });

    test("an AbortSignal ends a request, and each request selects its adapter", async () => {
      const { page } = await open("isolated");
      const found = await page.evaluate(async ([ids]) => {
        const { Engine } = await import("/index.js");
        const engine = await Engine.load(await (await fetch("q8_0.gguf")).blob(), { threads: 1 });
        const controller = new AbortController();
        let n = 0;
        let name;
        try {
          for await (const _ of engine.generate(ids, { maxNewTokens: 400, signal: controller.signal })) if (++n === 3) controller.abort();
        } catch (error) {
          name = error.name;
        }
        const adapter = await engine.loadAdapter(["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]);
        return { n, name, adapted: Array.from(await engine.logprobs(ids, { adapter })), plain: Array.from(await engine.logprobs(ids)) };
      }, [ids]);
      assert.deepEqual([found.n, found.name], [3, "AbortError"]);
      assertTokens(found.plain, plain.scores.slice(0, ids.length - 1));
      assertTokens(found.adapted, cases.q8_0.adapted.scores.slice(0, ids.length - 1));
      await page.close();
    });
  });
}
