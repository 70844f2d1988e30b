// Parts of the learner against Python's: losses, batches, and NumPy's random numbers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { packBatch, splitMicroBatches } from "../../src/learner/batch.ts";
import { groupAdvantages, grpoLoss, importanceWeights, sftLoss } from "../../src/learner/losses.ts";
import { seedWords, uniforms } from "../../src/learner/random.ts";
import { readFixture } from "../fixtures.mjs";

const { prompts, completions, batch, random, losses } = await readFixture("learner");
const rows = prompts.map((prompt, i) => ({ prompt, completion: completions[i] }));
const close = (found, expected) => {
  assert.equal(found.length, expected.length);
  for (const [i, x] of expected.entries()) assert.ok(Math.abs(found[i] - x) <= 2e-7 * (1 + Math.abs(x)), `${i}: ${found[i]}, expected ${x}`);
};
const floats = Object.fromEntries(Object.entries(losses).map(([name, values]) => [name, Array.isArray(values) ? Float32Array.from(values) : values]));
const { old, logprobs, sampler, advantages, weights, rewards } = floats;

test("the loss of SFT, and its gradient, equal sft_loss", () => {
  const { value, gradient } = sftLoss(logprobs, 97);
  close([value], [losses.sftValue]);
  close(gradient, losses.sft);
});

test("the loss of GRPO, and its gradient, equal grpo_loss with clipping and importance weights", () => {
  close(importanceWeights(old, sampler, 1.5), losses.weights);
  const { value, gradient } = grpoLoss(logprobs, { old, advantages, weights }, 0.2, 97);
  close([value], [losses.grpoValue]);
  close(gradient, losses.grpo);
  assert.ok(gradient.some((x) => x === 0) && gradient.some((x) => x !== 0)); // some tokens are clipped
});

test("advantages equal compute_batch_group_advantages, and are 0 in a group of equal rewards", () => {
  const found = [0, 4].flatMap((at) => groupAdvantages([...rewards.subarray(at, at + 4)]));
  close(found, losses.groups);
  assert.deepEqual(found.slice(4), [0, 0, 0, 0]);
});

test("a batch of rows in any order equals pack_batch of the sorted rows", () => {
  const names = { tokens: "input_ids", positions: "position_ids", groupOffsets: "group_offsets", qOffsets: "q_offsets", kOffsets: "k_offsets", keyRows: "key_rows", readerOffsets: "reader_offsets", readers: "readers", predictors: "hidden_rows", targets: "targets" };
  const all = completions.flat();
  for (const order of [rows, [...rows].reverse()]) {
    const found = packBatch(order);
    for (const [name, python] of Object.entries(names)) assert.deepEqual(found[name], batch[python], name);
    const flat = order.flatMap(({ completion }) => completion);
    assert.deepEqual(found.places.map((place) => flat[place]), batch.targets);
    assert.deepEqual([...found.places].sort((a, b) => a - b), all.map((_, i) => i));
  }
});

test("micro-batches have at most maxTokens packed tokens, and every row once", () => {
  for (const most of [1, 8, 12, Infinity]) {
    const parts = splitMicroBatches(rows, most);
    assert.deepEqual(parts.flat(), rows);
    for (const part of parts) assert.ok(part.length === 1 || packBatch(part).tokens.length <= most, `${packBatch(part).tokens.length} tokens`);
  }
  assert.ok(splitMicroBatches(rows, 12).length < rows.length);
});

test("random numbers equal NumPy's", () => {
  for (const { seed, words, uniforms: expected } of random) {
    assert.deepEqual(seedWords([BigInt(seed), 3n], 4), words);
    assert.deepEqual(Array.from({ length: 5 }, uniforms(BigInt(seed))), expected);
  }
});
