// wllama: greedy, without a prompt cache and with a single sampler in the chain.
import { Wllama } from "/peers/@wllama/wllama/esm/index.min.js";
import { timed } from "./timed.js";

let wllama;
const quiet = { debug() {}, log() {}, warn: console.warn, error: console.error };

export async function load({ url, threads, contextLength }) {
  wllama = new Wllama({ default: "/peers/@wllama/wllama/esm/wasm/wllama.wasm" }, { logger: quiet });
  const blob = await (await fetch(url)).blob();
  const began = performance.now();
  await wllama.loadModel([blob], { n_ctx: contextLength, n_threads: threads, n_gpu_layers: 0, n_parallel: 1 });
  return (performance.now() - began) / 1000;
}

export async function generate({ text, n }) {
  const stream = await wllama.createCompletion({
    prompt: text, stream: true, max_tokens: n, temperature: 0, top_k: 1, samplers: ["top_k"], ignore_eos: true, cache_prompt: false, logprobs: 1,
  });
  return timed(stream, ({ choices }) => {
    const token = choices[0]?.logprobs?.content[0]; // the last chunk has none
    return token && { token: token.id, logprob: token.logprob };
  });
}

export const close = () => wllama.exit();
