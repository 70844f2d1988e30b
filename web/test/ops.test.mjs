// Primitives and kernels against the native ones: bit-identical if the module has a fused multiply-add.
import assert from "node:assert/strict";
import { test } from "node:test";
import { MicroLoRA, Ops } from "../dist/ops.js";
import { readFixture } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";

const f = await readFixture("ops");
const ops = await Ops.load();
const numbers = (name) => Float32Array.from(f[name], (x) => x ?? NaN);

function same(found, name, tolerance = 9e-6) {
  const expected = numbers(name);
  assert.equal(found.length, expected.length);
  if (ops.exact && tolerance < 1e-5) return assert.deepEqual(new Uint32Array(Float32Array.from(found).buffer), new Uint32Array(expected.buffer), name);
  for (const [i, x] of found.entries()) assert.ok(Math.abs(x - expected[i]) <= tolerance * Math.max(1, Math.abs(expected[i])), `${name}[${i}] is ${x}, expected ${expected[i]}`);
}

test("group advantages", () => {
  same(ops.computeBatchGroupAdvantages(numbers("rewards"), 5), "groups");
  same(ops.computeBatchGroupAdvantages(numbers("rewards"), 5, { ddof: 1, eps: 1e-4 }), "trl");
  same(ops.computeBatchGroupAdvantages(numbers("rewards"), 5, { scale: "batch" }), "batch");
  same(ops.computeBatchGroupAdvantages(numbers("rewards").slice(0, 34), 2), "pairs");
});

test("token KL, log-probs and GAE", () => {
  same(ops.computeBatchTokenKl(numbers("p"), numbers("q"), 37, { mask: f.mask }), "kl");
  same(ops.computeBatchTokenKlSchulman(numbers("p"), numbers("q"), 37), "schulman");
  const { logprobs, entropy } = ops.computeTokenLogprobs(numbers("logits"), f.tokens, { temperature: 0.7 });
  same(logprobs, "logprobs");
  same(entropy, "entropy");
  const { advantages, returns } = ops.computeGae(numbers("r2"), numbers("v2"), f.dones, [0.5, -1], 0.97, 0.9, 19);
  same(advantages, "advantages");
  same(returns, "returns");
});

test("packing", () => assert.deepEqual(ops.packSequences(f.lengths, 100), f.bins));

test("norms, activations and products", () => {
  const [x, weight, bias] = ["x", "weight", "bias"].map(numbers);
  same(ops.rmsNorm(x, weight), "rms");
  same(ops.layerNorm(x, weight, bias), "norm");
  same(ops.softmax(x, { columns: 83 }), "softmax");
  same(ops.logSoftmax(x, { columns: 83 }), "log_softmax");
  same(ops.silu(x), "silu");
  same(ops.gelu(x), "gelu");
  const reversed = Float32Array.from({ length: x.length }, (_, i) => x[(3 - Math.floor(i / 83)) * 83 + (i % 83)]);
  same(ops.swiglu(x, reversed), "swiglu");
  same(ops.gemv(x, weight), "gemv");
});

test("attention and rotation", () => {
  const shape = { heads: 4, kvHeads: 2, headDim: 40 };
  const [q, k, v] = ["q3", "k3", "v3"].map(numbers);
  same(ops.attention(q, k, v, shape), "attention");
  same(ops.attention(q, k, v, { ...shape, window: 7 }), "window");
  same(ops.decodeAttention(q.subarray(0, 160), k, v, shape), "decoded");
  same(ops.decodeAttention(q.subarray(0, 160), k, v, { ...shape, window: 6 }), "last_keys");
  assert.throws(() => ops.decodeAttention(q, k, v, shape), mentions("decodeAttention", "q", 1440, 160));
  same(ops.applyRope(f.positions, numbers("heads"), 40, f.freqs), "rotated");
});

test("MicroLoRA: forward, gradients, and steps", () => {
  const lora = new MicroLoRA(ops, 83, 45, 3, { alpha: 6, a: numbers("lora_a"), b: numbers("lora_b") });
  const [x, y, grad] = ["x", "y", "grad"].map(numbers);
  same(lora.forward(x, y), "forward");
  lora.accumulate(x, grad);
  lora.accumulate(x.subarray(0, 83), grad.subarray(0, 45));
  lora.sgdStep(0.1);
  same(lora.a, "sgd_a");
  same(lora.b, "sgd_b");
  lora.accumulate(x, grad);
  lora.adamStep(0.01, { weightDecay: 0.1 });
  same(lora.a, "adam_a", 1e-5); // NumPy orders the operations differently
  same(lora.b, "adam_b", 1e-5);
});

test("invalid arguments are rejected by name, and the next call works", () => {
  const x = new Float32Array(8);
  assert.throws(() => ops.rmsNorm(x, new Float32Array(3)), mentions("WhetError: rmsNorm", 8, 3));
  assert.throws(() => ops.rmsNorm("x", null), mentions("rmsNorm", 'x is "x"'));
  assert.throws(() => ops.computeBatchGroupAdvantages(x, 3), mentions("computeBatchGroupAdvantages", 8, 3));
  assert.throws(() => ops.computeBatchGroupAdvantages(x, 4, { scale: "std" }), mentions("scale", "std", "group, batch or none"));
  assert.throws(() => ops.computeTokenLogprobs(x, [4, 9]), mentions("tokenIds", 4, 0, 3));
  assert.throws(() => ops.attention(x, x, x, { heads: 1, headDim: 8 }), mentions("headDim", 8, 32, 512));
  assert.throws(() => ops.computeGae(x, x, x, 0, 2, 1), mentions("gamma", 2, "[0, 1]"));
  assert.throws(() => ops.packSequences([5], 4), mentions("lengths", 5, 4));
  assert.throws(() => new MicroLoRA(ops, 8, 8, 9), mentions("rank", 9, 1, 8));
  assert.throws(() => new MicroLoRA(ops, 8, 8, 1).sgdStep(1), mentions("sgdStep", "accumulate"));
  same(ops.rmsNorm(numbers("x"), numbers("weight")), "rms");
});
