// Whet's engine: samples at temperature 1 with log-probs, as in the native benchmark.
import { Engine } from "/whet/index.js";
import { timed } from "./timed.js";

let engine;

export const info = () => engine.info();

export async function load({ url, threads, contextLength, isStreamed }) {
  const source = isStreamed ? url : await (await fetch(url)).blob();
  const began = performance.now();
  engine = await Engine.load(source, { threads, contextLength });
  return (performance.now() - began) / 1000;
}

export function generate({ ids, n }) {
  const sampling = { minNewTokens: n, maxNewTokens: n, temperature: 1 };
  return timed(engine.generate(ids, sampling), ({ token, logprob }) => ({ token, logprob }));
}

export const close = () => engine.close();
