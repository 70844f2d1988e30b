// The task of the page: sums of two numbers below 20, of which 64 are held out. A learner trains on the others.
const N = 20;
const N_HELD_OUT = 64;
const TOKENS = 6; // of an answer

/** All sums, in an order that is the same on every page. */
const sums = Array.from({ length: N * N }, (_, i) => ({ a: Math.floor(i / N), b: i % N }));
let state = 1;
for (let i = sums.length - 1; i > 0; --i) {
  state = (state * 48271) % 2147483647; // Lehmer's generator (Park and Miller 1988)
  const j = state % (i + 1);
  [sums[i], sums[j]] = [sums[j], sums[i]];
}
const questions = sums.map(({ a, b }) => ({ prompt: `${a} + ${b} =`, completion: ` ${a + b}`, sum: a + b }));
const heldOut = questions.slice(0, N_HELD_OUT);
const trained = questions.slice(N_HELD_OUT);

/** Whether the first number of an answer is the sum. */
const isRight = (text, sum) => Number(/\d+/.exec(text)?.[0] ?? NaN) === sum;

/** Return the share of held-out sums that the engine answers correctly with an adapter. */
export async function measureAccuracy(engine, adapter, signal) {
  const answers = heldOut.map(async ({ prompt, sum }) => {
    let text = "";
    for await (const token of engine.generate(prompt, { temperature: 0, maxNewTokens: TOKENS, adapter, signal })) text += token.text;
    return isRight(text, sum);
  });
  return (await Promise.all(answers)).filter(Boolean).length / N_HELD_OUT;
}

/** Train a learner by SFT on right answers, or by GRPO, which only gets to know whether its own answers are right. */
export const WAYS = {
  sft: { curve: "Loss", valueOf: ({ loss }) => loss, run: (learner, options) => learner.sft(trained, { ...options, batchSize: 16, learningRate: 2e-3 }) },
  grpo: {
    curve: "Mean reward",
    valueOf: ({ meanReward }) => meanReward,
    run: (learner, options) => learner.grpo(trained, { ...options, batchSize: 4, groupSize: 8, learningRate: 1e-4, maxNewTokens: TOKENS, reward: ({ text }, { sum }) => Number(isRight(text, sum)) }),
  },
};

/** Draw a value per step, of all steps to come, from 0 to the maximum, or to 1 if that is more. */
export function drawCurve(svg, name, values, steps) {
  const most = Math.max(1, ...values);
  const points = values.map((y, i) => `${40 + (590 * (i + 1)) / steps},${155 - (145 * y) / most}`);
  const labels = [most.toFixed(1), "0", `step ${values.length} of ${steps}`, name];
  for (const [i, text] of svg.querySelectorAll("text").entries()) text.textContent = labels[i];
  svg.querySelector("polyline").setAttribute("points", points.join(" "));
  svg.querySelector("title").textContent = `${name}: ${values.at(-1)?.toFixed(2) ?? "none"} at step ${values.length} of ${steps}.`;
}
