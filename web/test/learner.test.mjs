// The learner against whet.Learner and the trainers in float32, and its adapters read by native Whet.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Engine, openAdapter } from "../dist/index.js";
import { bits, FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";

const { prompts, completions, cases, texts, encoded, sft, grpo } = await readFixture("learner");
const rows = prompts.map((prompt, i) => ({ prompt, completion: completions[i] }));
const load = (name, options) => Engine.load(new URL(name.endsWith(".gguf") ? name : `${name}/`, FIXTURES), { threads: 2, learning: true, ...options });
const adapterFiles = (name) => new URL(`learner/${name}/`, FIXTURES);
const TRAINED = { rank: 4 };
let engine;
before(async () => {
  engine = await load("f32.gguf");
});
after(() => engine.close());

/** Use a new learner of an engine, and close it. */
async function withLearner(of, options, use) {
  const learner = await of.learner(options);
  try {
    return await use(learner);
  } finally {
    await learner.close();
  }
}

/** Check the norm of the difference over the norm. */
function near(found, expected, what, limit = 1e-5) {
  assert.equal(found.length, expected.length, what);
  const norm = (numbers) => Math.sqrt(numbers.reduce((sum, x) => sum + x * x, 0));
  const error = norm(expected.map((x, i) => x - found[i])) / norm(expected);
  assert.ok(error <= limit, `${what}: the relative error is ${error}`);
}
const nearRows = (found, expected, what) => near(found.flatMap((row) => [...row]), expected.flat(), what);

/** Gradients of the fixture's log-probs: sin of the index in the padded array. */
const width = Math.max(...completions.map(({ length }) => length));
const gradientOf = (row, i) => Array.from(row, (_, t) => Math.sin(Math.fround(i * width + t)));

for (const { name, settings, rank, alpha, parameters, logprobs, after, base, gradients, norm } of cases) {
  test(`${name}: adapters, log-probs, gradients and AdamW equal native Whet's`, async () => {
    const loaded = await load(name);
    const { lora_rank, lora_alpha, lora_layers: targets, seed } = settings;
    const label = name.replace("/", "-");
    try {
      await withLearner(loaded, { rank: lora_rank, alpha: lora_alpha, targets, seed: seed && BigInt(seed) }, async (learner) => {
        assert.equal(learner.nParameters, parameters);
        const { files } = await learner.toPeft(name);
        assert.deepEqual(Object.keys(files), ["adapter_config.json", "adapter_model.safetensors", "whet_base.json"]);
        const [read, saved] = [(file) => JSON.parse(Buffer.from(files[file])), async (file) => readFile(new URL(file, adapterFiles(`${label}-adapter`)))];
        const config = JSON.parse(await saved("adapter_config.json"));
        assert.deepEqual([config.r, config.lora_alpha], [rank, alpha]); // the defaults, too
        assert.deepEqual(read("adapter_config.json"), { ...config, base_model_name_or_path: name });
        assert.deepEqual(read("whet_base.json"), JSON.parse(await saved("whet_base.json")));
        assert.deepEqual(tensorsOf(files["adapter_model.safetensors"]), tensorsOf(await saved("adapter_model.safetensors")));
      });
      await withLearner(loaded, { adapter: adapterFiles(`${label}-moved`) }, async (learner) => {
        const found = await learner.logprobs(rows, { temperature: 0.9 });
        nearRows(found, logprobs, "log-probs");
        await learner.backward(found.map(gradientOf));
        const all = await learner.gradients();
        assert.deepEqual([...all.keys()], Object.keys(gradients));
        const flat = (pairs) => pairs.flatMap(([a, b]) => [...a, ...b]);
        near(flat([...all.values()].map(({ a, b }) => [a, b])), flat(Object.values(gradients)), "gradients");
        for (const [module, { a, b }] of all) near([...a, ...b], gradients[module].flat(), module);
        near([await learner.step({ learningRate: 0.01 })], [norm], "the norm");
        nearRows(await learner.logprobs(rows, { temperature: 0.9 }), after, "log-probs after a step", 1e-4);
        nearRows(await learner.logprobs(rows, { temperature: 0.9, adapters: false }), base, "log-probs of the base");
      });
    } finally {
      loaded.close();
    }
  });
}

/** Tensors of a safetensors file: [name, shape, bits] by name. */
function tensorsOf(file) {
  const bytes = Buffer.from(file);
  const size = Number(bytes.readBigUInt64LE(0));
  const { __metadata__, ...header } = JSON.parse(bytes.subarray(8, 8 + size));
  assert.deepEqual(__metadata__, { format: "pt" });
  return Object.entries(header)
    .map(([name, { dtype, shape, data_offsets: [begin, end] }]) => [name, dtype, shape, bytes.subarray(8 + size + begin, 8 + size + end).toString("base64")])
    .sort();
}

test("the engine that learns samples as the other builds, and with the adapters in training after sync()", async () => {
  const { cases: plain } = await readFixture("model");
  const loaded = await load("q8_0.gguf");
  const { ids, plain: expected } = plain.q8_0;
  const info = await loaded.info();
  assert.deepEqual([info.build, info.exact], ["learner", true]);
  const [sample] = await samplesOf(loaded, ids, { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 24, seed: 7, stopTokenIds: [1] });
  assert.deepEqual([sample.tokens, bits(sample.logprobs)], [expected.samples[0].tokens, bits(expected.samples[0].logprobs)]);
  await withLearner(loaded, TRAINED, async (learner) => {
    const score = async (adapter) => [...(await loaded.logprobs([...prompts[0], ...completions[0]], { adapter }))];
    const first = await learner.sync();
    assert.deepEqual(await score(first), await score(0)); // B is zero
    await learner.sft(rows, { steps: 2, learningRate: 0.02 });
    const second = await learner.sync();
    assert.notDeepEqual(await score(second), await score(0));
    await assert.rejects(score(first), mentions("adapter", first, "loadAdapter"));
    const reloaded = await loaded.loadAdapter(await learner.toPeft());
    assert.deepEqual(await score(reloaded), await score(second));
  });
  loaded.close();
});

test("steps of SFT equal whet.algorithms.SFT's, in micro-batches, and lower the loss", async () => {
  await withLearner(engine, TRAINED, async (learner) => {
    const reported = [];
    const found = await learner.sft(rows, { steps: 3, batchSize: rows.length, learningRate: 0.01, maxTokensPerStep: 12, onProgress: (progress) => reported.push(progress) });
    assert.deepEqual(reported, found);
    for (const name of ["loss", "gradNorm"]) near(found.map((step) => step[name]), sft.map((step) => step[name]), name, 1e-4);
    assert.deepEqual(found.map(({ step, steps, nTokens }) => [step, steps, nTokens]), [1, 2, 3].map((step) => [step, 3, completions.flat().length]));
    assert.ok(found[2].loss < found[0].loss - 0.1, `${found.map(({ loss }) => loss)}`);
  });
});

test("SFT on texts and messages trains on the tokens of tokenize_completion", async () => {
  await withLearner(engine, TRAINED, async (learner) => {
    const lengths = (await learner.logprobs(texts)).map(({ length }) => length);
    assert.deepEqual(lengths, encoded.map(({ completion }) => completion.length));
    nearRows(await learner.logprobs(texts), (await learner.logprobs(encoded)).map((row) => [...row]), "log-probs");
    const [{ loss: before }, ...others] = await learner.sft(texts, { steps: 6, learningRate: 0.01 });
    assert.ok(others.at(-1).loss < before - 0.5, `${before}, ${others.at(-1).loss}`);
  });
});

for (const { file, steps } of grpo) {
  test(`${file}: steps of GRPO sample, score and update as whet.algorithms.GRPO`, async () => {
    const loaded = await load(file);
    await withLearner(loaded, TRAINED, async (learner) => {
      const given = prompts.slice(0, 4).map((prompt, row) => ({ prompt, row }));
      const reward = ({ tokens, text, finish }, { prompt, row }) => {
        assert.deepEqual(prompt, prompts[row]);
        assert.ok(typeof text === "string" && (finish === "length") === (tokens.length === 6 && tokens.at(-1) !== 5), `${tokens}: ${finish}`);
        return Promise.resolve(tokens.filter((token) => token % 2 === 0).length / tokens.length);
      };
      const found = await learner.grpo(given, { reward, steps: 2, batchSize: 4, groupSize: 4, maxNewTokens: 6, numIterations: 2, learningRate: 0.02, adamEpsilon: 0.01, seed: 11, epsilon: 0.1, stopTokenIds: [5] });
      near(found.map(({ meanReward }) => meanReward), steps.map(({ meanReward }) => meanReward), "rewards", 1e-7); // the same samples
      for (const name of ["loss", "gradNorm"]) near(found.map((step) => step[name]), steps.map((step) => step[name]), name, 1e-4);
    });
    loaded.close();
  });
}

test("GRPO raises a simple reward", async () => {
  await withLearner(engine, TRAINED, async (learner) => {
    const reward = ({ tokens }) => tokens.filter((token) => token < 100).length / tokens.length;
    const found = await learner.grpo([{ prompt: [3, 9, 4] }], { reward, steps: 12, batchSize: 2, groupSize: 8, maxNewTokens: 6, learningRate: 0.02 });
    const [first, last] = [found[0].meanReward, found.at(-1).meanReward];
    assert.ok(last > first + 0.3, `${found.map(({ meanReward }) => meanReward)}`);
  });
});

for (const file of ["q4_0.gguf", "folder"]) {
  test(`${file}: native Whet samples and learns with saved adapters, and PEFT loads them`, async () => {
    const loaded = await load(file);
    const folder = await mkdtemp(join(tmpdir(), "whet-adapter-"));
    try {
      await withLearner(loaded, { rank: 8, alpha: 12 }, async (learner) => {
        await learner.sft(rows, { steps: 2, learningRate: 0.01 });
        const { files } = await learner.toPeft();
        for (const [name, bytes] of Object.entries(files)) await writeFile(join(folder, name), bytes);
        const program = "import json, sys; from web.test.learner_fixtures import read_adapter; print(json.dumps(read_adapter(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))";
        const model = fileURLToPath(new URL(file, FIXTURES));
        const native = JSON.parse(execFileSync("python", ["-c", program, model, folder, JSON.stringify(rows)], { cwd: "..", env: { ...process.env, PYTHONPATH: "." } }));
        assert.equal(native.peft, file === "folder" ? true : null); // PEFT reads models in folders
        assert.deepEqual(native.modules, [...(await learner.gradients()).keys()]);
        nearRows(await learner.logprobs(rows), native.learner, "log-probs of the learner");
        const adapter = await learner.sync();
        for (const [i, { prompt, completion }] of rows.entries()) assert.deepEqual(bits(await loaded.logprobs([...prompt, ...completion], { adapter })), bits(native.engine[i]));
      });
    } finally {
      loaded.close();
      await rm(folder, { recursive: true });
    }
  });
}

test("an aborted run keeps the steps so far, and the learner goes on", async () => {
  await withLearner(engine, TRAINED, async (learner) => {
    const controller = new AbortController();
    const seen = [];
    const onProgress = ({ step }) => seen.push(step) === 2 && controller.abort();
    await assert.rejects(learner.sft(rows, { steps: 50, onProgress, signal: controller.signal }), { name: "AbortError" });
    assert.deepEqual(seen, [1, 2]);
    assert.ok([...(await learner.gradients()).values()].every(({ a, b }) => [...a, ...b].every((x) => x === 0)));
    const reward = () => 1;
    const aborted = learner.grpo([{ prompt: [3] }], { reward, maxNewTokens: 400, signal: AbortSignal.timeout(50) });
    await assert.rejects(learner.sft(rows), mentions("WhetError: Learner.sft", "in progress", "abort"));
    await assert.rejects(aborted, { name: "TimeoutError" });
    await assert.rejects(learner.sft(rows, { signal: AbortSignal.abort() }), { name: "AbortError" });
    assert.equal((await learner.sft(rows, { steps: 1 })).length, 1);
  });
});

test("a batch that is out of memory is an error with its sizes, and smaller batches are learnt", async () => {
  const loaded = await load("f32.gguf", { kvBytes: 4.1e9 });
  await withLearner(loaded, TRAINED, async (learner) => {
    const long = Array.from({ length: 64 }, (_, i) => ({ prompt: [i], completion: Array(500).fill(i) }));
    const message = mentions("OutOfMemoryError: Learner.sft", "MB of 4295 MB", "32000 tokens", "maxTokensPerStep");
    await assert.rejects(learner.sft(long, { batchSize: 64, maxTokensPerStep: 0 }), message);
    assert.equal((await learner.sft(long, { batchSize: 2, steps: 1 })).length, 1);
  });
  loaded.close();
});

test("invalid arguments are rejected with their name, value and range", async () => {
  const plain = await Engine.load(new URL("f32.gguf", FIXTURES), { threads: 1 });
  await assert.rejects(plain.learner(), mentions("WhetError: Engine.learner", "learning: true"));
  plain.close();
  await assert.rejects(load("f32.gguf", { learning: 1 }), mentions("Engine.load", "learning", 1, "true or false"));
  await assert.rejects(engine.learner({ rank: 0 }), mentions("Engine.learner", "rank is 0", ">= 1"));
  await assert.rejects(engine.learner({ rank: 257 }), mentions("Engine.learner", "rank is 257", "x 256", "at most 256"));
  await assert.rejects(engine.learner({ alpha: -1 }), mentions("alpha", -1, "> 0"));
  await assert.rejects(engine.learner({ targets: ["q_prj"] }), mentions("targets", "q_prj", "q_proj"));
  await assert.rejects(engine.learner({ targets: ["lm_head"] }), mentions("targets", "lm_head", "down_proj"));
  await assert.rejects(engine.learner({ ranks: 4 }), mentions("setting ranks.", "rank, alpha, targets, seed"));
  await assert.rejects(engine.learner({ adapter: adapterFiles("f32.gguf-adapter"), rank: 4 }), mentions("rank is 4", "determines"));
  await withLearner(engine, TRAINED, async (learner) => {
    const reward = () => 1;
    const fails = (run, ...texts) => assert.rejects(async () => run(), mentions("WhetError: Learner.", ...texts));
    await assert.rejects(engine.learner(), mentions("Engine.learner", "has a learner already", "learner.close()"));
    await fails(() => learner.sft(), "sft", "rows", undefined, "prompt, completion");
    await fails(() => learner.sft([]), "sft", "rows is []", "at least one");
    await fails(() => learner.sft([rows[0], { prompt: "a" }]), "rows[1]", '{"prompt":"a"}', "no completion");
    await fails(() => learner.sft([{ prompt: "a", completion: "" }]), "rows[0]", "no completion");
    await fails(() => learner.sft([{ prompt: [1], completion: "a" }]), "rows[0]", "token ids", "text");
    await fails(() => learner.sft([{ prompt: [1], completion: [1e6] }]), "rows[0]", 1e6, "tokenizer");
    await fails(() => learner.sft([{ prompt: [1], completion: Array(600).fill(1) }]), "rows[0]", 601, 512, "contextLength");
    await fails(() => learner.sft(rows, { learningRate: -1 }), "learningRate is -1", ">= 0");
    await fails(() => learner.sft(rows, { stpes: 1 }), "unknown setting stpes", "steps");
    await fails(() => learner.sft(rows, { steps: 0 }), "steps is 0", ">= 1");
    await fails(() => learner.sft(rows, { onProgress: 1 }), "onProgress is 1", "function");
    await fails(() => learner.sft(rows, { signal: 1 }), "signal is 1", "AbortSignal");
    await fails(() => learner.sft(rows, null), "options is null", "object");
    await fails(() => learner.grpo([{}], { reward }), "rows[0]", "no prompt");
    await fails(() => learner.grpo(rows, {}), "reward is undefined", "function");
    await fails(() => learner.grpo(rows, { reward, groupSize: 1 }), "groupSize is 1", ">= 2");
    await fails(() => learner.grpo(rows, { reward, temperature: 0 }), "temperature is 0", "> 0");
    await fails(() => learner.grpo(rows, { reward, beta: 1 }), "unknown setting beta", "groupSize");
    for (const value of [NaN, Infinity, "1", undefined, [1]]) {
      await fails(() => learner.grpo(rows, { reward: () => value, maxNewTokens: 2 }), "reward returned", value === "1" ? '"1"' : Array.isArray(value) ? "[1]" : value, "rows[0]", "finite number");
    }
    await assert.rejects(learner.grpo(rows, { reward: () => Promise.reject(new RangeError("mine")), maxNewTokens: 2 }), { name: "RangeError", message: "mine" });
    await fails(() => learner.logprobs(rows, { temperature: 0 }), "logprobs", "temperature is 0", "1e30");
    await fails(() => learner.logprobs(rows, { adapter: 1 }), "option adapter.", "temperature, adapters");
    await fails(() => learner.backward([[1]]), "backward", "logprobs()", "once");
    await learner.logprobs(rows);
    await fails(() => learner.backward([[1]]), "backward", 1, completions.flat().length);
    await fails(() => learner.backward([[NaN]]), "backward", "NaN");
    await fails(() => learner.step({ adamBeta1: 1 }), "step", "adamBeta1 is 1", "[0, 1)");
    await fails(() => learner.save("a/b"), "save", '"a/b"', "letters");
    await fails(() => learner.save("a"), "save", "private file system", "toPeft()");
  });
  await assert.rejects(openAdapter("a"), mentions("openAdapter", "private file system"));
  const closed = await engine.learner(TRAINED);
  await closed.close();
  await assert.rejects(closed.sft(rows), mentions("Learner.sft", "closed", "engine.learner()"));
});
